"""`python -m dflash checkpoint`: states, stored tensors and reasons, of a run and of any folder of safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoint import BEST, LATEST, LATEST_CLEAN, Ledger, hold_probes, point_to
from dflash.cli import main
from dflash.config import dump_config, parse_config
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from dflash.records import ProbeFigures, ProbeRecord, RunPaths
from tests.support.checkpoints import entry, save_at
from tests.support.log_simulator import nonfinite, simulate_run, write_log


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run with three checkpoints: clean, clean, in probation."""
    run = RunPaths(tmp_path / "demo-001")
    run.checkpoints_dir.mkdir(parents=True)
    text = f"run: {{root: {tmp_path}}}\ntarget: {{mask_token: x}}\ndata: {{num_conversations: 3}}\n"
    run.config.write_text(dump_config(parse_config(text, origin="test")))
    ledger = Ledger(run.ledger)
    for step in (0, 20, 30):
        save_at(run.checkpoints_dir, step)
        for state in ("writing", "durable", "probation") + (("clean",) if step < 30 else ()):
            ledger.append(entry(step, state))  # type: ignore[arg-type]
    point_to(run.checkpoints_dir, LATEST, 30)
    point_to(run.checkpoints_dir, LATEST_CLEAN, 20)
    point_to(run.checkpoints_dir, BEST, 20)
    with hold_probes(run) as probes:
        figures = ProbeFigures(2.25, (2.0, 2.5), (9,), (4,), (0.5,), 1.0)
        probes.append(ProbeRecord(20, 0, "p", "measured", "", "", figures))
    return run


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, capsys.readouterr().out


def rewrite(file: Path, **changed: torch.Tensor) -> None:
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in changed.items()}, file)


def test_the_list_shows_state_size_and_pointers(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "list", paths.root)
    assert code == EXIT_OK
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1]) for row in rows] == [("0", "clean"), ("20", "clean"), ("30", "probation")]
    assert rows[1][-2:] == ["latest_clean,", "best"]
    assert [row[4] for row in rows] == ["-", "2.250", "-"]
    assert rows[2][-1] == "latest"
    assert max(map(len, out.splitlines())) <= 80
    listed = json.loads(run(capsys, "list", paths.root, "--json")[1])
    assert all(row["size_bytes"] > 0 for row in listed)


def test_sound_checkpoints_verify(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "verify", paths.root, "--json")
    result = json.loads(out)
    assert code == EXIT_OK
    assert result["passed"]
    assert [(c["name"], c["compared_with"]) for c in result["checkpoints"]] == [
        ("step-0", ""),
        ("step-20", ""),
        ("step-30", "step-20"),
    ]


def test_a_value_that_is_not_finite_is_found_although_no_hash_speaks(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    bare = paths.checkpoint(30)
    (bare / "manifest.json").unlink()
    rewrite(bare / "optimizer.safetensors", fc__weight__exp_avg=torch.tensor([[1.0, math.nan], [0.0, 1.0], [0.0, math.inf]]))
    code, out = run(capsys, "verify", bare)
    assert code == EXIT_USER_ERROR
    assert "optimizer.safetensors: fc.weight.exp_avg has 2 of 6 values that are not finite" in " ".join(out.split())


def test_a_flipped_byte_is_found_by_the_manifest(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    file = paths.checkpoint(20) / "drafter.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out = run(capsys, "verify", paths.root)
    assert code == EXIT_USER_ERROR
    assert "BAD  step-20" in out
    assert "SHA-256" in out
    assert "ok   step-30" in out, "nothing is compared with a damaged one"


def test_a_norm_jump_is_found_in_a_folder_of_other_peoples_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, scale in ((500, 1.0), (1000, 1.1), (1500, 6.0)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"a": torch.full((4,), scale), "b": torch.ones(4)}, folder / "model.safetensors")
    code, out = run(capsys, "verify", tmp_path)
    assert code == EXIT_USER_ERROR
    assert "ok   checkpoint-1000" in out
    assert "JUMP checkpoint-1500" in out
    assert "norm of a goes from 2.2 to 12 (5.45x)" in out
    assert "norm of b" not in out


def test_a_folder_without_tensors_and_a_missing_one_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", tmp_path)[0] == EXIT_USER_ERROR
    assert run(capsys, "verify", tmp_path / "none")[0] == EXIT_USER_ERROR
    assert run(capsys, "list", tmp_path)[0] == EXIT_USER_ERROR


def test_why_tells_what_the_log_says_of_each(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(paths.log, nonfinite(simulate_run(seed=3, steps=120, lr=lambda step: 1e-3), steps=range(90, 120), skipped=False))
    code, out = run(capsys, "why", paths.root)
    assert code == EXIT_OK
    assert "230 more records must be judged (up to 229)" in out, "without a check nothing is judged"
    from dflash.health import check_run
    from dflash.stages import reopen_run

    check_run(paths, reopen_run(paths.root).config, now_s=1.7e9, ended=True, remedy=lambda damage: None)
    code, out = run(capsys, "why", paths.root, "--step", 30)
    text = " ".join(out.split())
    assert text.startswith("step-30 probation: complete; too young")
    assert "110 more records must be judged (up to 229)" in text
    assert "(since step 90)" in text
    assert "step-20" not in text
    assert [e["step"] for e in json.loads(run(capsys, "why", paths.root, "--json")[1])] == [0, 20, 30]


def test_why_knows_no_checkpoint_that_never_was(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(paths.log, simulate_run(seed=3, steps=40, lr=lambda step: 1e-3))
    assert main(["checkpoint", "why", str(paths.root), "--step", "77"]) == EXIT_USER_ERROR
    assert "step-77" in capsys.readouterr().err
