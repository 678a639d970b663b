"""The batch plan of a run: which samples meet in which micro-batch, at what padded length, in what order; for all epochs.

`Planner` makes it epoch by epoch, `PlanWriter` stores each epoch before the next is made, so memory holds one epoch. The stored
plan is the truth of a run: a run survives a change of library versions, and never gets another plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash.config import Config, PlanConfig
from dflash.data.interleave import NOTHING_YET, end_of, longest_run, shortest_feasible_run
from dflash.data.plan_arrays import BatchPlan, EpochArrays, describe_epoch, plan_sha256
from dflash.data.plan_build import Planner, run_limit
from dflash.data.plan_file import MANIFEST_FILE, PlanWriter, load_plan
from dflash.errors import DataError
from dflash.records import PlanArray, PlanManifest

__all__ = ["BatchPlan", "PlannedRun", "PlannedSamples", "build_plan", "load_plan", "prepare_plan", "survey_plan"]


class PlannedSamples(Protocol):
    """What a plan needs to know of a data set."""

    @property
    def lengths(self) -> NDArray[Any]:
        """[n] tokens of each sample."""

    @property
    def buckets(self) -> NDArray[Any]:
        """[n] bucket of each sample."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run's batch plan, and whether it was there already."""

    plan: BatchPlan
    reused: bool


def build_plan(samples: PlannedSamples, *, data_fingerprint: str, plan: PlanConfig, seed: int, epochs: int) -> BatchPlan:
    """A plan in memory.

    Args:
        samples: lengths and buckets.
        data_fingerprint: of the data set.
        plan: budgets, limits and order.
        seed: decides everything random, together with the epoch.
        epochs: passes over the samples.

    Raises:
        DataError: there is no sample, or one does not fit into a batch.
    """
    making = _Making(samples, plan=plan, seed=seed, epochs=epochs)
    made = []
    for epoch, arrays in enumerate(making.epochs()):
        making.add(arrays, describe_epoch(arrays, epoch=epoch))
        made.append(arrays)
    return BatchPlan(making.manifest(data_fingerprint), made)


def prepare_plan(config: Config, samples: PlannedSamples, plan_dir: Path, *, data_fingerprint: str) -> PlannedRun:
    """Build the plan of a run and store it, or load the one that is there.

    Args:
        config: its `plan`, `run.seed` and `train.epochs` determine the plan.
        samples: of a complete data set.
        plan_dir: folder inside the run's folder; created if absent.
        data_fingerprint: of the data set.

    Raises:
        DataError: the folder holds a plan made from other data or settings, or a damaged one; or a sample fits no batch.
    """
    identity = {"data_fingerprint": data_fingerprint, "seed": config.run.seed, "epochs": config.train.epochs}
    if (plan_dir / MANIFEST_FILE).exists():
        plan = load_plan(plan_dir)
        for name, value in {"settings": config.plan.model_dump(mode="json"), **identity}.items():
            found = getattr(plan.manifest, name)
            if found != value:
                raise DataError(
                    f"{plan_dir} holds a plan with {name} {found!r}, this configuration asks for {value!r}",
                    remedy="start a new run for other data or settings: a run keeps the plan it began with",
                )
        return PlannedRun(plan, reused=True)
    making = _Making(samples, plan=config.plan, seed=config.run.seed, epochs=config.train.epochs)
    writer = PlanWriter(plan_dir)
    for arrays in making.epochs():
        making.add(arrays, writer.add(arrays))
    writer.finish(making.manifest(data_fingerprint))
    return PlannedRun(load_plan(plan_dir), reused=False)


def survey_plan(config: Config, samples: PlannedSamples, *, data_fingerprint: str) -> tuple[PlanManifest, EpochArrays]:
    """Make a run's plan and keep only its manifest and its first epoch; see `prepare_plan`."""
    making = _Making(samples, plan=config.plan, seed=config.run.seed, epochs=config.train.epochs)
    epochs = making.epochs()
    first = next(epochs)
    making.add(first, describe_epoch(first, epoch=0))
    for epoch, arrays in enumerate(epochs, start=1):
        making.add(arrays, describe_epoch(arrays, epoch=epoch))
    return making.manifest(data_fingerprint), first


class _Making:
    """A plan in the making, epoch by epoch, and what its manifest will tell."""

    def __init__(self, samples: PlannedSamples, *, plan: PlanConfig, seed: int, epochs: int) -> None:
        self._planner = Planner(samples.lengths, samples.buckets, plan=plan, seed=seed, epochs=epochs)
        self._samples = samples
        self._plan = plan
        self._seed = seed
        self._epochs = epochs
        self._entries: list[PlanArray] = []
        self._batches: list[int] = []
        self._padded_tokens = 0
        self._longest_run = 0
        self._end = NOTHING_YET
        self._counts: list[list[int]] = []

    def epochs(self) -> Iterator[EpochArrays]:
        return self._planner.epochs()

    def add(self, arrays: EpochArrays, entries: Sequence[PlanArray]) -> None:
        """Count an epoch; `entries` are those of its arrays."""
        self._entries += entries
        self._batches.append(len(arrays))
        self._padded_tokens += int(arrays.padded_tokens.sum())
        self._longest_run = max(self._longest_run, longest_run(arrays.bucket, after=self._end))
        self._end = end_of(arrays.bucket, after=self._end)
        self._counts.append(np.bincount(arrays.bucket).tolist())

    def manifest(self, data_fingerprint: str) -> PlanManifest:
        tokens = self._epochs * int(self._samples.lengths.sum(dtype=np.int64))
        return PlanManifest(
            plan_sha256=plan_sha256(self._entries),
            settings=self._plan.model_dump(mode="json"),
            data_fingerprint=data_fingerprint,
            seed=self._seed,
            epochs=self._epochs,
            batches=sum(self._batches),
            batches_per_epoch=tuple(self._batches),
            samples=len(self._samples.lengths),
            tokens=tokens,
            padded_tokens=self._padded_tokens,
            padding_efficiency=tokens / self._padded_tokens,
            padded_lengths_tokens=tuple(self._planner.padded.tokens.tolist()),
            longest_bucket_run=self._longest_run,
            bucket_run_feasible=all(self._shortest(counts) <= self._plan.max_bucket_run for counts in self._counts),
            bucket_run_limit=self._limit(),
            bucket_run_note=self._note(),
            arrays=tuple(self._entries),
        )

    def _shortest(self, counts: list[int]) -> int:
        return shortest_feasible_run(counts, epochs=self._epochs)

    def _limit(self) -> int:
        if self._plan.order != "interleave" or self._plan.equal_cost_neighbours > 1:
            return 0
        return max(run_limit(counts, self._plan, epochs=self._epochs) for counts in self._counts)

    def _note(self) -> str:
        """What is feasible, and why."""
        counts = max(self._counts, key=self._shortest)
        total, most, shortest = sum(counts), max(counts), self._shortest(counts)
        share = f"bucket {counts.index(most)} has {most} of {total} batches an epoch"
        if self._plan.order != "interleave":
            return f"the order `{self._plan.order}` keeps no limit; runs of {shortest} are the shortest possible, as {share}"
        if self._plan.equal_cost_neighbours > 1:
            return f"groups of {self._plan.equal_cost_neighbours} batches of equal cost keep no limit; {share}"
        if shortest <= self._plan.max_bucket_run:
            return f"runs of at most {self._plan.max_bucket_run} are feasible, as {share}"
        wanted = f"runs of at most {self._plan.max_bucket_run} are not feasible"
        return f"{wanted}: {share}, {total - most} of others; {shortest} is the shortest"
