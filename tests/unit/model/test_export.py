"""The published layout: written, audited, read back bit for bit; everything that engines would swallow is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import VOCAB, WIDTH, drafter_config, info_of, load_golden, sliding_config, tiny_drafter, tiny_model
from safetensors.torch import load_file, save_file

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.export import export_drafter, import_drafter
from dflash.model.export_config import drafter_config_of, hf_drafter_config
from dflash.model.target_info import TargetInfo

INFO: TargetInfo = info_of(tiny_model("qwen3"))
CONFIGS = [
    pytest.param(drafter_config(), id="full"),
    pytest.param(sliding_config(), id="mixed"),
    pytest.param(sliding_config(sliding_causal=False), id="mixed-bidirectional"),
    pytest.param(sliding_config(layer_types=("sliding_attention",) * 2), id="sliding"),
]


def _export(folder: Path, config: DrafterConfig, dtype: Any = "float32") -> Path:
    return export_drafter(tiny_drafter(config), folder, info=INFO, mask_token_id=60, dtype=dtype)


@pytest.mark.parametrize("config", CONFIGS)
def test_import_gives_back_the_same_bits_and_hidden_states(config: DrafterConfig, tmp_path: Path) -> None:
    drafter = tiny_drafter(config)
    again = import_drafter(export_drafter(drafter, tmp_path / "out", info=INFO, mask_token_id=60, dtype="float32"))
    assert all(torch.equal(value, again.drafter.state_dict()[name]) for name, value in drafter.state_dict().items())
    anchors = torch.tensor([[3, 9]])
    inputs = (torch.randn(1, 12, 2 * WIDTH), torch.randn(1, 2, 6, WIDTH), anchors, torch.ones_like(anchors, dtype=torch.bool))
    assert torch.equal(drafter(*inputs), again.drafter(*inputs))
    assert (again.mask_token_id, again.vocab_size, again.num_target_layers) == (60, VOCAB, 4)
    assert again.drafter.config.target_layer_ids == config.target_layer_ids


def test_bfloat16_is_rounded_once_and_nothing_is_left_beside_the_folder(tmp_path: Path) -> None:
    drafter = tiny_drafter(drafter_config())
    folder = export_drafter(drafter, tmp_path / "out", info=INFO, mask_token_id=60, dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], value.bfloat16()) for name, value in drafter.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert import_drafter(folder).drafter.fc.weight.dtype == torch.bfloat16


def test_config_holds_every_key_that_serving_engines_read(tmp_path: Path) -> None:
    raw = json.loads((_export(tmp_path / "out", sliding_config(), "bfloat16") / "config.json").read_text())
    wanted = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 6, "num_target_layers": 4,
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "rope_theta": 10000.0,
        "rope_scaling": None, "max_position_embeddings": 1024, "attention_bias": False, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    assert {key: raw[key] for key in wanted} == wanted
    assert raw["dflash_config"] == {"block_size": 6, "mask_token_id": 60, "target_layer_ids": [0, 1], "sliding_causal": True}


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (drafter_config(), False),
        (sliding_config(), None),
        (sliding_config(sliding_causal=False), False),
        (sliding_config(layer_types=("sliding_attention",) * 2), True),
    ],
)
def test_causal_is_written_only_where_it_is_true_of_all_layers(config: DrafterConfig, causal: bool | None) -> None:
    raw = hf_drafter_config(config, mask_token_id=60, vocab_size=VOCAB, num_target_layers=4, dtype="float32")
    assert raw["dflash_config"].get("causal") is causal


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_a_published_config_without_our_own_keys_is_understood(name: str) -> None:
    golden = load_golden(name)
    raw = {**golden.expected["draft_config"], "architectures": ["DFlashDraftModel"]}
    config = drafter_config_of(raw, origin="config.json")
    assert config.sliding_causal
    ours = golden.drafter.config
    assert config.model_copy(update={"max_position_embeddings": ours.max_position_embeddings}) == ours


def test_an_earlier_export_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    folder = _export(tmp_path / "out", drafter_config())
    _export(folder, sliding_config())
    assert import_drafter(folder).drafter.config.sliding_window == 9
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DrafterError, match="holds other files than an export"):
        _export(folder, drafter_config())
    assert import_drafter(folder).drafter.config.sliding_window == 9


@pytest.mark.parametrize("mask_token_id", [-1, VOCAB])
def test_a_mask_token_outside_the_vocabulary_is_refused(mask_token_id: int, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is no row of the target's vocabulary"):
        export_drafter(tiny_drafter(drafter_config()), tmp_path / "out", info=INFO, mask_token_id=mask_token_id, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter(drafter_config())
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    with pytest.raises(DrafterError, match=r"not finite: norm\.weight"):
        export_drafter(drafter, tmp_path / "out", info=INFO, mask_token_id=60, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def _edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    edit(raw)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw["dflash_config"].pop("mask_token_id"), "lacks 'mask_token_id'"),
        (lambda raw: raw["dflash_config"].update(mask_token_id="<mask>"), "lacks 'mask_token_id', or its value"),
        (lambda raw: raw["dflash_config"].update(mask_token_id=VOCAB), "outside its vocabulary"),
        (lambda raw: raw["dflash_config"].pop("target_layer_ids"), "lacks 'target_layer_ids'"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[1, 1]), "free of duplicates"),
        (lambda raw: raw.pop("dflash_config"), "lacks 'dflash_config'"),
        (lambda raw: raw.pop("rope_theta"), "lacks 'rope_theta'"),
        (lambda raw: raw.pop("head_dim"), "lacks 'head_dim'"),
        (lambda raw: raw.pop("vocab_size"), "lacks 'vocab_size'"),
        (lambda raw: raw["dflash_config"].update(block_size=4), "names no single block_size"),
        (lambda raw: raw.update(attention_bias=True), "attention_bias"),
        (lambda raw: raw.update(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope type"),
        (lambda raw: raw.update(hidden_act="gelu"), "hidden_act"),
        (lambda raw: raw["dflash_config"].update(causal=True), "causal full-attention layers"),
        (lambda raw: raw.update(architectures=["Qwen3ForCausalLM"]), "architectures"),
        (lambda raw: raw.update(layer_types=["full_attention"]), "layer_types has 1 entries"),
    ],
)
def test_configs_that_engines_would_swallow_are_refused(
    edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    folder = _export(tmp_path / "out", drafter_config())
    _edit_config(folder, edit)
    with pytest.raises(DrafterError, match=message):
        import_drafter(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), r"holds 24 tensors, expected 25: missing norm\.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}), r"unknown lm_head\.weight"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(WIDTH + 1)}), r"norm\.weight is \[33\], expected \[32\]"),
    ],
)
def test_tensors_that_engines_would_swallow_are_refused(
    edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    folder = _export(tmp_path / "out", drafter_config())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=message):
        import_drafter(folder)


def test_missing_or_broken_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(tmp_path / "nothing")
    folder = _export(tmp_path / "out", drafter_config())
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DrafterError, match="holds no object"):
        import_drafter(folder)
