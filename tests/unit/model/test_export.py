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
from dflash.model.export import describe_export, export_drafter, import_drafter
from dflash.model.export_config import read_zlab, zlab_config
from dflash.model.export_fields import DrafterDescription
from dflash.model.target_info import TargetInfo

INFO: TargetInfo = info_of(tiny_model("qwen3"))
CONFIGS = [
    pytest.param(drafter_config(), id="full"),
    pytest.param(sliding_config(), id="mixed"),
    pytest.param(sliding_config(sliding_causal=False), id="mixed-bidirectional"),
    pytest.param(sliding_config(layer_types=("sliding_attention",) * 2), id="sliding"),
]


def _describe(config: DrafterConfig, mask_token_id: int = 60) -> DrafterDescription:
    return describe_export(config, INFO, mask_token_id=mask_token_id, target_name="some/target")


def _export(folder: Path, config: DrafterConfig, dtype: Any = "float32", *, mask_token_id: int = 60) -> Path:
    description = _describe(config, mask_token_id)
    return export_drafter(tiny_drafter(config), folder, description=description, layout="zlab", dtype=dtype, tables=None)


@pytest.mark.parametrize("config", CONFIGS)
def test_import_gives_back_the_same_bits_and_hidden_states(config: DrafterConfig, tmp_path: Path) -> None:
    drafter = tiny_drafter(config)
    again = import_drafter(_export(tmp_path / "out", config), tables=None)
    assert all(torch.equal(value, again.drafter.state_dict()[name]) for name, value in drafter.state_dict().items())
    anchors = torch.tensor([[3, 9]])
    inputs = (torch.randn(1, 12, 2 * WIDTH), torch.randn(1, 2, 6, WIDTH), anchors, torch.ones_like(anchors, dtype=torch.bool))
    assert torch.equal(drafter(*inputs), again.drafter(*inputs))
    description = again.description
    assert (description.mask_token_id, description.vocab_size, description.num_target_layers) == (60, VOCAB, 4)
    assert (again.layout, again.dtype) == ("zlab", "float32")
    assert again.drafter.config.target_layer_ids == config.target_layer_ids


def test_bfloat16_is_rounded_once_and_nothing_is_left_beside_the_folder(tmp_path: Path) -> None:
    drafter = tiny_drafter(drafter_config())
    folder = _export(tmp_path / "out", drafter_config(), "bfloat16")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], value.bfloat16()) for name, value in drafter.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert import_drafter(folder, tables=None).drafter.fc.weight.dtype == torch.bfloat16


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
    raw = zlab_config(_describe(config), dtype="float32")
    assert raw["dflash_config"].get("causal") is causal


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_a_published_config_without_our_own_keys_is_understood(name: str) -> None:
    golden = load_golden(name)
    raw = {**golden.expected["draft_config"], "architectures": ["DFlashDraftModel"]}
    config = read_zlab(raw, origin="config.json").config
    assert config.sliding_causal
    ours = golden.drafter.config
    assert config.model_copy(update={"max_position_embeddings": ours.max_position_embeddings}) == ours


def test_an_earlier_export_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    folder = _export(tmp_path / "out", drafter_config())
    _export(folder, sliding_config())
    assert import_drafter(folder, tables=None).drafter.config.sliding_window == 9
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DrafterError, match="holds other files than an export"):
        _export(folder, drafter_config())
    assert import_drafter(folder, tables=None).drafter.config.sliding_window == 9


@pytest.mark.parametrize("mask_token_id", [-1, VOCAB])
def test_a_mask_token_outside_the_vocabulary_is_refused(mask_token_id: int, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is no row of the target's vocabulary"):
        _export(tmp_path / "out", drafter_config(), mask_token_id=mask_token_id)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter(drafter_config())
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    with pytest.raises(DrafterError, match=r"not finite: norm\.weight"):
        export_drafter(
            drafter, tmp_path / "out", description=_describe(drafter.config), layout="zlab", dtype="float32", tables=None
        )
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
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[0, 3]), "taps layer 3 of a target with 4 layers"),
        (lambda raw: raw.update(tie_word_embeddings=True), "tied embeddings"),
        (lambda raw: raw.update(partial_rotary_factor=0.25), "partial rotary"),
        (lambda raw: raw.pop("num_target_layers"), "lacks 'num_target_layers'"),
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
        import_drafter(folder, tables=None)


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
        import_drafter(folder, tables=None)


def test_missing_or_broken_files_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(tmp_path / "nothing", tables=None)
    folder = _export(tmp_path / "out", drafter_config())
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(folder, tables=None)
    (folder / "config.json").write_text("[]")
    with pytest.raises(DrafterError, match="holds no object"):
        import_drafter(folder, tables=None)
