"""Publishing: the folder is the checkpoint's drafter and no more, passes its audit or never appears, and tells no secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dflash.checkpoint import BEST, point_to, remove_pointer
from dflash.cli import main
from dflash.errors import DrafterError
from dflash.model.export import import_drafter
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import read_target_info
from dflash.stages import publish as publish_module
from dflash.stages import published as published_module
from dflash.stages.publish_audit import check_folder, require_passed
from dflash.stages.published import measure_published
from dflash.stages.run import Run

BASE_MODEL = "owner/demo-target"


@pytest.fixture(scope="module")
def published(evaluated_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published once by the command line; only read by the tests."""
    folder = tmp_path_factory.mktemp("published") / "drafter"
    assert main(["publish", str(evaluated_run.paths.root), "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def decoded(evaluated_run: Run, published: Path) -> Any:
    """The audit's decoding of the published folder, done once."""
    return measure_published(evaluated_run, published, progress=lambda *_: None)


@pytest.fixture
def quick(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which decoding is not the point: every folder decodes like the published one."""
    monkeypatch.setattr(publish_module, "measure_published", lambda *_arguments, **_more: decoded)


def called(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["publish", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Header and body."""
    _, header, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(header), body


@pytest.mark.parametrize("layout", ["zlab", "speculators", "transformers"])
def test_a_published_folder_is_the_checkpoint_and_nothing_else(
    layout: str, evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = called(capsys, evaluated_run.paths.root, "--layout", layout, "--output", tmp_path / "out")
    assert (done["step"], done["layout"], done["dtype"]) == (60, layout, "float32")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "who may read one of the files may read all"
    tables = frozen_tables(Path(read_target_info(evaluated_run.config.target).location))
    stored = import_drafter(tmp_path / "out", tables=tables).drafter.state_dict()
    wanted = load_file(evaluated_run.paths.checkpoint(60) / "drafter.safetensors")
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], value) for name, value in wanted.items())
    assert done["checks"][-1]["name"] == "decoding"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no half-built folder is left beside it"
    assert main(["audit", str(tmp_path / "out"), "--target", "demo"]) == 0


@pytest.mark.usefixtures("quick")
def test_bfloat16_is_the_checkpoint_rounded_once(evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called(capsys, evaluated_run.paths.root, "--dtype", "bfloat16", "--output", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(evaluated_run.paths.checkpoint(60) / "drafter.safetensors")
    assert all(torch.equal(stored[name], value.to(torch.bfloat16)) for name, value in wanted.items())


def test_the_card_tells_licence_data_training_figures_and_limits(evaluated_run: Run, published: Path) -> None:
    header, body = card_of(published)
    assert header == {
        "license": "apache-2.0",
        "base_model": BASE_MODEL,
        "library_name": "dflash",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "block-diffusion", "draft-model"],
    }
    result = json.loads((evaluated_run.paths.eval_dir / "trained-step-60" / "result.json").read_text())
    low, high = result["acceptance_ci"]
    assert f"| {result['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) |" in body
    (prompt_set,) = result["prompt_sets"]
    (own,) = result["slices"]["dataset"].values()
    assert f"| {prompt_set['name']} | {own['acceptance_length']:.2f} (" in body
    *_, longest = result["slices"]["context_tokens"].values()
    assert f"the longest contexts measured here have {longest['from_tokens']} to {longest['to_tokens']} tokens" in body
    data = json.loads(evaluated_run.paths.data_pointer.read_text())
    for fact in (
        prompt_set["sha256"],
        data["fingerprint"],
        "adamw, betas 0.9 and 0.95",
        "cosine",
        "| seed | 20260 |",
        "Measured 20",
    ):
        assert fact in body
    assert '"num_speculative_tokens": 7' in body
    assert "vllm serve owner/demo-target" in body
    assert "--speculative-num-draft-tokens 8" in body, "SGLang counts the whole block"
    titles = [line for line in body.splitlines() if line.startswith("## ")]
    assert titles == [
        "## What it reaches", "## How to serve it", "## What it was trained on", "## How it was trained", "## What was checked",
        "## Limits",
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_the_best_checkpoint_is_meant_where_one_is_pointed_to_and_it_must_have_been_evaluated(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = evaluated_run.paths.checkpoints_dir
    point_to(directory, BEST, 40)
    try:
        error = called(capsys, evaluated_run.paths.root, "--output", tmp_path / "out", code=1)
    finally:
        remove_pointer(directory, BEST)
    assert "step-40" in error["what"]
    assert error["remedy"].startswith("python -m dflash evaluate ")
    assert not list(tmp_path.iterdir())
    done = called(capsys, evaluated_run.paths.checkpoint(60), "--output", tmp_path / "out")
    assert done["step"] == 60


def test_an_evaluation_of_what_the_checkpoint_was_before_is_none(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash.stages import card_facts

    before = card_facts.read_manifest
    monkeypatch.setattr(card_facts, "read_manifest", lambda path: replace(before(path), created_at="2999-01-01T00:00:00+00:00"))
    error = called(capsys, evaluated_run.paths.root, "--output", tmp_path / "out", code=1)
    assert "written again" in error["what"]


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("publish.license=null", "publish.license is not set"),
        ("publish.license=Apache 2", "publish.license"),
        ("publish.base_model=null", "publish.base_model is not set"),
        ("publish.base_model=/models/mine", "publish.base_model"),
        ("train.lr=3", "no key of the publish section"),
    ],
)
def test_what_only_a_person_can_know_is_asked_for(
    override: str, word: str, evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = called(capsys, evaluated_run.paths.root, override, "--output", tmp_path / "out", code=1)
    assert word in error["what"]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_publishing_again_replaces_a_published_folder_and_no_other(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    called(capsys, evaluated_run.paths.root, "--output", out)
    called(capsys, evaluated_run.paths.root, "publish.license=mit", "--output", out)
    assert card_of(out)[0]["license"] == "mit"
    (out / "README.md").unlink()
    error = called(capsys, evaluated_run.paths.root, "--output", out, code=1)
    assert "something else than a published drafter" in error["what"]


def test_a_folder_with_a_readme_and_work_of_somebody_is_never_replaced(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("my project")
    (tmp_path / "thesis.tex").write_text("years of work")
    error = called(capsys, evaluated_run.paths.root, "--output", tmp_path, code=1)
    assert "something else than a published drafter" in error["what"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_published_drafter_decoded_with_other_settings_leaves_the_first_result_alone(
    evaluated_run: Run, published: Path, decoded: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(published_module, "measure_published", lambda *_arguments, **_more: decoded)
    monkeypatch.setattr(published_module, "write_evaluation", lambda _evaluation, folder: written.append(folder))
    command = ["evaluate", str(evaluated_run.paths.root), "--drafter", str(published)]
    for settings in ([], ["--set", "evaluate.max_new_tokens=3"], ["--set", "evaluate.max_new_tokens=4"]):
        assert main([*command, *settings]) == 0
    capsys.readouterr()
    own, *others = (folder.name for folder in written)
    assert own == f"published-{published.name}"
    assert len({own, *others}) == 3 and all(name.startswith(f"{own}-with-") for name in others)


def change_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        if value is None:
            del raw[key]
        else:
            raw[key] = value
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def add_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"import os") and None


def nest(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").mkdir()


def link(folder: Path) -> None:
    (folder / "model-00001-of-00001.safetensors").symlink_to(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tamper", "word"),
    [
        (change_weight, "weights: not the checkpoint's: norm.weight"),
        (drop_weight, "missing norm.weight"),
        (add_file("modeling_dflash.py"), "modeling_dflash.py"),
        (add_file("pytorch_model.bin"), "pytorch_model.bin"),
        (add_file("model.safetensors.py"), "model.safetensors.py"),
        (nest, "model-00001-of-00002.safetensors"),
        (link, "model-00001-of-00001.safetensors"),
        (lambda folder: (folder / "config.json").chmod(0o755), "config.json"),
        (change_config("auto_map", {"AutoModel": "evil--code.Model"}), "auto_map"),
        (change_config("quantization_config", {"nested": [{"auto_map": 1}]}), "auto_map"),
        (change_config("rope_theta", None), "rope_theta"),
        (change_config("layer_types", None), "missing: layer_types"),
        (change_config("vocab_size", 300), "vocabulary"),
        (change_config("dtype", "bfloat16"), "config says bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_tampered_folder_is_refused(
    tamper: Callable[[Path], None], word: str, evaluated_run: Run, published: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(published, folder)
    weights = load_file(evaluated_run.paths.checkpoint(60) / "drafter.safetensors")
    target = read_target_info(evaluated_run.config.target)
    require_passed(check_folder(folder, weights=weights, target=target, tables=None), "out")
    tamper(folder)
    with pytest.raises(DrafterError) as refused:
        require_passed(check_folder(folder, weights=weights, target=target, tables=None), "out")
    assert word in refused.value.what


def test_a_folder_that_does_not_decode_losslessly_never_appears(
    evaluated_run: Run,
    published: Path,
    decoded: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(published, out)
    before = (out / "README.md").read_bytes()
    broken = replace(decoded, result=replace(decoded.result, lossless=False, differing_prompts=1))
    monkeypatch.setattr(publish_module, "measure_published", lambda *_arguments, **_more: broken)
    error = called(capsys, evaluated_run.paths.root, "publish.license=mit", "--output", out, code=1)
    assert "not the tokens of plain decoding" in error["what"]
    assert (out / "README.md").read_bytes() == before, "what stood there stays"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("quick")
def test_no_local_path_and_no_secret_of_the_environment_is_told(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_planted_0123456789"
    monkeypatch.setenv("HF_TOKEN", secret)
    for layout in ("zlab", "speculators"):
        called(capsys, evaluated_run.paths.root, "--layout", layout, "--output", tmp_path / layout)
        for file in (tmp_path / layout).glob("*.[mj]*"):
            text = file.read_text(encoding="utf-8") if file.suffix in (".md", ".json") else ""
            assert secret not in text
            for place in (tmp_path, evaluated_run.paths.root, Path.cwd()):
                assert str(place) not in text
    root, out = evaluated_run.paths.root, tmp_path / "out"
    error = called(capsys, root, f"publish.tags=[{secret}]", "--output", out, code=1)
    assert "HF_TOKEN" in error["what"]
    assert secret not in json.dumps(error)
    for tag in ("~/models/mine", "see /srv_x/y_z/file"):
        error = called(capsys, root, f"publish.tags=[{json.dumps(tag)}]", "--output", out, code=1)
        assert "local path" in error["what"], tag
    assert not out.exists()


@pytest.mark.usefixtures("quick")
def test_a_card_goes_into_the_registry_with_the_version(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Path, list[str], dict[str, str]]] = []

    def noted(_run: Run, folder: Path, _checkpoint: Path, *, tags: dict[str, str]) -> None:
        seen.append((folder, sorted(path.name for path in folder.iterdir()), tags))

    monkeypatch.setattr(publish_module, "register_drafter", noted)
    called(capsys, evaluated_run.paths.root, "--output", tmp_path / "out")
    assert seen == [], "only where it is asked for"
    called(capsys, evaluated_run.paths.root, "--register", "--output", tmp_path / "out")
    assert seen == [(tmp_path / "out", ["README.md", "config.json", "model.safetensors"], {"published": "zlab"})]


def test_a_registry_that_is_off_is_told_before_anything_is_exported(
    evaluated_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = evaluated_run.config.model_copy(update={"tracking": evaluated_run.config.tracking.model_copy(update={"enabled": False})})
    monkeypatch.setattr(publish_module, "reopen_run", lambda *_arguments, **_more: replace(evaluated_run, config=off))
    error = called(capsys, evaluated_run.paths.root, "--register", "--output", tmp_path / "out", code=1)
    assert "there is no registry" in error["what"]
    assert not (tmp_path / "out").exists()
