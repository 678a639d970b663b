"""Commands that start vLLM or SGLang with a published drafter, and without one for comparison. Pure.

What the engines count differently is converted here, and nowhere else: a block of K slots is one anchor and K-1 drafts, so vLLM
gets `num_speculative_tokens` K-1 (its drafter runs on 1 + that many slots) and SGLang `--speculative-num-draft-tokens` K (the
width of a verification, equal to its `--speculative-dflash-block-size`). Layers are not given on the command line: the z-lab
layout counts decoder layers from 0 as SGLang does and vLLM adds 1; the speculators layout counts hidden states as vLLM does.

Sources: z-lab/dflash README (15 and 16 for a block of 16), vllm/v1/spec_decode/dflash.py, vllm/v1/worker/gpu/spec_decode
(`get_eagle3_aux_layers_from_config`), sglang/srt/server_args.py (`_handle_mamba_radix_cache`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.config import TargetConfig
from dflash.errors import EvaluationError
from dflash.evaluate.served_client import EngineName
from dflash.model.export_fields import DrafterDescription, DtypeName, LayoutName

PORTS: dict[EngineName, tuple[int, int]] = {"vllm": (8000, 8001), "sglang": (30000, 30001)}
"""Ports of the speculating and the plain server; the first are the engines' own defaults."""

READS: dict[EngineName, tuple[LayoutName, ...]] = {"vllm": ("zlab", "speculators"), "sglang": ("zlab",)}
"""Layouts that an engine is known to read."""


@dataclass(frozen=True, slots=True)
class ServedDrafter:
    """A published drafter's folder.

    Attributes:
        folder: as the server shall find it.
        layout: of the folder.
        description: what its configuration says.
    """

    folder: str
    layout: LayoutName
    description: DrafterDescription


@dataclass(frozen=True, slots=True)
class ServeCommands:
    """Argument vectors.

    Attributes:
        speculative: with the drafter.
        plain: without, on another port.
        notes: what a person has to know, one sentence each.
    """

    speculative: tuple[str, ...]
    plain: tuple[str, ...]
    notes: tuple[str, ...]


def serve_commands(
    engine: EngineName,
    drafter: ServedDrafter,
    *,
    target: TargetConfig,
    block_size: int | None,
    max_positions: int | None,
    dtype: DtypeName,
) -> ServeCommands:
    """Commands that serve a target with a drafter.

    Args:
        engine: which one.
        drafter: published.
        target: what it was trained for.
        block_size: K at decode; the trained one if None.
        max_positions: positions of the target, if they are known.
        dtype: that the target is served in.

    Raises:
        EvaluationError: the engine does not read the layout, or the block is larger than the trained one.
    """
    config = drafter.description.config
    size = config.block_size if block_size is None else block_size
    if drafter.layout not in READS[engine]:
        raise EvaluationError(
            f"{drafter.folder} has the {drafter.layout} layout, {engine} reads {' and '.join(READS[engine])}",
            remedy="export the drafter in a layout that it reads: python -m dflash export RUN --layout zlab --output FOLDER",
        )
    if not 2 <= size <= config.block_size:
        raise EvaluationError(
            f"a block of {size} does not fit a drafter trained with blocks of {config.block_size}",
            remedy=f"set evaluate.block_size to 2..{config.block_size}, or leave it out",
        )
    context = min(config.max_position_embeddings, max_positions or config.max_position_embeddings)
    common = _vllm(target, context, dtype) if engine == "vllm" else _sglang(target, context, dtype)
    port, plain_port = PORTS[engine]
    return ServeCommands(
        (*common, *_drafting(engine, drafter, size), "--port", str(port)),
        (*common, "--port", str(plain_port)),
        _notes(engine, drafter, size),
    )


def shell_line(argv: Sequence[str]) -> str:
    """A command as a line for a POSIX shell, one option a line."""
    words: list[str] = []
    for word in argv:
        quoted = shlex.quote(word)
        words.append(f" \\\n  {quoted}" if word.startswith("--") and words else f" {quoted}" if words else quoted)
    return "".join(words)


def _vllm(target: TargetConfig, context: int, dtype: DtypeName) -> tuple[str, ...]:
    more = (*_revision(target), "--dtype", dtype, "--max-model-len", str(context), "--generation-config", "vllm")
    # A target whose path begins with a dash would be read as an option.
    return ("vllm", "serve", _place(target.location), *more)


def _sglang(target: TargetConfig, context: int, dtype: DtypeName) -> tuple[str, ...]:
    more = (*_revision(target), "--dtype", dtype, "--context-length", str(context))
    return ("python", "-m", "sglang.launch_server", "--model-path", _place(target.location), *more)


def _revision(target: TargetConfig) -> tuple[str, ...]:
    revision = () if target.revision is None else ("--revision", target.revision)
    return (*revision, "--trust-remote-code") if target.trust_remote_code else revision


def _drafting(engine: EngineName, drafter: ServedDrafter, size: int) -> tuple[str, ...]:
    folder = _place(drafter.folder)
    if engine == "vllm":
        settings = {"method": "dflash", "model": folder, "num_speculative_tokens": size - 1}
        return ("--speculative-config", json.dumps(settings), "--per-request-spec-decode-metrics", "detailed")
    return (
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", folder, "--speculative-num-draft-tokens", str(size),
    )  # fmt: skip


def _notes(engine: EngineName, drafter: ServedDrafter, size: int) -> tuple[str, ...]:
    config = drafter.description.config
    layers = ", ".join(map(str, config.target_layer_ids))
    first = (
        f"a block of {size} is one anchor and {size - 1} drafts; taps are the outputs of decoder layers {layers}, counted from 0, "
        f"mask token {drafter.description.mask_token_id}: both engines read these from the folder"
    )
    notes = [first]
    if engine == "vllm":
        notes.append(
            "--per-request-spec-decode-metrics is documented from vLLM 0.32 on; leave it out before, and evaluate with "
            "--set evaluate.server.concurrency=1 to have figures for each prompt"
        )
    else:
        notes.append("SGLang needs a version that knows --speculative-algorithm DFLASH")
        notes.append(
            "where SGLang refuses drafts because of its radix cache (targets with linear-attention layers: Qwen3-Next, Qwen3.5 and "
            "later), add --disable-radix-cache to both commands"
        )
    return tuple(notes)


def _place(place: str) -> str:
    return f"./{place}" if place.startswith("-") else place
