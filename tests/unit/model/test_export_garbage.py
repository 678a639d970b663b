"""Any value of any key of a published config: it is understood or refused in words, never a crash and never half a folder."""

from __future__ import annotations

import copy
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import MASK, edit_config, edit_tensors, export_tiny, saved_target
from model_fixtures import VOCAB, WIDTH, drafter_config, sliding_config
from safetensors.torch import load_file, save_file

from dflash.errors import DrafterError
from dflash.model.export import import_drafter
from dflash.model.export_audit import audit_folder
from dflash.model.export_fields import LayoutName
from dflash.model.export_layouts import layout_of
from dflash.model.target_info import TargetInfo

LAYOUT_NAMES: tuple[LayoutName, ...] = ("zlab", "speculators", "transformers")
GONE = object()
GARBAGE: tuple[Any, ...] = (
    GONE, None, "x", -1, 0, 1.5, True, False, [], {}, [[]], ["x"], {"a": 1}, 10**30, float("nan"), float("inf"),
)  # fmt: skip
HARMLESS = {
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "speculators_version", "algorithm", "name_or_path",
    "default_proposal_method", "proposal_methods", "proposal_type", "speculative_tokens", "verifier", "speculators_config",
    "initializer_range", "max_position_embeddings", "num_target_layers", "rope_theta", "rms_norm_eps", "mask_token_id",
    "architectures", "dtype", "model_type", "use_sliding_window",
}  # fmt: skip
"""Keys of which other values change no tensor's shape and no mask: a wrong value may be read, and the audit speaks of it."""


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("garbage") / "target")


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key and of every list entry."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from places(inner, (*above, key))


def with_value(raw: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(raw)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    result: dict[str, Any] = changed
    return result


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_no_value_of_any_key_is_a_crash_and_none_changes_the_drafter_in_silence(
    layout: LayoutName, info: TargetInfo, tmp_path: Path
) -> None:
    config = sliding_config(sliding_causal=False, max_position_embeddings=256)
    raw = json.loads((export_tiny(tmp_path / "out", config, info, layout=layout) / "config.json").read_text())
    wanted = layout_of(raw, origin="config").describe(raw, origin="config").config
    tried = refused = 0
    words: list[tuple[str, str]] = []
    for path in places(raw):
        for value in GARBAGE:
            changed = with_value(raw, path, value)
            tried += 1
            try:
                found = layout_of(changed, origin="config").describe(changed, origin="config").config
            except DrafterError as error:
                refused += 1
                words.append((error.what, error.remedy))
                continue
            named = next(key for key in reversed(path) if isinstance(key, str))
            if named not in HARMLESS and value is not GONE and value is not None:
                same = found.model_copy(update={"initializer_range": wanted.initializer_range})
                sound = same == wanted or type(value) in (int, float, bool)
                assert sound, f"{path} = {value!r} is read as {found}"
    assert all(what and remedy for what, remedy in words)
    assert tried > 300
    assert refused > tried / 3


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("text", ["", "null", "[3]", '"config"', "{", "\x00", "{}", '{"dflash_config": 1}', "\ufeff{}"], ids=repr)
def test_a_config_that_is_none_is_refused_by_import_and_found_by_the_audit(
    text: str, layout: LayoutName, info: TargetInfo, tmp_path: Path
) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout=layout)
    (folder / "config.json").write_text(text)
    with pytest.raises(DrafterError, match=r"config\.json"):
        import_drafter(folder, tables=None)
    found = {result.name: result for result in audit_folder(folder, target=info, tables=None)}
    assert (found["config"].status, found["files"].status) == ("fail", "ok")
    assert found["config"].remedy


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw.pop("layer_types") and raw.update(use_sliding_window=True, sliding_window=9), "no layer_types that say"),
        (lambda raw: raw.update(layer_types=[]), "0 entries for 2 layers"),
        (lambda raw: raw.update(layer_types=["full_attention"] * 3), "3 entries for 2 layers"),
        (lambda raw: raw.update(layer_types="full_attention"), "wrong type"),
        (lambda raw: (raw["dflash_config"].pop("causal"), raw.update(layer_types=["sliding_attention"] * 2)), "window is not set"),
        (lambda raw: raw.update(layer_types=["linear_attention"] * 2), "describes no valid drafter"),
        (lambda raw: raw.update(rope_parameters={"rope_theta": 5.0}), "names several rope_theta"),
        (lambda raw: raw.update(rope_parameters={"rope_type": "yarn"}, rope_scaling={"rope_type": "default"}), "rope type"),
        (lambda raw: raw.update(rope_scaling={"type": "linear", "factor": 2.0}), "rope type"),
        (lambda raw: raw.update(rope_parameters={"partial_rotary_factor": 0.25}, partial_rotary_factor=1.0), "partial rotary"),
        (lambda raw: raw.update(hidden_act="gelu"), "hidden_act"),
        (lambda raw: raw.update(attention_bias=True), "attention_bias"),
        (lambda raw: raw.update(attention_bias="no"), "neither true nor false"),
        (lambda raw: raw.update(tie_word_embeddings=True), "tied embeddings"),
        (lambda raw: raw.update(architectures=["EagleModel"]), "architectures"),
        (lambda raw: raw["dflash_config"].update(causal=True), "causal full-attention layers"),
        (lambda raw: raw["dflash_config"].update(causal="false"), "neither true nor false"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[0, 0]), "free of duplicates"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[1, 0]), "strictly increasing"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[False, True]), "no list of integers"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[0.0, 1.0]), "no list of integers"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[0, 3]), "taps layer 3 of a target with 4 layers"),
        (lambda raw: raw["dflash_config"].pop("mask_token_id"), "lacks 'mask_token_id'"),
        (lambda raw: raw["dflash_config"].update(mask_token_id=str(MASK)), "wrong type"),
        (lambda raw: raw.update(vocab_size=MASK), "outside its vocabulary of 60"),
        (lambda raw: raw.update(num_key_value_heads=3), "no multiple of num_key_value_heads"),
        (lambda raw: raw.update(head_dim=7), "RoPE rotates pairs"),
        (lambda raw: raw.update(block_size=1) or raw["dflash_config"].update(block_size=1), "describes no valid drafter"),
        (lambda raw: raw.update(block_size=[6]), "wrong type"),
        (lambda raw: raw.update(rms_norm_eps=0), "describes no valid drafter"),
        (lambda raw: raw.pop("num_target_layers"), "lacks 'num_target_layers'"),
        (lambda raw: raw.update(target_hidden_size=WIDTH + 1), "fc.weight is"),
    ],
)  # fmt: skip
def test_what_would_be_another_drafter_is_refused_by_its_key(edit: Any, message: str, info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    edit_config(folder, edit)
    with pytest.raises(DrafterError, match=message):
        import_drafter(folder, tables=None)
    assert "fail" in {result.status for result in audit_folder(folder, target=info, tables=None)}


def test_the_config_of_other_peoples_drafters_is_read() -> None:
    """A folder of the first publishers: keys of its framework, no inner block size, an integer RoPE base, no `causal`."""
    raw = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 151643,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960,
        "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
        "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    found = layout_of(raw, origin="c").describe(raw, origin="c")
    assert (found.config.block_size, found.mask_token_id, found.num_target_layers) == (16, 151669, 36)
    assert found.config.target_layer_ids == (1, 9, 17, 25, 33)
    assert found.config.resolved_layer_types == ("full_attention",) * 5


def test_weights_that_look_right_by_name_are_refused_by_shape_count_and_dtype(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(intermediate_size=40), info, layout="zlab")
    whole = load_file(folder / "model.safetensors")
    assert len(whole) == 2 * 11 + 3
    square = {name for name, value in whole.items() if value.ndim == 2 and value.shape[0] == value.shape[1]}
    for name, value in whole.items():
        edit_tensors(folder, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(DrafterError, match=f"holds 24 tensors, expected 25: missing {name}"):
            import_drafter(folder, tables=None)
        save_file(whole, folder / "model.safetensors")
        if value.ndim == 2 and name not in square:
            turned = {**whole, name: value.t().contiguous()}
            save_file(turned, folder / "model.safetensors")
            with pytest.raises(DrafterError, match=f"{name} is .*, expected"):
                import_drafter(folder, tables=None)
        for dtype in (torch.float16, torch.int8):
            save_file({**whole, name: value.to(dtype)}, folder / "model.safetensors")
            with pytest.raises(DrafterError, match="stores its weights as"):
                import_drafter(folder, tables=None)
        save_file(whole, folder / "model.safetensors")
    assert len(import_drafter(folder, tables=None).drafter.state_dict()) == 25


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x80\x02}q\x00.", b"not a tensor file " * 20])
def test_files_that_hold_no_tensors_are_refused_and_never_unpickled(content: bytes, info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(folder, tables=None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DrafterError, match=r"model\.safetensors cannot be read"):
        import_drafter(folder, tables=None)


def test_an_export_into_the_current_folder_and_through_a_link(
    info: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    monkeypatch.chdir(real)
    export_tiny(Path(), drafter_config(), info, layout="zlab")
    assert sorted(path.name for path in real.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "latest").symlink_to(real)
    export_tiny(tmp_path / "latest", drafter_config(block_size=4), info, layout="zlab")
    assert (tmp_path / "latest").is_symlink()
    assert import_drafter(real, tables=None).description.config.block_size == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "real"]


def test_a_place_that_cannot_be_written_is_one_error(info: TargetInfo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DrafterError, match="cannot be written"):
        export_tiny(tmp_path / "file" / "below", drafter_config(), info, layout="zlab")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_export(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    before = (folder / "model.safetensors").read_bytes()
    pid = os.fork()
    if pid == 0:  # a limit on file sizes cannot be lifted again, so another process meets it
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            export_tiny(folder, drafter_config(block_size=4), info, layout="zlab")
        except DrafterError as error:
            code = 0 if "cannot be written" in error.what else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert import_drafter(folder, tables=None).description.vocab_size == VOCAB
