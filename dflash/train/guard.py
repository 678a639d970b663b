"""The gradient guard: forbids an update whose norm is far over what its kind of step usually has; pure.

Invariant: the limit comes from accepted updates alone and is part of the checkpoint, so a resumed run decides as the
uninterrupted one would have; all ranks see the same norms and decide alike.
Kinds: a bucket's norm is typical for it (short samples have noisier gradients), so steps of one bucket are judged among
themselves and steps of several buckets together. At most `MAX_IN_ROW` updates are forbidden in a row: after a lasting change of the
norms the guard learns the new level instead of stopping the training.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection

from dflash.records import GuardState

KEPT_NORMS = 64
"""Newest accepted norms a kind: enough for a steady median, and the state stays small."""

MIN_NORMS = 16
"""Below this many the median says too little, and nothing is forbidden."""

MAX_IN_ROW = 3

NEW_GUARD = GuardState(norms={}, skipped_in_row=0)


def kind_of(buckets: Collection[int]) -> str:
    """Key of a step by the buckets of its micro-batches."""
    kinds = set(buckets)
    return str(next(iter(kinds))) if len(kinds) == 1 else "mixed"


def norm_limit(guard: GuardState | None, kind: str, *, over: float | None) -> float:
    """Largest gradient norm that the next update of a kind may have; infinite where the guard is off or knows too little.

    Args:
        guard: what it remembers; None where it is off.
        kind: of the step.
        over: `train.skip_update_if_grad_over`.
    """
    if guard is None or over is None or guard.skipped_in_row >= MAX_IN_ROW:
        return math.inf
    norms = guard.norms.get(kind, ())
    return over * statistics.median(norms) if len(norms) >= MIN_NORMS else math.inf


def remember(guard: GuardState | None, kind: str, *, norm: float, accepted: bool) -> GuardState | None:
    """The guard after an update of a kind with a finite norm."""
    if guard is None:
        return None
    if not accepted:
        return dataclasses.replace(guard, skipped_in_row=guard.skipped_in_row + 1)
    norms = (*guard.norms.get(kind, ()), norm)[-KEPT_NORMS:]
    return GuardState(norms={**guard.norms, kind: norms}, skipped_in_row=0)
