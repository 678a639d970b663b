"""Acceptance metrics from single verifications, in the one vocabulary of training, decoding and serving.

Invariant: everything is a sum over verifications divided once; nothing is a mean of means unless it is named macro.
Two conventions are kept side by side. *Counted* (headline): a verification is worth the tokens that reach the answer,
so tokens behind the first stop id or the length limit do not count. *Untruncated*: accepted + 1, as the z-lab
reference prints it; it flatters short answers, because the last block is paid in full whatever was thrown away.

A stop token inside the accepted drafts hides what the later positions would have been worth. For the conditional rate
those positions count as not reached (censored) rather than as rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash.evaluate.bootstrap import IntArray, ratio_interval


@dataclass(frozen=True, slots=True)
class VerificationTable:
    """One row a target verification; all arrays `[n]`.

    Attributes:
        prompt: index of the prompt it belongs to, 0..prompts-1.
        context_tokens: tokens in front of the block's anchor when it was drafted.
        drafted: proposed tokens (block size - 1; fewer where a drafter had nothing to propose).
        accepted: longest prefix of the proposal that the target chose itself, untruncated.
        counted: tokens of this verification that reached the answer, 1..accepted+1.
    """

    prompt: IntArray
    context_tokens: IntArray
    drafted: IntArray
    accepted: IntArray
    counted: IntArray

    def __len__(self) -> int:
        return int(self.prompt.size)

    @property
    def accepted_counted(self) -> IntArray:
        """Accepted drafts that reached the answer, `[n]`."""
        return np.minimum(self.accepted, self.counted)

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """Where the answer ended inside the accepted drafts, `[n]`: later positions were never judged."""
        return self.counted <= self.accepted

    def select(self, rows: npt.NDArray[np.bool_]) -> VerificationTable:
        """The rows where the mask `[n]` is true."""
        return VerificationTable(
            self.prompt[rows], self.context_tokens[rows], self.drafted[rows], self.accepted[rows], self.counted[rows]
        )

    def sum_by_prompt(self, values: npt.NDArray[np.int64], *, prompts: int) -> IntArray:
        """Sum of `values[n]` for each prompt, `[prompts]`."""
        return np.bincount(self.prompt, weights=values, minlength=prompts).astype(np.int64)


@dataclass(frozen=True, slots=True)
class AcceptanceMetrics:
    """Acceptance over a set of verifications; the fields are those of `records.EvaluationResult`.

    One prompt says nothing about others: its `acceptance_ci` is None.
    """

    verifications: int
    drafted: int
    accepted: int
    committed_tokens: int
    acceptance_length: float
    acceptance_length_untruncated: float
    accepted_length: float
    acceptance_length_macro: float
    acceptance_ci: tuple[float, float] | None
    survival_per_position: tuple[float, ...]
    conditional_per_position: tuple[float, ...]
    drafted_per_position: tuple[int, ...]
    reached_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    acceptance_histogram: tuple[int, ...]


def verification_table(rows: Iterable[tuple[int, int, int, int, int]]) -> VerificationTable:
    """Rows of (prompt, context_tokens, drafted, accepted, counted) as columns."""
    columns = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
    return VerificationTable(*(np.ascontiguousarray(columns[:, index]) for index in range(5)))


def acceptance_metrics(
    table: VerificationTable, *, prompts: int, positions: int, counts: IntArray, confidence: float
) -> AcceptanceMetrics:
    """All acceptance figures of a table.

    Args:
        table: verifications, at least one.
        prompts: number of prompts P (prompts without any verification weigh nothing).
        positions: draft positions, block size - 1.
        counts: bootstrap resamples `[R, P]` from `resample_counts`.
        confidence: level of the interval.

    Returns:
        Pooled figures; `survival_per_position` sums to `accepted_length`.
    """
    total = len(table)
    accepted = table.accepted_counted
    per_prompt = table.sum_by_prompt(table.counted, prompts=prompts)
    passes = table.sum_by_prompt(np.ones(total, dtype=np.int64), prompts=prompts)
    decoded = passes > 0
    by_position = position_counts(table, positions=positions)
    return AcceptanceMetrics(
        verifications=total,
        drafted=int(table.drafted.sum()),
        accepted=int(accepted.sum()),
        committed_tokens=int(table.counted.sum()),
        acceptance_length=float(table.counted.sum() / total),
        acceptance_length_untruncated=float((table.accepted + 1).sum() / total),
        accepted_length=float(accepted.sum() / total),
        acceptance_length_macro=float((per_prompt[decoded] / passes[decoded]).mean()),
        acceptance_ci=ratio_interval(per_prompt, passes, counts=counts, confidence=confidence),
        survival_per_position=survival_rates(table, positions=positions),
        conditional_per_position=by_position.conditional,
        drafted_per_position=by_position.drafted,
        reached_per_position=by_position.reached,
        accepted_per_position=by_position.accepted,
        acceptance_histogram=tuple(int(value) for value in np.bincount(accepted, minlength=positions + 1)),
    )


def survival_rates(table: VerificationTable, *, positions: int) -> tuple[float, ...]:
    """Share of verifications whose first k drafts all reached the answer, k = 1..positions."""
    accepted = table.accepted_counted
    return tuple(float((accepted >= k).mean()) for k in range(1, positions + 1))


def survival_untruncated(table: VerificationTable, *, positions: int) -> tuple[float, ...]:
    """Share of verifications whose first k drafts the target chose itself, k = 1..positions, wherever the answer ended."""
    return tuple(float((table.accepted >= k).mean()) for k in range(1, positions + 1))


@dataclass(frozen=True, slots=True)
class PositionCounts:
    """Verifications by draft position k = 1..positions.

    Attributes:
        drafted: that proposed position k.
        reached: of these, where the k-1 drafts before it were accepted and the answer had not ended.
        accepted: of these, where position k was accepted too.
    """

    drafted: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share accepted at k of those that reached it; 0 where none did."""
        return tuple(took / came if came else 0.0 for took, came in zip(self.accepted, self.reached, strict=True))


def position_counts(table: VerificationTable, *, positions: int) -> PositionCounts:
    """What became of each draft position, over all verifications of a table."""
    accepted, cut = table.accepted_counted, table.cut
    drafted, reached = [], []
    for k in range(1, positions + 1):
        proposed = table.drafted >= k
        drafted.append(int(proposed.sum()))
        reached.append(int((proposed & (accepted >= k - 1) & ~(cut & (table.counted < k))).sum()))
    return PositionCounts(
        tuple(drafted), tuple(reached), tuple(int((accepted >= k).sum()) for k in range(1, positions + 1))
    )  # fmt: skip
