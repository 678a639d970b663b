"""The build script: a whole ordinary Hugging Face folder or nothing, reproducible, with an honest report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from dflash.demo import build_target
from dflash.demo.build_target import REPORT_NAME, build, save_target
from dflash.demo.recipe import SHIPPED_RECIPE

TINY = dataclasses.replace(
    SHIPPED_RECIPE, steps=4, warmup_steps=1, batch_tokens=512, step_conversations=8, pool_conversations=64,
    tokenizer_conversations=300,
    heldout_conversations=40, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=64,
    checkpoint_every_steps=2,
)  # fmt: skip

FOLDER_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    REPORT_NAME,
}


def digests(folder: Path) -> dict[str, str]:
    names = FOLDER_FILES - {REPORT_NAME}  # the report holds a duration
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build") / "target"
    build(TINY, out=folder, checkpoint_dir=folder.parent / "checkpoints")
    return folder


def test_folder_is_complete_and_loads_by_the_ordinary_path(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == FOLDER_FILES
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert [path.name for path in built.parent.iterdir() if path.name.startswith(".")] == []


def test_report_tells_recipe_work_and_rates(built: Path) -> None:
    report = json.loads((built / REPORT_NAME).read_text())
    assert report["recipe"] == dataclasses.asdict(TINY)
    assert report["steps_done"] == 4
    assert report["training_conversations"] == 4 * 8
    assert 4 * 8 * 20 < report["training_padded_tokens"] < 4 * 8 * 256
    assert report["heldout_answers"] >= 40
    rates = report["heldout_exact_frac_by_kind"]
    assert all(0.0 <= rate <= 1.0 for rate in rates.values())
    assert len(rates) >= 7


def test_intermediate_targets_are_complete_too(built: Path) -> None:
    folder = built.parent / "checkpoints" / "step-2"
    assert json.loads((folder / REPORT_NAME).read_text())["steps_done"] == 2
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert not (folder.parent / "step-4").exists()


def test_same_recipe_builds_the_same_bytes(built: Path, tmp_path: Path) -> None:
    build(TINY, out=tmp_path / "again", checkpoint_dir=None)
    assert digests(tmp_path / "again") == digests(built)
    build(dataclasses.replace(TINY, seed=TINY.seed + 1), out=tmp_path / "other", checkpoint_dir=None)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(built)["model.safetensors"]


def test_a_failed_save_leaves_the_old_folder_untouched(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(built)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(built), AutoTokenizer.from_pretrained(built)

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(build_target, "save_tokenizer", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_target(built, model=model, tokenizer=tokenizer, report={})
    assert digests(built) == before


def test_command_line_needs_an_output_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["build_target"])
    with pytest.raises(SystemExit) as stopped:
        build_target.main()
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err
