"""What `train.skip_update_if_grad_over` saves: the demo's drafter with bad batches strewn in, clipped only and guarded.

A bad batch has one and the same token for every label, as a damaged shard or a wrong mask may make it: all slots pull the same way.
Clipping brings its gradient to the norm of a good one, which still moves the weights as far, in no good direction, and stays in
the moments. Three drafters see the same batches in the same order, step by step in one process: one without bad batches, one
clipped, one clipped and guarded. Needs a run whose data and plan are there (`make demo`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.optimizers import END_STEPS, Contestant, Ground, run_on_ground
from dflash.records import GuardState
from dflash.train.features import FeatureBatch
from dflash.train.guard import NEW_GUARD, kind_of, norm_limit, remember
from dflash.train.schedule import lr_at

NAME = "grad_guard"
STEPS = 500
SEEDS = (20260, 20261)
EVERY = (20, 100)
"""One batch in so many is bad."""
WARM_UP_STEPS = 100
OVER = 4.0
KINDS = ("clean", "clipped", "guarded")


@dataclasses.dataclass(slots=True)
class Guarded:
    """A contestant with or without the guard; `skipped`: (bad, good) updates that it forbade; `norms`: of bad ones."""

    kind: str
    inner: Contestant
    guard: GuardState | None
    skipped: list[int]
    norms: list[float]

    def train(self, batch: FeatureBatch, *, bad: bool, steps: int) -> None:
        """One step as the trainer makes it."""
        one, train = self.inner, self.inner.config.train
        kind = kind_of({batch.planned.bucket})
        limit = norm_limit(self.guard, kind, over=OVER)
        one.stepper.accumulate(batch)
        update = one.stepper.update(lr=lr_at(train, step=len(one.ce), total_steps=steps, lr_scale=1.0), norm_limit=limit)
        self.guard = remember(self.guard, kind, norm=update.grad_norm, accepted=not update.over_limit)
        self.skipped[0 if bad else 1] += update.over_limit
        if bad:
            self.norms.append(update.grad_norm)
        one.ce.append(update.ce)


def main() -> int:
    """Run the benchmark; see `--help`."""
    return run_on_ground(NAME, __doc__ or "", _figures)


def _figures(ground: Ground, arguments: argparse.Namespace) -> dict[str, Any]:
    steps, seeds, everies = (60, SEEDS[:1], EVERY[:1]) if arguments.quick else (STEPS, SEEDS, EVERY)
    warm_up = min(WARM_UP_STEPS, steps // 2)
    figures: dict[str, Any] = {"steps": steps, "seeds": len(seeds), "guard_over": OVER, "first_bad_step": warm_up}
    for every in everies:
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for seed in seeds:
            for kind, row in _train(ground, seed, steps=steps, every=every, warm_up=warm_up):
                rows[kind].append(row)
                print(every, seed, kind, row, file=sys.stderr, flush=True)
        for kind, found in rows.items():
            for key in found[0]:
                figures[f"one_in_{every}_{kind}_{key}"] = round(statistics.fmean(row[key] for row in found), 4)
    return figures


def _train(ground: Ground, seed: int, *, steps: int, every: int, warm_up: int) -> Iterator[tuple[str, dict[str, float]]]:
    config = ground.inputs.config
    kind, lr = config.train.optimizer.kind, config.train.lr
    everyone = [
        Guarded(name, ground.contestant(kind, seed=seed, lr=lr), NEW_GUARD if name == "guarded" else None, [0, 0], [])
        for name in KINDS
    ]
    bad_steps = 0
    for number, batch in enumerate(ground.features(seed, steps)):
        bad = number >= warm_up and number % every == every // 2
        bad_steps += bad
        for one in everyone:
            one.train(spoiled(batch, seed=number) if bad and one.kind != "clean" else batch, bad=bad, steps=steps)
    held_out = ground.held_out()
    for one in everyone:
        yield (
            one.kind,
            {
                "held_out_ce": ground.ce(one.inner.drafter, held_out),
                "good_steps_ce_at_end": statistics.median(one.inner.ce[-END_STEPS:]),
                "bad_updates_applied": (bad_steps - one.skipped[0]) * (one.kind != "clean"),
                "good_updates_skipped": one.skipped[1],
                "bad_grad_norm": statistics.median(one.norms),
            },
        )


def spoiled(batch: FeatureBatch, *, seed: int) -> FeatureBatch:
    """The batch with one and the same token for every label."""
    token = int(torch.randint(int(batch.labels.labels.max()) + 1, (1,), generator=torch.Generator().manual_seed(seed)))
    return dataclasses.replace(batch, labels=batch.labels._replace(labels=torch.full_like(batch.labels.labels, token)))


if __name__ == "__main__":
    raise SystemExit(main())
