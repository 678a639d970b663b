"""Reading a target's shape and identity without its weights, and refusing drafters that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_fixtures import FAMILIES, WIDTH, drafter_config, info_of, tiny_model
from safetensors.torch import load_file, save_file

from dflash.config import ExpectedTarget, TargetConfig
from dflash.errors import DrafterError, TargetError
from dflash.model.target_info import check_drafter_fits, read_target_info


def _config(folder: Path, **changes: object) -> TargetConfig:
    return TargetConfig.model_validate({"path": str(folder), "mask_token_id": 60, "local_files_only": True, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("family", FAMILIES)
def test_info_equals_the_loaded_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    found, wanted = read_target_info(_config(tmp_path)), info_of(model)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_parameters"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.location == str(tmp_path)
    assert found.rope_theta is not None


def test_fingerprint_is_stable_and_sees_weights_and_config(folder: Path) -> None:
    first = read_target_info(_config(folder)).fingerprint
    assert read_target_info(_config(folder)).fingerprint == first
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    assert read_target_info(_config(copy)).fingerprint == first
    weights = load_file(copy / "model.safetensors")
    tuned = {name: value + 0.001 * torch.randn_like(value) for name, value in weights.items()}
    save_file(tuned, copy / "model.safetensors", metadata={"format": "pt"})
    second = read_target_info(_config(copy)).fingerprint
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    assert len({first, second, read_target_info(_config(copy)).fingerprint}) == 3


def test_expected_shape_is_checked(folder: Path) -> None:
    expected = {"hidden_size": WIDTH, "num_hidden_layers": 4, "vocab_size": 61, "num_parameters": 1}
    assert read_target_info(_config(folder, expected=ExpectedTarget(**expected))).hidden_size == WIDTH
    with pytest.raises(TargetError, match=r"num_hidden_layers 4, target\.expected says 64"):
        read_target_info(_config(folder, expected=ExpectedTarget(**{**expected, "num_hidden_layers": 64})))


def test_a_missing_target_is_one_clear_error() -> None:
    with pytest.raises(TargetError, match="is no folder here and the hub does not give it"):
        read_target_info(_config(Path("nobody-here/no-such-model")))
    with pytest.raises(TargetError, match="is no folder here"):
        read_target_info(_config(Path("/no/such/folder/at/all")))


def test_a_folder_without_config_or_with_an_unknown_type_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(TargetError, match="cannot be used"):
        read_target_info(_config(folder))
    (folder / "config.json").unlink()
    with pytest.raises(TargetError, match=r"holds no config\.json"):
        read_target_info(_config(folder))


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(TargetError, match=r"holds no \*\.safetensors file"):
        read_target_info(_config(folder))


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    save_file({"again": torch.zeros(7)}, tmp_path / "shards" / "consolidated.safetensors")
    whole, split = (read_target_info(_config(tmp_path / name)) for name in ("whole", "shards"))
    assert split.num_parameters == whole.num_parameters
    shards[0].unlink()
    with pytest.raises(TargetError, match=f"lacks {shards[0].name} that its index names"):
        read_target_info(_config(tmp_path / "shards"))
    (tmp_path / "shards" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(TargetError, match=r"index\.json cannot be used"):
        read_target_info(_config(tmp_path / "shards"))


DAMAGES = {
    "cut": lambda whole: whole[:-100],
    "too short": lambda _: b"abc",
    "huge header": lambda whole: b"\xff" * 8 + whole[8:],
    "header of another kind": lambda _: (3).to_bytes(8, "little") + b"[7]",
    "entry without offsets": lambda _: (9).to_bytes(8, "little") + b'{"a": {}}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(TargetError, match=r"model\.safetensors (is not a safetensors file|has \d+ bytes)"):
        read_target_info(_config(folder))


def test_a_drafter_of_another_width_is_refused(folder: Path) -> None:
    info = read_target_info(_config(folder))
    check_drafter_fits(drafter_config(), info)
    with pytest.raises(DrafterError, match=r"drafter\.hidden_size 64 differs from the target's hidden size 32"):
        check_drafter_fits(drafter_config(hidden_size=64), info)


@pytest.mark.parametrize("layer", [3, 4, 40])
def test_taps_at_or_above_the_last_layer_are_refused(folder: Path, layer: int) -> None:
    with pytest.raises(DrafterError, match=f"names layer {layer} of a target with 4 layers"):
        check_drafter_fits(drafter_config(target_layer_ids=(0, layer)), read_target_info(_config(folder)))


def test_duplicate_taps_are_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match="free of duplicates"):
        drafter_config(target_layer_ids=(1, 1))
