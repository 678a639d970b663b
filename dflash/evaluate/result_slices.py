"""The slices of an evaluation: which there are, and what a prompt set has besides acceptance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dflash.evaluate.bootstrap import IntArray
from dflash.evaluate.contest import Contest
from dflash.evaluate.metrics import VerificationTable
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.slices import slice_by_context, slice_by_label
from dflash.evaluate.timing import measure_timing
from dflash.records import PromptSetEntry


def slices_of(
    table: VerificationTable,
    contests: Sequence[Contest],
    *,
    candidate: int,
    positions: int,
    counts: IntArray,
    confidence: float,
    differing: Collection[int],
) -> dict[str, Any]:
    """Acceptance with its interval by `kind`, `dataset`, `turn`, `language`, `domain` and `context_tokens`.

    Args:
        table: verifications of the candidate.
        contests: what every prompt gave.
        candidate: the candidate's place in them.
        positions: draft positions.
        counts: bootstrap resamples `[R, P]`.
        confidence: level of the intervals.
        differing: prompts whose answers differ from plain decoding.

    Returns:
        Slices by name; labels that no prompt has are left out. A data set also has its own times and number of differences.
    """
    prompts = [contest.prompt for contest in contests]
    labels: dict[str, list[str | None]] = {
        "kind": [prompt.kind for prompt in prompts],
        "dataset": [prompt.dataset for prompt in prompts],
        "turn": [str(prompt.turn) for prompt in prompts],
        "language": [prompt.language for prompt in prompts],
        "domain": [prompt.domain for prompt in prompts],
    }
    made: dict[str, Any] = {}
    for name, values in labels.items():
        parts = slice_by_label(table, values, positions=positions, counts=counts, confidence=confidence)
        if parts:
            made[name] = parts
    for name, part in made["dataset"].items():
        own = [index for index, prompt in enumerate(prompts) if prompt.dataset == name]
        part["differing_prompts"] = len(set(own) & set(differing))
        part.update(_times([contests[index] for index in own], candidate, counts[:, own], confidence))
    made["context_tokens"] = slice_by_context(table, positions=positions, counts=counts, confidence=confidence)
    return made


def prompt_set_entries(prompts: Sequence[EvalPrompt]) -> tuple[PromptSetEntry, ...]:
    """The sets that prompts came from, in the order of their first prompts; those of unknown origin are left out."""
    found: dict[str, PromptSetEntry] = {}
    for prompt in prompts:
        if prompt.origin is not None:
            before = found[prompt.dataset].prompts if prompt.dataset in found else 0
            found[prompt.dataset] = PromptSetEntry(prompt.dataset, prompt.origin.name, prompt.origin.sha256, before + 1)
    return tuple(found.values())


def _times(contests: Sequence[Contest], candidate: int, counts: IntArray, confidence: float) -> dict[str, Any]:
    plain, traces = [contest.plain for contest in contests], [contest.speculative[candidate] for contest in contests]
    timing = measure_timing(plain, traces, counts=counts, confidence=confidence)
    if timing is None:
        return {}
    return {
        "plain_tokens_per_s": timing.plain_tokens_per_s,
        "speculative_tokens_per_s": timing.speculative_tokens_per_s,
        "speedup": timing.speedup,
        "speedup_ci": list(timing.speedup_ci or (None, None)),
    }
