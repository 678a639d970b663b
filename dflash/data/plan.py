"""The batch plan: which samples meet in which micro-batch, at what padded length, in what order; for all epochs at once.

Invariant: every sample is in exactly one batch of every epoch, a batch holds samples of one bucket, and
`sequences x padded length` never exceeds the token budget. `build_plan` is a pure function of (lengths, settings, seed,
epochs); the stored plan is nevertheless the truth of a run, so that a run survives a change of library versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.config import Config, PlanConfig
from dflash.data.interleave import interleave_buckets, longest_run, shortest_feasible_run
from dflash.data.packing import PackedBucket, pack_bucket
from dflash.data.plan_file import BatchPlan, content_sha256, load_plan, write_plan
from dflash.data.reader import SampleStore
from dflash.errors import DataError
from dflash.records import PlanManifest, PlannedBatch

__all__ = ["BatchPlan", "PlannedRun", "build_plan", "load_plan", "prepare_plan"]

_PACK, _BATCH_ORDER, _INTERLEAVE = range(3)
"""Purposes of random streams: each is keyed by (seed, purpose, epoch, bucket), never shared."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run's batch plan, and whether it was there already."""

    plan: BatchPlan
    reused: bool


def build_plan(lengths: NDArray[Any], buckets: NDArray[Any], *, plan: PlanConfig, seed: int, epochs: int) -> list[PlannedBatch]:
    """Pack and order the micro-batches of all epochs.

    Args:
        lengths: [n] length of each sample, in tokens.
        buckets: [n] bucket of each sample.
        plan: budgets and limits.
        seed: decides everything random, together with the epoch.
        epochs: passes over the samples.

    Returns:
        Batches in consumption order; `position` counts through all epochs.

    Raises:
        DataError: there is no sample, or one does not fit into a batch.
    """
    padded = _padded_lengths(lengths, plan)
    members = [np.flatnonzero(buckets == bucket) for bucket in range(int(buckets.max()) + 1)]
    batches: list[PlannedBatch] = []
    orders: list[NDArray[np.int64]] | None = None
    for epoch in range(epochs):
        packed = [_pack(padded, rows, plan, (seed, epoch, bucket)) for bucket, rows in enumerate(members)]
        if orders is None:  # the counts are the same in every epoch: they follow from the lengths alone
            orders = _orders([len(bucket.padded_length) for bucket in packed], plan, seed, epochs)
        queues = [
            _batches_of(bucket, rows, _rng(seed, _BATCH_ORDER, epoch, number))
            for number, (bucket, rows) in enumerate(zip(packed, members, strict=True))
        ]
        for bucket in orders[epoch].tolist():
            padded_length, rows = next(queues[bucket])
            batches.append(PlannedBatch(len(batches), epoch, bucket, padded_length, rows))
    return batches


def prepare_plan(config: Config, data_dir: Path, plan_dir: Path) -> PlannedRun:
    """Build the plan of a run and store it, or load the one that is there.

    Args:
        config: its `plan`, `run.seed` and `train.epochs` determine the plan.
        data_dir: a complete data set.
        plan_dir: folder inside the run's folder; created if absent.

    Raises:
        DataError: the folder holds a plan made from other data or settings, or a damaged one.
    """
    store = SampleStore(data_dir)
    wanted = {
        "settings": config.plan.model_dump(mode="json"),
        "data_fingerprint": store.manifest.fingerprint,
        "seed": config.run.seed,
        "epochs": config.train.epochs,
    }
    if (plan_dir / "manifest.json").exists():
        plan = load_plan(plan_dir)
        for name, value in wanted.items():
            found = getattr(plan.manifest, name)
            if found != value:
                raise DataError(
                    f"{plan_dir} holds a plan with {name} {found!r}, this configuration asks for {value!r}",
                    remedy="start a new run for other data or settings: a run keeps the plan it began with",
                )
        return PlannedRun(plan, reused=True)
    batches = build_plan(store.lengths, store.buckets, plan=config.plan, seed=config.run.seed, epochs=config.train.epochs)
    plan = BatchPlan(_manifest(batches, store, config), tuple(batches))
    write_plan(plan, plan_dir)
    return PlannedRun(plan, reused=False)


def _padded_lengths(lengths: NDArray[Any], plan: PlanConfig) -> NDArray[np.int64]:
    if len(lengths) == 0:
        raise DataError("there is no sample to plan batches for", remedy="build a data set that holds samples")
    multiple = plan.pad_multiple_tokens
    padded: NDArray[np.int64] = -(-lengths.astype(np.int64) // multiple) * multiple
    longest = int(padded.max())
    if longest > plan.tokens_per_batch:
        raise DataError(
            f"a sample of {int(lengths.max())} tokens, padded to {longest}, exceeds plan.tokens_per_batch {plan.tokens_per_batch}",
            remedy="raise plan.tokens_per_batch, or lower data.max_length_tokens",
        )
    return padded


def _pack(padded: NDArray[np.int64], rows: NDArray[np.int64], plan: PlanConfig, key: tuple[int, int, int]) -> PackedBucket:
    seed, epoch, bucket = key
    return pack_bucket(
        padded[rows],
        tokens_per_batch=plan.tokens_per_batch,
        max_sequences=plan.max_sequences,
        rng=_rng(seed, _PACK, epoch, bucket),
    )


def _orders(counts: Sequence[int], plan: PlanConfig, seed: int, epochs: int) -> list[NDArray[np.int64]]:
    rngs = [_rng(seed, _INTERLEAVE, epoch, 0) for epoch in range(epochs)]
    return interleave_buckets(counts, max_run=plan.max_bucket_run, epochs=epochs, rngs=rngs)


def _batches_of(packed: PackedBucket, rows: NDArray[np.int64], rng: np.random.Generator) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(padded length, global rows) of a bucket's batches in random order."""
    members = rows[packed.order]
    for batch in rng.permutation(len(packed.padded_length)).tolist():
        start, end = packed.starts[batch], packed.starts[batch + 1]
        yield int(packed.padded_length[batch]), tuple(members[start:end].tolist())


def _rng(seed: int, purpose: int, epoch: int, bucket: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, epoch, bucket))


def _manifest(batches: Sequence[PlannedBatch], store: SampleStore, config: Config) -> PlanManifest:
    epochs = config.train.epochs
    per_epoch = np.bincount([batch.epoch for batch in batches], minlength=epochs)
    buckets = np.array([batch.bucket for batch in batches])
    in_first_epoch = np.bincount(buckets[: per_epoch[0]])
    tokens = epochs * int(store.lengths.sum(dtype=np.int64))
    padded_tokens = sum(len(batch.rows) * batch.padded_length_tokens for batch in batches)
    feasible = shortest_feasible_run(in_first_epoch.tolist(), epochs=epochs) <= config.plan.max_bucket_run
    return PlanManifest(
        plan_sha256=content_sha256(batches),
        settings=config.plan.model_dump(mode="json"),
        data_fingerprint=store.manifest.fingerprint,
        seed=config.run.seed,
        epochs=epochs,
        batches=len(batches),
        batches_per_epoch=tuple(per_epoch.tolist()),
        samples=store.rows,
        tokens=tokens,
        padded_tokens=padded_tokens,
        padding_efficiency=tokens / padded_tokens,
        longest_bucket_run=longest_run(buckets),
        bucket_run_feasible=feasible,
    )
