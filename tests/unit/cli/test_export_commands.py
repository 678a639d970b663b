"""`export`, `import` and `audit` on the command line: folders, exit codes, one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import CheckpointContent, Ledger, RunIdentity, save_checkpoint
from dflash.cli import main
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from dflash.model.drafter import Drafter
from dflash.model.export import import_drafter
from dflash.records import LedgerEntry
from dflash.train.inputs import initial_state, open_inputs
from dflash.train.optimizer import build_optimizer, optimizer_tensors
from tests.support.tiny_run import MASK_TOKEN_ID, TinyRun, build_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with one durable checkpoint, without having trained."""
    tiny = build_tiny_run(tmp_path_factory.mktemp("exported"))
    drafter = Drafter(tiny.config.drafter, target_hidden_size=16)
    drafter.init_weights(3)
    moments = optimizer_tensors(drafter, build_optimizer(drafter, tiny.config.train.optimizer, lr=0.1))
    inputs = open_inputs(tiny.config, tiny.paths)
    with inputs.store:
        state = initial_state(inputs, segment=0)
    identity = RunIdentity(data_fingerprint="d" * 64, target_fingerprint="t" * 64, mask_token_id=MASK_TOKEN_ID)
    content = CheckpointContent(state, identity, {n: v.detach() for n, v in drafter.named_parameters()}, moments)
    save_checkpoint(tiny.paths.checkpoints_dir, content, created_at="2026-01-01T00:00:00+00:00", on_operation=lambda _: None)
    ledger = Ledger(tiny.paths.ledger)
    for state_name in ("writing", "durable"):
        ledger.append(LedgerEntry(step=0, segment=0, state=state_name, at="2026-01-01T00:00:00+00:00", reason="test"))
    return tiny


def called(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = EXIT_OK) -> Any:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("layout", ["zlab", "speculators", "transformers"])
def test_a_run_and_its_checkpoint_are_exported_in_every_layout(
    layout: str, run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = load_file(run.paths.checkpoint(0) / "drafter.safetensors")
    for name, source in (("run", run.paths.root), ("checkpoint", run.paths.checkpoint(0))):
        done = called(capsys, "export", source, "--layout", layout, "--output", tmp_path / name)
        assert done == {"folder": str(tmp_path / name), "layout": layout, "dtype": "float32", "step": 0}
        again = import_drafter(tmp_path / name, tables=None)
        assert all(torch.equal(value, again.drafter.state_dict()[key]) for key, value in wanted.items())
        report = called(capsys, "audit", tmp_path / name, "--target", run.config.target.path)
        assert report["passed"], report
    done = called(capsys, "export", run.paths.root, "--layout", layout, "--output", tmp_path / "run", "--dtype", "bfloat16")
    assert done["dtype"] == "bfloat16"
    assert import_drafter(tmp_path / "run", tables=None).dtype == "bfloat16"


def test_speculators_becomes_zlab_and_every_bit_stays(run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called(capsys, "export", run.paths.root, "--layout", "speculators", "--output", tmp_path / "s", "--dtype", "bfloat16")
    called(capsys, "import", tmp_path / "s", "--output", tmp_path / "z", "--target", run.config.target.path)
    called(capsys, "export", run.paths.root, "--output", tmp_path / "direct", "--dtype", "bfloat16")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "z" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_a_layout_that_says_less_needs_the_target(run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called(capsys, "export", run.paths.root, "--layout", "transformers", "--output", tmp_path / "t")
    config = tmp_path / "t" / "config.json"
    raw = json.loads(config.read_text())
    raw.pop("num_target_layers")  # a key of our own, which others do not write
    config.write_text(json.dumps(raw))
    error = called(capsys, "import", tmp_path / "t", "--output", tmp_path / "z", code=EXIT_USER_ERROR)
    assert "number of the target's layers is not known" in error["what"]
    assert "--target" in error["remedy"]
    assert not (tmp_path / "z").exists()
    called(capsys, "import", tmp_path / "t", "--output", tmp_path / "z", "--target", run.config.target.path)
    error = called(capsys, "import", tmp_path / "z", "--layout", "speculators", "--output", tmp_path / "s", code=EXIT_USER_ERROR)
    assert "the target is not at hand" in error["what"]


def test_the_audit_exits_with_1_and_names_everything(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder's name is never broken over two lines, so it has to be short
    called(capsys, "export", run.paths.root, "--output", tmp_path / "z")
    tensors = load_file(tmp_path / "z" / "model.safetensors")
    tensors["renamed.weight"] = tensors.pop("norm.weight")
    save_file(tensors, tmp_path / "z" / "model.safetensors")
    report = called(capsys, "audit", tmp_path / "z", "--target", "demo", code=EXIT_USER_ERROR)
    failed = {check["name"] for check in report["checks"] if check["status"] == "fail"}
    assert failed == {"tensors", "vocabulary", "hidden size", "target layers"}
    assert main(["audit", "z"]) == EXIT_USER_ERROR
    out = capsys.readouterr().out
    assert "missing norm.weight; unknown renamed.weight" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["export", "{tmp}", "--output", "{tmp}/out"], "is no run with a durable checkpoint"),
        (["import", "{tmp}", "--output", "{tmp}/out"], "cannot be read"),
        (["import", "{zlab}", "--output", "{tmp}/out", "--target", "demo"], "belongs to another target"),
        (["import", "{zlab}", "--output", "{run}"], "holds other files than an export"),
    ],
)
def test_wrong_folders_are_one_clear_error(
    arguments: list[str], named: str, run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zlab = tmp_path / "zlab"
    called(capsys, "export", run.paths.root, "--output", zlab)
    places = {"tmp": tmp_path, "zlab": zlab, "run": run.paths.root}
    error = called(capsys, *(part.format(**places) for part in arguments), code=EXIT_USER_ERROR)
    assert named in error["what"]
    assert error["remedy"]
    assert not (tmp_path / "out").exists()
