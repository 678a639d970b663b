"""The best checkpoint by its probes: a pure choice.

Invariant: the first probed checkpoint is the best at once; after that another takes its place only if the comparison says so.
A checkpoint that was abandoned, is suspect or bad, or whose folder is gone, is no candidate, and cannot stay the best either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dflash.checkpoint.probes import outcomes
from dflash.records import LedgerEntry, ProbeFigures, ProbeRecord

_USABLE = frozenset({"durable", "probation", "clean"})


def best_checkpoint(
    records: Sequence[ProbeRecord],
    current: Mapping[int, LedgerEntry],
    *,
    in_place: Collection[int],
    best: int | None,
    is_better: Callable[[ProbeFigures, ProbeFigures], bool],
) -> int | None:
    """Step of the best checkpoint, None if none was probed.

    Args:
        records: lines of the probes' file.
        current: last ledger entry of every step.
        in_place: steps whose folders are complete.
        best: what was the best until now.
        is_better: whether the first figures are better than the second beyond doubt; both of the same prompts.
    """
    figures = {
        step: record.figures
        for (step, segment), record in sorted(outcomes(records).items())
        if record.figures is not None and step in in_place and _usable(current.get(step), segment)
    }
    chosen = best if best in figures else None
    for step, found in figures.items():
        if chosen is None or is_better(found, figures[chosen]):
            chosen = step
    return chosen


def _usable(entry: LedgerEntry | None, segment: int) -> bool:
    return entry is not None and entry.segment == segment and entry.state in _USABLE
