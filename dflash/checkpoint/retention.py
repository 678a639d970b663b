"""Which checkpoints may be deleted: a pure decision.

Invariant: never `step-0`, never the newest `keep_clean` clean ones, never anything newer than the newest clean one,
never the newest checkpoint of all, never a pinned one (the best). The price: while nothing but `step-0` is clean, nothing is
deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dflash.records import CheckpointState


def checkpoints_to_delete(
    steps: Sequence[int],
    states: Mapping[int, CheckpointState],
    *,
    keep_clean: int,
    keep_other: int,
    pinned: Collection[int],
) -> list[int]:
    """Steps that may go.

    Args:
        steps: complete checkpoints on disk.
        states: their ledger states; a step without one is treated as not judged yet.
        keep_clean: clean checkpoints that stay (newest first; `step-0` not counted).
        keep_other: newest others, older than the newest clean one, that stay besides.
        pinned: steps that stay whatever their state, besides all others.

    Returns:
        Steps to delete, ascending.
    """
    ordered = sorted(set(steps) - {0})
    clean = [step for step in ordered if states.get(step) == "clean"]
    if not clean:
        return []
    kept = set(clean[-keep_clean:]) | set(pinned) | {step for step in ordered if step >= clean[-1]}
    others = [step for step in ordered if step not in kept]
    return others[: max(0, len(others) - keep_other)]
