"""Strict audit of a published drafter's folder: every finding at once, with its remedy, instead of the first error.

Invariant: what `import_drafter` refuses is a failure here; what engines tolerate and what still costs acceptance (a value
written in one place of two, another RoPE base than the target's, a shorter position range) is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.errors import DflashError
from dflash.model.export_checks import audit_stored, check_tables, check_vocabulary_maps
from dflash.model.export_config import ARCHITECTURE, MODEL_TYPE, causal_switch
from dflash.model.export_fields import DrafterDescription
from dflash.model.export_files import CONFIG_NAME, StoredTensor, read_json, read_tensor, stored_tensors
from dflash.model.export_layouts import Layout, layout_of
from dflash.model.target_info import TargetInfo, read_hf_config
from dflash.records import CheckResult

_ZLAB_KEYS = (
    "architectures", "attention_bias", "block_size", "dtype", "hidden_act", "layer_types", "max_position_embeddings",
    "num_target_layers", "rope_theta", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""Keys that engines read and fill in by themselves where they are missing."""


def audit_folder(folder: Path, *, target: TargetInfo | None, tables: Mapping[str, Tensor] | None) -> tuple[CheckResult, ...]:
    """Audit a published folder of any layout.

    Args:
        folder: the folder.
        target: what the drafter must fit, if it is at hand.
        tables: the target's embedding and head, to compare stored copies with.

    Returns:
        One result a check; checks that need what an earlier one could not read are missing.
    """
    results: list[CheckResult] = []

    def run(name: str, check: Callable[[], tuple[str, Any]]) -> Any:
        try:
            message, value = check()
        except DflashError as error:
            results.append(CheckResult(name, "fail", error.what, error.remedy))
            return None
        results.append(CheckResult(name, "ok", message, ""))
        return value

    origin = str(folder / CONFIG_NAME)
    opened = run("config", lambda: _opened(folder, origin))
    stored = run("files", lambda: _files(folder))
    if opened is None:
        return tuple(results)
    raw, layout, description = opened
    results += _config_warnings(raw, layout, description)
    if stored is not None:
        dtype = run("tensors", lambda: _tensors(layout, description, stored, str(folder)))
        if dtype is not None:
            results.append(_dtype_named(raw, dtype))
            results.append(_finite(layout, description, stored))
            run("tables", lambda: _tables(layout, description, stored, tables, str(folder)))
    results += _against_target(description, target)
    return tuple(results)


def _opened(folder: Path, origin: str) -> tuple[str, tuple[dict[str, Any], Layout, DrafterDescription]]:
    raw = read_json(folder / CONFIG_NAME)
    layout = layout_of(raw, origin=origin)
    description = layout.describe(raw, origin=origin)
    config = description.config
    taps = ", ".join(str(layer_id) for layer_id in config.target_layer_ids)
    shape = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, block size {config.block_size}"
    return f"{layout.name} layout: {shape}, taps {taps}, mask token {description.mask_token_id}", (raw, layout, description)


def _files(folder: Path) -> tuple[str, dict[str, StoredTensor]]:
    stored = stored_tensors(folder)
    files = {tensor.file for tensor in stored.values()}
    return f"{len(stored)} tensors in {len(files)} safetensors file(s)", stored


def _tensors(layout: Layout, description: DrafterDescription, stored: Mapping[str, StoredTensor], origin: str) -> tuple[str, str]:
    dtype = audit_stored(layout, description, stored, origin=origin)
    return f"names, count and shapes as the config asks for; all {dtype}", dtype


def _dtype_named(raw: Mapping[str, Any], dtype: str) -> CheckResult:
    named = raw.get("dtype", raw.get("torch_dtype"))
    if named == dtype:
        return CheckResult("dtype", "ok", f"config and tensors agree on {dtype}", "")
    return CheckResult("dtype", "warn", f"config says {named}, the tensors are {dtype}", f'write "dtype": "{dtype}"')


def _finite(layout: Layout, description: DrafterDescription, stored: Mapping[str, StoredTensor]) -> CheckResult:
    broken = [name for name in layout.shapes(description) if not bool(read_tensor(name, stored[name]).isfinite().all())]
    if broken:
        return CheckResult("finite", "fail", f"not finite: {', '.join(broken[:8])}", "export a clean checkpoint")
    return CheckResult("finite", "ok", "every weight is finite", "")


def _tables(
    layout: Layout,
    description: DrafterDescription,
    stored: Mapping[str, StoredTensor],
    tables: Mapping[str, Tensor] | None,
    origin: str,
) -> tuple[str, None]:
    check_vocabulary_maps(stored)
    compared = check_tables(layout, description, stored, tables, origin=origin)
    copies = [name for name in layout.table_shapes(description) if name in stored]
    if not copies:
        return "no copy of the target's embedding or head is stored", None
    if not compared:
        return f"{', '.join(copies)}: not compared, the target is not at hand", None
    return f"{', '.join(compared)} equal the target's own", None


def _config_warnings(raw: Mapping[str, Any], layout: Layout, description: DrafterDescription) -> Iterator[CheckResult]:
    """What engines would fill in by themselves, or read from one place of two."""
    if layout.name != "zlab":
        return
    drafting = raw["dflash_config"]
    missing = [key for key in _ZLAB_KEYS if key not in raw]
    if missing:
        yield CheckResult(
            "config keys", "warn", f"missing: {', '.join(missing)}", "write them: engines fill them with defaults of their own"
        )
    else:
        yield CheckResult("config keys", "ok", "every key that engines read is written", "")
    if raw.get("model_type") != MODEL_TYPE or raw.get("architectures") != [ARCHITECTURE]:
        found = f"model_type {raw.get('model_type')}, architectures {raw.get('architectures')}"
        yield CheckResult("model type", "warn", found, f'write "{MODEL_TYPE}" and ["{ARCHITECTURE}"]')
    if drafting.get("block_size") is None or raw.get("block_size") is None:
        yield CheckResult(
            "block size",
            "warn",
            "written in one place only",
            f"write {description.config.block_size} at the top and in dflash_config",
        )
    else:
        yield CheckResult("block size", "ok", f"{description.config.block_size} in both places", "")
    slides = "sliding_attention" in description.config.resolved_layer_types
    if bool(raw.get("use_sliding_window")) != slides:
        message = f"use_sliding_window {raw.get('use_sliding_window')} against layer_types that {'' if slides else 'do not '}slide"
        yield CheckResult("window", "warn", message, f'write "use_sliding_window": {str(slides).lower()}')
    yield _causal(drafting, description)


def _causal(drafting: Mapping[str, Any], description: DrafterDescription) -> CheckResult:
    wanted, found = causal_switch(description.config), drafting.get("causal")
    if wanted is None and found is None:
        return CheckResult("causal", "ok", "mixed layers, no switch for all of them", "")
    if found == wanted:
        return CheckResult("causal", "ok", f"causal {wanted} holds for every layer", "")
    if wanted is None:
        return CheckResult("causal", "fail", f"causal {found} is read as true of all layers, which differ", "leave `causal` out")
    return CheckResult(
        "causal", "warn", f"causal is not written, all layers are {wanted}", f'write "causal": {str(wanted).lower()}'
    )


def _against_target(description: DrafterDescription, target: TargetInfo | None) -> Iterator[CheckResult]:
    if target is None:
        yield CheckResult("target", "skip", "the target is not at hand", "give it with --target to compare with it")
        return
    pairs: dict[str, tuple[object, object]] = {
        "vocabulary": (description.vocab_size, target.vocab_size),
        "hidden size": (description.target_hidden_size, target.hidden_size),
    }
    if description.num_target_layers is not None:
        pairs["target layers"] = (description.num_target_layers, target.num_hidden_layers)
    for name, (said, found) in pairs.items():
        if said == found:
            yield CheckResult(name, "ok", f"{said}, as the target's", "")
        else:
            yield CheckResult(name, "fail", f"config says {said}, the target has {found}", "use the target that it was trained on")
    yield _taps(description, target)
    yield _mask_token(description, target)
    yield _rope(description, target)


def _taps(description: DrafterDescription, target: TargetInfo) -> CheckResult:
    highest = description.config.target_layer_ids[-1]
    if highest >= target.num_hidden_layers - 1:
        message = f"layer {highest} of a target with {target.num_hidden_layers} layers (0-based) cannot be tapped"
        return CheckResult("taps", "fail", message, f"taps are 0..{target.num_hidden_layers - 2}")
    return CheckResult("taps", "ok", f"{list(description.config.target_layer_ids)} of {target.num_hidden_layers} layers", "")


def _mask_token(description: DrafterDescription, target: TargetInfo) -> CheckResult:
    mask = description.mask_token_id
    if not (Path(target.location) / CONFIG_NAME).is_file():
        return CheckResult("mask token", "skip", f"{mask}: the target's config is not at hand", "")
    text = read_hf_config(Path(target.location), trust_remote_code=False).get_text_config()
    for role in ("pad", "eos", "bos"):
        ids = getattr(text, f"{role}_token_id", None)
        if mask in (ids if isinstance(ids, list) else [ids]):
            return CheckResult("mask token", "fail", f"{mask} is the target's {role} token", "train with a token that no text uses")
    return CheckResult("mask token", "ok", f"{mask} is a row of the target's embedding, and no pad, eos or bos", "")


def _rope(description: DrafterDescription, target: TargetInfo) -> CheckResult:
    config = description.config
    if target.rope_theta is not None and config.rope_theta != target.rope_theta:
        message = f"base {config.rope_theta:g}, the target's is {target.rope_theta:g}"
        return CheckResult("rope", "warn", message, "make sure that it was trained with this base")
    longest = target.max_position_embeddings
    if longest is not None and config.max_position_embeddings < longest:
        message = f"{config.max_position_embeddings} positions, the target has {longest}"
        return CheckResult("rope", "warn", message, "engines refuse longer prompts with this drafter")
    return CheckResult("rope", "ok", f"base {config.rope_theta:g}, {config.max_position_embeddings} positions", "")
