"""One evaluation in words and rows, for a terminal and for its page.

Invariant: a figure that was not measured is a dash, never a zero; warnings come before any figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash.evaluate.text import aligned, clean_text
from dflash.records import EvaluationResult

SLICE_ORDER = ("dataset", "domain", "language", "turn", "kind", "context_tokens")
SLICE_HEADS = ("slice", "prompts", "verified", "tau", "interval", "macro", "accepted", "1st draft", "tokens/s", "speed-up")
NOTHING = "-"


def evaluation_text(result: EvaluationResult) -> str:
    """The evaluation as lines for a terminal: headline, warnings, facts, one row a slice."""
    lines = [clean_text(result.headline), *(f"WARNING: {clean_text(warning)}" for warning in result.warnings), ""]
    width = max(len(name) for name, _ in facts(result))
    lines += [f"{name:<{width}}  {clean_text(text)}" for name, text in facts(result)]
    rows = slice_rows(result)
    if rows:
        table = [SLICE_HEADS, *([clean_text(cell) for cell in row] for row in rows)]
        lines += ["", *aligned(table, left=1)]
    return "\n".join(lines)


def facts(result: EvaluationResult) -> list[tuple[str, str]]:
    """What an evaluation says about all prompts, as (name, text)."""
    step = "" if result.step is None else f" at step {result.step}"
    sampled = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    found = [
        ("drafter", f"{result.drafter}{step}, block size {result.block_size}"),
        ("decoding", f"{sampled}, batch size {result.batch_size}"),
        ("prompts", f"{result.prompts} of {result.dataset}"),
        *(
            (f"set {each.name}", f"{each.prompts} prompts, {each.origin}, SHA-256 {each.sha256[:16]}")
            for each in result.prompt_sets
        ),
        (
            "tokens per verification",
            f"{_number(result.acceptance_length, digits=2)} pooled, {_number(result.acceptance_length_macro, digits=2)} macro",
        ),
        ("accepted drafts", f"{_number(result.accepted_length, digits=2)} a verification, target's own token not counted"),
        ("untruncated", f"{_number(result.acceptance_length_untruncated, digits=2)}, tokens behind the answer's end counted too"),
        ("speed-up", speedup_text(result)),
        ("time split", _split(result)),
        ("lossless", lossless_text(result)),
        ("template flags", ", ".join(f"{key}={value}" for key, value in sorted(result.template_flags.items())) or "none"),
    ]
    return [(name, text) for name, text in found if text[:1] != NOTHING]


def slice_rows(result: EvaluationResult) -> list[list[str]]:
    """One row a slice in the order of `SLICE_HEADS`; a label that all prompts share is left out."""
    rows = []
    names = [name for name in SLICE_ORDER if name in result.slices]
    for name in [*names, *(other for other in result.slices if other not in names)]:
        parts: Mapping[str, Mapping[str, Any]] = result.slices[name]
        if len(parts) > 1:
            rows += [[f"{name.replace('_', ' ')} {label}", *_slice_cells(part)] for label, part in parts.items()]
    return rows


def speedup_text(result: EvaluationResult) -> str:
    """Speed-up, tokens a second and the batch size they were measured at."""
    if result.speedup is None or result.plain_s_per_token is None or result.speculative_s_per_token is None:
        return NOTHING
    ends = "" if result.speedup_ci is None else " ({:.2f} to {:.2f})".format(*result.speedup_ci)
    return (
        f"{result.speedup:.2f}x{ends}: {1 / result.plain_s_per_token:.1f} -> {1 / result.speculative_s_per_token:.1f} tokens/s, "
        f"both at batch size {result.batch_size}"
    )


def lossless_text(result: EvaluationResult) -> str:
    """Losslessness as numbers."""
    if result.lossless is None or result.differing_prompts is None:
        return NOTHING
    word = "yes" if result.lossless else "NO"
    judged = result.differing_prompts and result.near_tie_prompts is not None
    near = f", {result.near_tie_prompts} of them near-ties" if judged else ""
    return f"{word}: {result.differing_prompts} of {result.prompts} answers differ from plain decoding{near}"


def _split(result: EvaluationResult) -> str:
    shares = (result.target_frac, result.drafter_frac, result.other_frac)
    if any(share is None for share in shares):
        return NOTHING
    return "target {:.0%}, drafter {:.0%}, rest {:.0%}".format(*shares)


def _slice_cells(part: Mapping[str, Any]) -> Sequence[str]:
    low, high = part.get("acceptance_ci", (None, None))
    conditional = part.get("conditional_per_position") or [None]
    return (
        str(part.get("prompts", NOTHING)),
        str(part.get("verifications", NOTHING)),
        _number(part.get("acceptance_length"), digits=2),
        NOTHING if low is None or high is None else f"{low:.2f} to {high:.2f}",
        _number(part.get("acceptance_length_macro"), digits=2),
        _number(part.get("accepted_length"), digits=2),
        NOTHING if conditional[0] is None else f"{conditional[0]:.0%}",
        _number(part.get("speculative_tokens_per_s"), digits=1),
        NOTHING if part.get("speedup") is None else f"{part['speedup']:.2f}x",
    )


def _number(value: float | None, *, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
