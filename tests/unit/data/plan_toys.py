"""Small plans for tests: lengths, buckets, settings, and a plan from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.config import PlanConfig
from dflash.data.plan import BatchPlan, build_plan
from dflash.data.plan_arrays import EpochArrays
from dflash.records import PlanManifest, PlannedBatch

EDGES = (48, 72, 104, 144, 192, 256)
DEMO = PlanConfig(tokens_per_batch=1024, max_sequences=64, pad_multiple_tokens=8, max_bucket_run=3)


@dataclass(frozen=True)
class Samples:
    """What a plan needs to know of a data set."""

    lengths: NDArray[Any]
    buckets: NDArray[Any]


def samples_of(lengths: Sequence[int] | NDArray[Any], edges: Sequence[int] = EDGES) -> Samples:
    """Samples of these lengths in their buckets."""
    values = np.asarray(lengths, dtype=np.int32)
    return Samples(values, np.searchsorted(np.array(edges), values).astype(np.int8))


def demo_lengths(count: int, seed: int = 0) -> NDArray[np.int32]:
    """Log-normal around 80 tokens, clipped to 24..256: short questions, some long answers."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(80), 0.7, count))
    return np.clip(drawn, 24, 256).astype(np.int32)


def plan_of(
    lengths: Sequence[int] | NDArray[Any], *, plan: PlanConfig = DEMO, seed: int = 3, epochs: int = 2, edges: Sequence[int] = EDGES
) -> BatchPlan:
    """A plan in memory."""
    return build_plan(samples_of(lengths, edges), data_fingerprint="f" * 64, plan=plan, seed=seed, epochs=epochs)


def longest_run_of(batches: Sequence[PlannedBatch]) -> int:
    """Counted the simple way."""
    return max(len(list(run)) for _, run in groupby(batch.bucket for batch in batches))


def plan_of_orders(*orders: Sequence[int], max_bucket_run: int = 3, costs: Sequence[int] | None = None) -> BatchPlan:
    """A plan of one sample a batch whose epochs have exactly these buckets in this order, and these padded lengths."""
    epochs, used = [], 0
    for order in orders:
        count = len(order)
        padded = np.full(count, 8) if costs is None else np.array(costs[used : used + count])
        epochs.append(
            EpochArrays(
                rows=np.arange(count, dtype="<u4"),
                start=np.arange(count, dtype="<u4"),
                size=np.ones(count, "<u4"),
                padded_length=padded.astype("<u4"),
                bucket=np.array(order, "<u2"),
            )
        )
        used += count
    return BatchPlan(manifest_of(len(orders), used, max_bucket_run), epochs)


def manifest_of(epochs: int, batches: int, max_bucket_run: int) -> PlanManifest:
    """A manifest in which only the run limit means anything."""
    return PlanManifest(
        plan_sha256="0" * 64, settings=DEMO.model_copy(update={"max_bucket_run": max_bucket_run}).model_dump(mode="json"),
        data_fingerprint="f" * 64, seed=0, epochs=epochs, batches=batches, batches_per_epoch=(), samples=1, tokens=1,
        padded_tokens=1, padding_efficiency=1.0, padded_lengths_tokens=(8,), longest_bucket_run=1, bucket_run_feasible=True,
        bucket_run_limit=max_bucket_run, bucket_run_note="", arrays=(),
    )  # fmt: skip
