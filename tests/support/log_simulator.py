"""A simulated training log: six buckets at very different losses, heavy-tailed noise, and faults to order.

The healthy run follows what small drafter runs look like: every bucket falls from the loss of a uniform guess to a
level of its own (short sequences stay high), batches differ by content and by how many tokens they average over, and
the reader's queue fills, stays full and drains at the end of the plan. Faults are functions of records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.records import EventRecord, MicroBatchRecord, StepRecord, to_json

Record = StepRecord | EventRecord

START_S = 1_700_000_000.0
STEP_S = 0.2
QUEUE_FULL = 300


@dataclass(frozen=True)
class Bucket:
    """One length bucket: where its loss ends, its share of the batches, the tokens of one batch, its gradient norm."""

    final_loss: float
    share: float
    tokens: int
    grad_norm: float


# The first bucket sits at six times the loss of the others: what trips every pooled rule.
BUCKETS = (
    Bucket(3.6, 0.08, 180, 2.2),
    Bucket(0.95, 0.12, 420, 1.1),
    Bucket(0.75, 0.15, 560, 0.9),
    Bucket(0.62, 0.20, 640, 0.8),
    Bucket(0.58, 0.25, 700, 0.7),
    Bucket(0.50, 0.20, 720, 0.65),
)


def interleaved(rng: np.random.Generator, steps: int, *, shares: Sequence[float], longest: int = 3) -> list[int]:
    """A random order of buckets by share in which no bucket comes more than `longest` times in a row."""
    order: list[int] = []
    weights = np.asarray(shares) / sum(shares)
    while len(order) < steps:
        bucket = int(rng.choice(len(shares), p=weights))
        if order[-longest:] != [bucket] * longest:
            order.append(bucket)
    return order


def simulate_run(
    *, seed: int, steps: int, lr: Callable[[int], float], order: Sequence[int] | None = None, save_interval: int = 200
) -> list[Record]:
    """A healthy run of one micro-batch a step, with its events."""
    rng = np.random.default_rng(seed)
    buckets = list(order) if order is not None else interleaved(rng, steps, shares=[b.share for b in BUCKETS])
    records: list[Record] = [event("start", step=0, details={"total_steps": steps})]
    for step in range(steps):
        if step and step % save_interval == 0:
            records.append(event("save_begin", step=step))
        records.append(_step(rng, step=step, bucket=buckets[step], lr=lr(step), steps=steps))
        if step > 2 and (step - 2) % save_interval == 0:
            records.append(event("save_durable", step=step - 2, at_step=step))
    records.append(event("finish", step=steps))
    return records


def event(
    name: Any, *, step: int, segment: int = 0, at_step: int | None = None, details: dict[str, Any] | None = None
) -> EventRecord:
    """An event at the wall time of a step."""
    elapsed_s = STEP_S * (step if at_step is None else at_step)
    return EventRecord(
        segment=segment, step=step, wall_time_s=START_S + elapsed_s, mono_time_s=elapsed_s, event=name, details=details or {}
    )


def _step(rng: np.random.Generator, *, step: int, bucket: int, lr: float, steps: int) -> StepRecord:
    kind = BUCKETS[bucket]
    n_tokens = int(kind.tokens * rng.uniform(0.6, 1.25))
    uniform_guess = 6.0
    mean = kind.final_loss + (uniform_guess - kind.final_loss) * (0.75 * math.exp(-step / 60) + 0.25 * (1 + step / 40) ** -0.7)
    noise = 0.05 * rng.standard_t(4) + 0.06 * rng.standard_normal() * math.sqrt(kind.tokens / n_tokens)
    loss = mean * math.exp(noise)
    grad_norm = kind.grad_norm * (1 + 3 * math.exp(-step / 80)) * math.exp(0.16 * rng.standard_t(6))
    accuracy = 0.7 * math.exp(-loss / 2)
    slots = tuple(int(n_tokens / 7) for _ in range(7))
    micro = MicroBatchRecord(
        batch_id=step, bucket=bucket, epoch=0, rows=tuple(range(8 * step, 8 * step + 8)), padded_length_tokens=64 + 32 * bucket,
        length_min_tokens=40, length_max_tokens=64 + 32 * bucket, length_sum_tokens=n_tokens, n_seqs=8, n_tokens=n_tokens,
        n_blocks=slots[0], supervised_tokens=n_tokens, covered_tokens=n_tokens, ce_sum=loss * n_tokens,
        objective_sum=loss * n_tokens, objective_weight=float(n_tokens), accepted_sum=2.0 * accuracy * slots[0],
        correct=tuple(int(accuracy * slot) for slot in slots), valid=slots,
    )  # fmt: skip
    ready = min(2 * step, QUEUE_FULL - int(rng.integers(0, 4)), steps - step - 1)
    return StepRecord(
        segment=0, step=step, wall_time_s=START_S + STEP_S * (step + 1), mono_time_s=STEP_S * (step + 1), ce=loss, objective=loss,
        accuracy=accuracy, accepted_length=2.0 * accuracy, coverage_frac=1.0, grad_norm=grad_norm,
        clip_coef=min(1.0, 1.0 / grad_norm), lr=lr, warmup_factor=1.0, skipped=False, nonfinite=(),
        micro_batches=(micro,), plan_position=step, padding_frac=0.03, step_time_s=STEP_S, wait_time_s=0.01,
        tokens_per_s=n_tokens / STEP_S, ready_depth=ready,
        feature_depth=min(step, 8, steps - step - 1), target_depths=(step + 4,),
    )  # fmt: skip


def change_steps(records: Sequence[Record], change: Callable[[StepRecord], StepRecord]) -> list[Record]:
    """Apply a change to every step record."""
    return [change(record) if isinstance(record, StepRecord) else record for record in records]


def scaled(record: StepRecord, *, loss: float = 1.0, grad_norm: float = 1.0) -> StepRecord:
    """A step with its loss and gradient norm multiplied."""
    micro = tuple(replace(m, ce_sum=None if m.ce_sum is None else m.ce_sum * loss) for m in record.micro_batches)
    return replace(
        record,
        ce=None if record.ce is None else record.ce * loss,
        grad_norm=None if record.grad_norm is None else record.grad_norm * grad_norm,
        micro_batches=micro,
    )


def spike(records: Sequence[Record], *, step: int, factor: float, decay_steps: float = 0.0, forever: bool = False) -> list[Record]:
    """Loss times `factor` at `step`, gradient too; then at once, slowly or never back."""

    def change(record: StepRecord) -> StepRecord:
        age = record.step - step
        if age < 0 or (age > 0 and not forever and decay_steps == 0):
            return record
        height = 1.0 if forever or age == 0 else math.exp(-age / decay_steps)
        return scaled(record, loss=factor**height, grad_norm=factor if age == 0 else 1.0)

    return change_steps(records, change)


def nonfinite(records: Sequence[Record], *, steps: Iterable[int], skipped: bool) -> list[Record]:
    """NaN loss and gradient at `steps`, written as the trainer writes them."""
    wanted = set(steps)

    def change(record: StepRecord) -> StepRecord:
        if record.step not in wanted:
            return record
        micro = tuple(replace(m, ce_sum=None, objective_sum=None) for m in record.micro_batches)
        return replace(
            record, ce=None, objective=None, grad_norm=None, clip_coef=None, micro_batches=micro, skipped=skipped,
            nonfinite=("ce", "grad_norm"),
        )  # fmt: skip

    return change_steps(records, change)


def without_steps(records: Sequence[Record], first: int, last: int) -> list[Record]:
    """The log without the records of [first, last]."""
    return [record for record in records if not (isinstance(record, StepRecord) and first <= record.step <= last)]


def declining_queue(records: Sequence[Record], *, first: int, last: int, to: int) -> list[Record]:
    """The ready queue sinks in a line from full at `first` to `to` at `last` and stays there."""

    def change(record: StepRecord) -> StepRecord:
        frac = min(1.0, max(0.0, (record.step - first) / (last - first)))
        level = round(QUEUE_FULL + frac * (to - QUEUE_FULL))
        return replace(record, ready_depth=min(record.ready_depth, level + record.step % 3))

    return change_steps(records, change)


def resumed(records: Sequence[Record], *, died_at: int, from_step: int) -> list[Record]:
    """The trainer dies after `died_at` and starts again from `from_step` in segment 1, doing the same again."""
    before = [record for record in records if not (record.step > died_at)]
    after = [replace(record, segment=1) for record in records if record.step >= from_step and not _is_start(record)]
    return [*before, event("resume", step=from_step, segment=1, at_step=died_at + 1), *after]


def _is_start(record: Record) -> bool:
    return isinstance(record, EventRecord) and record.event == "start"


def log_lines(records: Iterable[Record]) -> bytes:
    """The log's bytes."""
    return b"".join(to_json(record).encode() + b"\n" for record in records)


def write_log(path: Path, records: Iterable[Record]) -> None:
    """Write the whole log."""
    path.write_bytes(log_lines(records))
