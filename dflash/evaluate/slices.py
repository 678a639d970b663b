"""Acceptance by what the prompts are and by context length, and the alarms drawn from it.

Context bins double (1-31, 32-63, 64-127, ...): they need no setting, stay comparable between runs and data sets, and
their resolution is relative, as the effect is. An alarm is a warning and never a verdict: acceptance also differs
between kinds of prompts, and long contexts are often of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash.evaluate.bootstrap import IntArray, drawn_apart, percentile_interval, resampled_ratios, widened
from dflash.evaluate.metrics import VerificationTable, acceptance_metrics

FIRST_EDGE_TOKENS = 32
"""Upper edge of the first context bin; every further bin is twice as wide."""

FALL_FRAC = 0.8
"""Acceptance at long contexts below this share of that at short ones is an alarm (with the interval behind it)."""

MIN_VERIFICATIONS = 30
"""A context bin with fewer verifications, or fewer than `MIN_PROMPTS` independent prompts, is not judged."""

MIN_PROMPTS = 4


UNLABELLED = "unknown"
"""Name of the slice of prompts that nothing labels, where others are labelled."""


def slice_by_label(
    table: VerificationTable, labels: Sequence[str | None], *, positions: int, counts: IntArray, confidence: float
) -> dict[str, Any]:
    """Metrics of the prompts of each label; `labels[p]` is that of prompt p. None at all are no slices."""
    if all(label is None for label in labels):
        return {}
    names = np.asarray([UNLABELLED if label is None else label for label in labels])
    return {
        str(name): _slice(table, table.select(names[table.prompt] == name), positions, counts, confidence)
        for name in np.unique(names)
        if (names[table.prompt] == name).any()
    }


def slice_by_context(table: VerificationTable, *, positions: int, counts: IntArray, confidence: float) -> dict[str, Any]:
    """Metrics of each context bin, keyed `first-last` in tokens, in rising order."""
    bins = context_bins(table.context_tokens)
    slices = {}
    for index in np.unique(bins):
        low, high = bin_edges(int(index))
        part = _slice(table, table.select(bins == index), positions, counts, confidence)
        slices[f"{low}-{high - 1}"] = {"from_tokens": low, "to_tokens": high - 1, **part}
    return slices


def context_bins(context_tokens: IntArray) -> IntArray:
    """Index of the doubling bin of each context length: 0 below 32 tokens, 1 below 64, and so on."""
    return np.floor(np.log2(np.maximum(context_tokens / (FIRST_EDGE_TOKENS / 2), 1.0))).astype(np.int64)


def bin_edges(index: int) -> tuple[int, int]:
    """First context length of a bin, and the first one behind it."""
    return (0 if index == 0 else FIRST_EDGE_TOKENS << (index - 1), FIRST_EDGE_TOKENS << index)


def alarms(
    table: VerificationTable, *, prompts: int, counts: IntArray, confidence: float, bigram_level: float, datasets: Sequence[str]
) -> list[str]:
    """Sentences about pathologies that a good-looking pipeline can hide.

    Args:
        table: verifications of all prompts.
        prompts: number of prompts.
        counts: bootstrap resamples.
        confidence: level of the interval that the context alarm is judged by.
        bigram_level: see `bigram_accuracy`; NaN if it is unknown.
        datasets: set of each prompt; one of several that is stuck at 1.00 hides in the pooled figure.
    """
    found = []
    stuck = _stuck(table, datasets)
    if stuck is not None:
        found.append(
            f"acceptance length is exactly 1.00{stuck}: no draft was ever accepted; look for a wrong mask token, vocabulary or tap "
            "layer"
        )
    first = float((table.accepted_counted >= 1).mean())
    if first < bigram_level:
        found.append(
            f"first-position acceptance {first:.2f} is below the bigram level {bigram_level:.2f}: "
            "the drafter knows less than the previous token alone tells"
        )
    found += _context_alarm(table, prompts=prompts, counts=counts, confidence=confidence)
    return found


def bigram_accuracy(answers: Sequence[Sequence[int]]) -> float:
    """Share of answer tokens guessed by the most frequent follower of the token before, counted on the other answers.

    Returns:
        Accuracy in 0..1 over all tokens that have a predecessor in their answer; NaN if there are none.
    """
    pairs = [np.stack([np.asarray(answer[:-1]), np.asarray(answer[1:])], axis=1) for answer in answers if len(answer) > 1]
    if not pairs:
        return float("nan")
    table: dict[tuple[int, int], int] = {}
    followers: dict[int, set[int]] = {}
    for previous, following in np.concatenate(pairs).tolist():
        table[previous, following] = table.get((previous, following), 0) + 1
        followers.setdefault(previous, set()).add(following)
    right = total = 0
    for own in pairs:
        own_counts: dict[tuple[int, int], int] = {}
        for previous, following in own.tolist():
            own_counts[previous, following] = own_counts.get((previous, following), 0) + 1
        for previous, following in own.tolist():
            others = {word: table[previous, word] - own_counts.get((previous, word), 0) for word in followers[previous]}
            guess = max(others, key=lambda word: (others[word], -word))
            right += int(others[guess] > 0 and guess == following)
            total += 1
    return right / total


def _slice(
    whole: VerificationTable, part: VerificationTable, positions: int, counts: IntArray, confidence: float
) -> dict[str, Any]:
    prompts = counts.shape[1]
    figures = acceptance_metrics(part, prompts=prompts, positions=positions, counts=counts, confidence=confidence)
    own = int(np.unique(part.prompt).size)
    return {
        "prompts": own,
        "verifications": figures.verifications,
        "verification_frac": figures.verifications / len(whole),
        "acceptance_length": figures.acceptance_length,
        "acceptance_ci": list(figures.acceptance_ci or (None, None)),
        "acceptance_length_macro": figures.acceptance_length_macro,
        "acceptance_length_untruncated": figures.acceptance_length_untruncated,
        "accepted_length": figures.accepted_length,
        "survival_per_position": list(figures.survival_per_position),
        "conditional_per_position": list(figures.conditional_per_position),
        "drafted_per_position": list(figures.drafted_per_position),
        "reached_per_position": list(figures.reached_per_position),
        "accepted_per_position": list(figures.accepted_per_position),
        "acceptance_histogram": list(figures.acceptance_histogram),
    }


def _stuck(table: VerificationTable, datasets: Sequence[str]) -> str | None:
    """Where no draft was accepted: "" everywhere, " on <sets>" on some sets that were verified often enough; None nowhere."""
    if int(table.counted.sum()) == len(table):
        return ""
    names = np.asarray(datasets)[table.prompt]
    found = []
    for name in np.unique(names):
        part = table.select(names == name)
        if len(part) >= MIN_VERIFICATIONS and int(part.counted.sum()) == len(part):
            found.append(str(name))
    return f" on {', '.join(found)}" if found else None


def _context_alarm(table: VerificationTable, *, prompts: int, counts: IntArray, confidence: float) -> list[str]:
    bins = context_bins(table.context_tokens)
    judged = [int(index) for index in np.unique(bins) if _can_be_judged(table.select(bins == index), counts)]
    if len(judged) < 2:
        return []
    near_part, far_part = (table.select(bins == index) for index in (judged[0], judged[-1]))
    short, long = (_resampled_length(part, prompts, counts) for part in (near_part, far_part))
    fewest = min(_independent(part, counts) for part in (near_part, far_part))
    low, high = percentile_interval(long / short, confidence=widened(confidence, prompts=fewest))
    if np.isnan(high) or high >= FALL_FRAC:
        return []
    near, far = bin_edges(judged[0]), bin_edges(judged[-1])
    sentence = (
        f"acceptance falls with context length: at {far[0]}-{far[1] - 1} tokens it is {low:.2f} to {high:.2f} of that at "
        f"{near[0]}-{near[1] - 1}; compare kinds of prompts, then the training lengths"
    )
    return [sentence]


def _can_be_judged(part: VerificationTable, counts: IntArray) -> bool:
    return len(part) >= MIN_VERIFICATIONS and _independent(part, counts) >= MIN_PROMPTS


def _independent(part: VerificationTable, counts: IntArray) -> int:
    return drawn_apart(counts, np.isin(np.arange(counts.shape[1]), part.prompt))


def _resampled_length(part: VerificationTable, prompts: int, counts: IntArray) -> npt.NDArray[np.float64]:
    passes = part.sum_by_prompt(np.ones(len(part), dtype=np.int64), prompts=prompts)
    return resampled_ratios(part.sum_by_prompt(part.counted, prompts=prompts), passes, counts=counts)
