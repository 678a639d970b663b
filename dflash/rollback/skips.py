"""Plan positions that are left out: half-open ranges, merged, added up over all rollbacks of a run.

Invariant: a position once skipped stays skipped. A rollback that goes further back than an earlier one therefore does
not meet the earlier one's culprit again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash.records.rollback import LedgerLine, RollbackEntry, SkipRange


def merged(ranges: Iterable[SkipRange]) -> tuple[SkipRange, ...]:
    """The same positions as ascending ranges that neither touch nor overlap; empty ones vanish."""
    result: list[SkipRange] = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((first, end))
    return tuple(result)


def size_of(ranges: Sequence[SkipRange]) -> int:
    """Positions in merged ranges."""
    return sum(end - first for first, end in ranges)


def part_behind(ranges: Iterable[SkipRange], position: int) -> tuple[SkipRange, ...]:
    """What of the ranges lies at or behind a plan position."""
    return merged((max(first, position), end) for first, end in ranges)


def skips_in_force(ledger: Iterable[LedgerLine]) -> tuple[SkipRange, ...]:
    """Everything that a trainer started now leaves out."""
    return merged(part for line in ledger if isinstance(line, RollbackEntry) and line.phase == "end" for part in line.plan.skip)


def culprits(first: int, end: int, *, at_least: int, not_before: int) -> tuple[SkipRange, ...]:
    """Positions to skip for damage seen in [first, end).

    Args:
        first: plan position consumed just before the onset.
        end: one past the last consumed when the alarm was raised.
        at_least: positions wanted; more are taken from before `first`, where a late onset would have its cause.
        not_before: plan position of the state returned to: what lies before is part of that state.
    """
    return merged([(max(not_before, min(first, end - at_least)), end)])
