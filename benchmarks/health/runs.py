"""A simulated run as columns: healthy first, then changed by faults, then turned into the items that a log reader gives.

One row is one step record in the order of the log. Everything drawn at random comes from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.health.mixes import Floats, Mix
from dflash.config import TrainConfig
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.lines import EventLine, LogItem, LogReplaced, MicroBatchLine, StepLine, TornLine
from dflash.records.log import LOG_SCHEMA_VERSION

Ints = npt.NDArray[np.int64]

START_S = 1_700_000_000.0
QUEUE_FULL = 300
TARGETS = 6
ROWS = 8  # samples of a micro-batch
SAVE_INTERVAL = 200
SAVE_STEPS = 3  # steps that a save takes
CLIP_NORM = 1.0


@dataclass
class Columns:
    """One row a step record; micro-batch columns have a second axis."""

    step: Ints
    segment: Ints
    epoch: Ints
    bucket: Ints
    batch_id: Ints
    first_row: Ints
    n_tokens: Ints
    loss: Floats
    accuracy: Floats
    grad_norm: Floats
    lr: Floats
    skipped: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    step_time_s: Floats
    ready: Ints
    feature: Ints
    targets: Ints
    present: npt.NDArray[np.bool_]


@dataclass
class Run:
    """A run under construction.

    Attributes:
        events: row in front of which each stands, name, details.
        broken: lines that are no records (torn, or a log put in another's place), with the row in front of which each stands.
        total_steps: of the schedule.
    """

    mix: Mix
    columns: Columns
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    broken: list[tuple[int, TornLine | LogReplaced]] = field(default_factory=list)
    total_steps: int = 0

    def rows_of(self, first: int, end: int) -> slice:
        """Rows [first, end); in a run of one segment a row is a step."""
        return slice(max(first, 0), min(end, len(self.columns.step)))


def bucket_order(rng: np.random.Generator, mix: Mix, count: int, *, interleaved: bool) -> Ints:
    """Buckets of `count` micro-batches by share, either shuffled or with no more than three of a bucket in a row."""
    shares = np.array([kind.share for kind in mix.buckets])
    order = rng.choice(len(shares), size=count, p=shares / shares.sum()).astype(np.int64)
    if interleaved and len(shares) > 1:
        others = rng.integers(1, len(shares), size=count)
        for i in range(3, count):
            if order[i] == order[i - 1] == order[i - 2] == order[i - 3]:
                order[i] = (order[i] + others[i]) % len(shares)
    return order


def healthy_run(mix: Mix, *, seed: int, steps: int, interleaved: bool, train: TrainConfig) -> Run:
    """A run without a fault."""
    rng = np.random.default_rng([seed, len(mix.name), steps])
    shape = (steps, mix.micro_batches)
    bucket = bucket_order(rng, mix, steps * mix.micro_batches, interleaved=interleaved).reshape(shape)
    tokens = np.array([kind.tokens for kind in mix.buckets])[bucket]
    n_tokens = np.maximum((tokens * rng.uniform(0.6, 1.25, shape)).astype(np.int64), 8)
    loss = _losses(rng, mix, bucket, tokens / n_tokens)
    accuracy = 0.75 * np.exp(-0.55 * loss) * np.exp(0.05 * rng.standard_normal(shape))
    usual_grad = np.array([kind.grad_norm for kind in mix.buckets])[bucket].mean(axis=1)
    time = np.arange(steps)
    grad = usual_grad * (1 + 3 * np.exp(-time / 80)) * np.exp(0.14 * rng.standard_t(6, steps))
    batch = np.arange(steps * mix.micro_batches).reshape(shape)
    jitter = rng.integers(0, 4, steps)
    left = (steps - time - 1) * mix.micro_batches
    columns = Columns(
        step=time.astype(np.int64), segment=np.zeros(steps, np.int64), epoch=np.zeros(steps, np.int64), bucket=bucket,
        batch_id=batch, first_row=batch * ROWS, n_tokens=n_tokens, loss=loss, accuracy=accuracy, grad_norm=grad,
        lr=np.array([scheduled_lr(train, int(step), total=steps) for step in time]), skipped=np.zeros(steps, bool),
        nonfinite=np.zeros(steps, bool), step_time_s=mix.step_s * np.exp(0.03 * rng.standard_normal(steps)),
        ready=np.minimum(np.minimum(2 * time * mix.micro_batches, QUEUE_FULL - jitter), left),
        feature=np.minimum(np.minimum(time, 8), left),
        targets=(time[:, None] + np.arange(TARGETS) + rng.integers(0, 2, (steps, TARGETS))) // TARGETS,
        present=np.ones(steps, bool),
    )  # fmt: skip
    run = Run(mix=mix, columns=columns, total_steps=steps)
    run.events.append((0, "start", {"total_steps": steps, "plan_position": 0, "overlay": None}))
    for step in range(SAVE_INTERVAL, steps, SAVE_INTERVAL):
        run.events.append((step, "save_begin", {"step": step}))
        if step + SAVE_STEPS < steps:
            run.events.append((step + SAVE_STEPS, "save_durable", {"step": step}))
    run.events.append((steps, "finish", {}))
    return run


def rebucket(run: Run, taken: npt.NDArray[np.bool_], bucket: int, *, first: int) -> None:
    """Micro-batches marked in `taken` (from row `first` on) become batches of `bucket`, with its loss and gradient norm."""
    c, rows = run.columns, slice(first, first + len(taken))
    grads = np.array([kind.grad_norm for kind in run.mix.buckets])
    tokens = np.array([kind.tokens for kind in run.mix.buckets])
    before, old = grads[c.bucket[rows]].mean(axis=1), c.bucket[rows].copy()
    time = c.step[rows][:, None]
    ratio = mean_loss(run.mix, np.full_like(old, bucket), time) / mean_loss(run.mix, old, time)
    c.loss[rows] *= np.where(taken, ratio, 1.0)
    c.n_tokens[rows] = np.maximum(np.where(taken, c.n_tokens[rows] * tokens[bucket] / tokens[old], c.n_tokens[rows]), 8).astype(
        np.int64
    )
    c.bucket[rows] = np.where(taken, bucket, old)
    c.accuracy[rows] = 0.75 * np.exp(-0.55 * c.loss[rows])
    c.grad_norm[rows] *= grads[c.bucket[rows]].mean(axis=1) / before


def mean_loss(mix: Mix, bucket: Ints, time: Ints) -> Floats:
    """Expected loss of micro-batches: from that of a guess down to the bucket's own."""
    final = np.array([kind.final_loss for kind in mix.buckets])[bucket]
    result: Floats = final + (6.0 - final) * (0.75 * np.exp(-time / 60) + 0.25 * (1 + time / 40) ** -0.7)
    return result


def _losses(rng: np.random.Generator, mix: Mix, bucket: Ints, token_ratio: Floats) -> Floats:
    mean = mean_loss(mix, bucket, np.arange(len(bucket))[:, None])
    noise = mix.law(rng, bucket.shape)
    for i in range(1, len(noise) if mix.correlation else 0):
        noise[i] = mix.correlation * noise[i - 1] + math.sqrt(1 - mix.correlation**2) * noise[i]
    log_noise = 0.06 * noise + 0.06 * rng.standard_normal(bucket.shape) * np.sqrt(token_ratio)
    hard = rng.random(bucket.shape) < mix.outlier_frac
    result: Floats = mean * np.exp(log_noise) * np.where(hard, mix.outlier_factor, 1.0)
    return result


def items_of(run: Run, *, seed: int) -> Iterator[LogItem]:
    """The items of the log, in order."""
    c, position = run.columns, 0
    rng = np.random.default_rng([seed, 7])
    hits = rng.binomial(c.n_tokens, np.clip(c.accuracy, 0.0, 1.0)).tolist()
    clock = (np.cumsum(c.step_time_s) + START_S).tolist()
    plain: dict[str, Any] = {each.name: getattr(c, each.name).tolist() for each in fields(Columns)}
    events = sorted(run.events, key=lambda each: each[0])
    for row in range(len(c.step)):
        yield from (line for at, line in run.broken if at == row)
        while position < len(events) and events[position][0] <= row:
            yield _event(events[position], plain, clock, row)
            position += 1
        if plain["present"][row]:
            yield _step(plain, row, hits[row], clock[row])
    for event in events[position:]:
        yield _event(event, plain, clock, len(c.step) - 1)


def _event(event: tuple[int, str, dict[str, Any]], plain: dict[str, Any], clock: list[float], row: int) -> EventLine:
    at, name, details = event
    row = min(row, len(clock) - 1)
    step = plain["step"][row] + (at > row)
    return EventLine(
        segment=details.get("segment", plain["segment"][row]), step=details.get("step", step), wall_time_s=clock[row], event=name,
        details={key: value for key, value in details.items() if key not in ("step", "segment")}, schema_version=LOG_SCHEMA_VERSION,
    )  # fmt: skip


def _step(plain: dict[str, Any], row: int, hits: list[int], clock: float) -> StepLine:
    bad = plain["nonfinite"][row]
    losses, tokens, buckets = plain["loss"][row], plain["n_tokens"][row], plain["bucket"][row]
    total = sum(tokens)
    grad = plain["grad_norm"][row]
    micro = tuple(
        MicroBatchLine(
            batch_id=batch, bucket=bucket, epoch=plain["epoch"][row], rows=tuple(range(first, first + ROWS)), n_tokens=n,
            ce_sum=None if bad else loss * n, correct=(hit,), valid=(n,),
        )
        for batch, bucket, first, n, loss, hit in zip(
            plain["batch_id"][row], buckets, plain["first_row"][row], tokens, losses, hits, strict=True
        )
    )  # fmt: skip
    seconds = plain["step_time_s"][row]
    finite_grad = not bad and math.isfinite(grad)
    names = ("ce", "grad_norm") if bad else () if finite_grad else ("grad_norm",)
    return StepLine(
        segment=plain["segment"][row], step=plain["step"][row], wall_time_s=clock, mono_time_s=clock - START_S,
        ce=None if bad else sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / total, accuracy=sum(hits) / total,
        accepted_length=2.0 * sum(hits) / total, grad_norm=grad if finite_grad else None,
        clip_coef=min(1.0, CLIP_NORM / grad) if finite_grad and grad > 0 else 1.0 if finite_grad else None, lr=plain["lr"][row],
        skipped=plain["skipped"][row], nonfinite=names, micro_batches=micro, plan_position=plain["batch_id"][row][0],
        step_time_s=seconds, tokens_per_s=total / seconds, ready_depth=plain["ready"][row], feature_depth=plain["feature"][row],
        target_depths=tuple(plain["targets"][row]), schema_version=LOG_SCHEMA_VERSION,
    )  # fmt: skip
