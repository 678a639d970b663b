"""The audit names everything that is wrong with a published folder at once, and what engines would quietly tolerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import edit_config, edit_tensors, export_tiny, saved_target, shard
from model_fixtures import WIDTH, drafter_config, sliding_config
from safetensors.torch import load_file

from dflash.model.export_audit import audit_folder
from dflash.model.export_fields import LayoutName
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import TargetInfo
from dflash.records import CheckResult


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("audited") / "target")


def audit(folder: Path, info: TargetInfo | None) -> dict[str, CheckResult]:
    tables = None if info is None else frozen_tables(Path(info.location))
    return {result.name: result for result in audit_folder(folder, target=info, tables=tables)}


def bad(results: dict[str, CheckResult]) -> dict[str, str]:
    return {name: result.status for name, result in results.items() if result.status not in ("ok", "skip")}


@pytest.mark.parametrize("layout", ["zlab", "speculators", "transformers"])
def test_a_fresh_export_is_in_order(layout: LayoutName, info: TargetInfo, tmp_path: Path) -> None:
    config = sliding_config(sliding_causal=False, max_position_embeddings=256)
    folder = export_tiny(tmp_path / "out", config, info, layout=layout, dtype="bfloat16")
    results = audit(folder, info)
    assert bad(results) == {}
    assert all(result.message for result in results.values())
    if layout == "speculators":
        assert "equal the target's own" in results["tables"].message
        assert "not compared" in audit(folder, None)["tables"].message
    shard(folder, parts=2)
    assert "2 safetensors file(s)" in audit(folder, info)["files"].message


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda raw: raw.pop("block_size"), {"block size": "warn", "config keys": "warn"}),
        (lambda raw: raw["dflash_config"].pop("block_size"), {"block size": "warn"}),
        (lambda raw: raw.update(block_size=4), {"config": "fail"}),
        (lambda raw: raw.pop("tie_word_embeddings"), {"config keys": "warn"}),
        (lambda raw: raw.update(dtype="float16"), {"dtype": "warn"}),
        (lambda raw: raw.update(model_type="llama"), {"model type": "warn"}),
        (lambda raw: raw["dflash_config"].pop("causal"), {"causal": "warn"}),
        (lambda raw: raw["dflash_config"].update(mask_token_id=5000), {"config": "fail"}),
        (lambda raw: raw.update(vocab_size=64), {"vocabulary": "fail"}),
        (lambda raw: raw.update(num_target_layers=9), {"target layers": "fail"}),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[0, 3]), {"config": "fail"}),
        (lambda raw: raw.update(num_target_layers=9) or raw["dflash_config"].update(target_layer_ids=[0, 3]),
         {"target layers": "fail", "taps": "fail"}),
        (lambda raw: raw.update(use_sliding_window=True), {"window": "warn"}),
        (lambda raw: raw.update(rope_theta=500.0), {"rope": "warn"}),
        (lambda raw: raw.update(max_position_embeddings=128), {"rope": "warn"}),
        (lambda raw: raw.update(num_hidden_layers=3, layer_types=["full_attention"] * 3), {"tensors": "fail"}),
    ],
)  # fmt: skip
def test_every_wrong_key_is_found_and_nothing_else(
    edit: Callable[[dict[str, Any]], object], expected: dict[str, str], info: TargetInfo, tmp_path: Path
) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(max_position_embeddings=256), info, layout="zlab")
    edit_config(folder, edit)
    results = audit(folder, info)
    assert bad(results) == expected
    assert all(results[name].remedy for name in expected)


@pytest.mark.parametrize(
    ("edit", "expected", "named"),
    [
        (lambda tensors: tensors.pop("fc.weight"), {"tensors": "fail"}, "missing fc.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), {"tensors": "fail"}, "unknown extra"),
        (lambda tensors: tensors.update({"hidden": tensors.pop("hidden_norm.weight")}), {"tensors": "fail"}, "unknown hidden"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(WIDTH - 1)}), {"tensors": "fail"}, "[31], expected [32]"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(WIDTH).half()}), {"tensors": "fail"}, "float16, float32"),
        (lambda tensors: tensors["norm.weight"].fill_(float("inf")), {"finite": "fail"}, "norm.weight"),
    ],
)
def test_every_wrong_tensor_is_found(
    edit: Callable[[dict[str, Any]], object], expected: dict[str, str], named: str, info: TargetInfo, tmp_path: Path
) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(max_position_embeddings=256), info, layout="zlab")
    edit_tensors(folder, edit)
    results = audit(folder, info)
    assert bad(results) == expected
    assert named in " ".join(results[name].message for name in expected)


def test_a_truncated_file_hides_no_finding_about_the_config(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(max_position_embeddings=256), info, layout="zlab")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    edit_config(folder, lambda raw: raw.update(rope_theta=500.0))
    assert bad(audit(folder, info)) == {"files": "fail", "rope": "warn"}


def test_a_mask_token_that_is_the_targets_own_special_token_is_found(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(max_position_embeddings=256), info, layout="zlab")
    edit_config(Path(info.location), lambda raw: raw.update(eos_token_id=[7, 60]))
    try:
        results = audit(folder, info)
    finally:
        edit_config(Path(info.location), lambda raw: raw.update(eos_token_id=None))
    assert bad(results) == {"mask token": "fail"}
    assert "60 is the target's eos token" in results["mask token"].message


def test_a_trained_head_in_a_speculators_folder_is_found(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(max_position_embeddings=256), info, layout="speculators")
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].mul_(1.5))
    assert bad(audit(folder, info)) == {"tables": "fail"}


def test_a_folder_that_is_no_drafter_is_one_failure(tmp_path: Path) -> None:
    assert bad(audit(tmp_path, None)) == {"config": "fail", "files": "fail"}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "every other mark of a drafter" in audit(tmp_path, None)["config"].message


def test_without_the_target_the_comparison_is_skipped_not_passed(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    results = audit(folder, None)
    assert results["target"].status == "skip"
    assert "vocabulary" not in results
    assert len(load_file(folder / "model.safetensors")) == 25
