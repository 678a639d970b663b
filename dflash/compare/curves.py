"""A run's training log as curves over the tokens that it has seen.

Invariant: what a rollback abandoned is not part of a curve: a record counts until a later segment starts at or before its step.
The hard decision: the axis is tokens, not steps. Two runs that pack their batches differently do different work in a step, and
over steps the one with the larger batches always looks better.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dflash.errors import DataError
from dflash.records import SEGMENT_STARTS

FloatArray = npt.NDArray[np.float64]


class MicroBatch(msgspec.Struct, gc=False):
    """Of a micro-batch, only what curves need; the fields mean what they mean in `dflash.records.MicroBatchRecord`."""

    bucket: int
    length_sum_tokens: int
    n_tokens: int
    ce_sum: float | None


class Step(msgspec.Struct, tag_field="kind", tag="step", gc=False):
    """Of a step record, only what curves need."""

    segment: int
    step: int
    ce: float | None
    accepted_length: float
    grad_norm: float | None
    micro_batches: tuple[MicroBatch, ...]
    step_time_s: float


class Event(msgspec.Struct, tag_field="kind", tag="event", gc=False):
    """Only events that begin a segment count: one that never came to a step abandons what it went back behind all the same."""

    segment: int = -1
    step: int = 0
    event: str = ""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment of a run: its records from `first_step` to `last_step`, of which `live` still count."""

    segment: int
    first_step: int
    last_step: int
    live: int


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The live records of a log, oldest first; `n` steps.

    Attributes:
        tokens: `[n]` tokens seen up to and including the step (unpadded).
        loss, accepted, grad_norm: `[n]`, NaN where the log has none.
        bucket_sum, bucket_count: by bucket, `[n]` summed cross-entropy and supervised slots of the step.
        step_time_s: `[n]`.
        segments: in the order of the log.
        torn: lines that could not be read.
    """

    tokens: FloatArray
    loss: FloatArray
    accepted: FloatArray
    grad_norm: FloatArray
    bucket_sum: dict[int, FloatArray]
    bucket_count: dict[int, FloatArray]
    step_time_s: FloatArray
    segments: tuple[Stretch, ...]
    torn: int


_DECODER: msgspec.json.Decoder[Step | Event] = msgspec.json.Decoder(Step | Event)


def read_curves(log: Path) -> RunCurves:
    """Read a training log.

    Raises:
        DataError: there is no such file, or it holds no step.
    """
    live: list[Step] = []
    seen: list[Step] = []
    torn = 0
    try:
        with log.open("rb") as lines:
            for line in lines:
                item = _decoded(line)
                torn += item is None
                if item is None or (isinstance(item, Event) and item.event not in SEGMENT_STARTS):
                    continue
                if live and item.segment > live[-1].segment:
                    live = [record for record in live if record.step < item.step]
                if isinstance(item, Step):
                    live.append(item)
                    seen.append(item)
    except OSError as error:
        raise DataError(f"{log} cannot be read: {error.strerror}", remedy="give the folder of a run that was trained") from error
    if not live:
        raise DataError(f"{log} has no training step yet", remedy="compare runs once they have trained")
    return _curves(live, segments=_stretches(seen, live), torn=torn)


def _decoded(line: bytes) -> Step | Event | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None


def _stretches(seen: list[Step], live: list[Step]) -> tuple[Stretch, ...]:
    numbers = list(dict.fromkeys(record.segment for record in seen))
    kept = {number: sum(record.segment == number for record in live) for number in numbers}
    spans = {number: [record.step for record in seen if record.segment == number] for number in numbers}
    return tuple(Stretch(number, min(spans[number]), max(spans[number]), kept[number]) for number in numbers)


def _curves(live: list[Step], *, segments: tuple[Stretch, ...], torn: int) -> RunCurves:
    buckets = sorted({batch.bucket for record in live for batch in record.micro_batches})
    sums = {bucket: np.zeros(len(live)) for bucket in buckets}
    counts = {bucket: np.zeros(len(live)) for bucket in buckets}
    tokens = np.zeros(len(live))
    for index, record in enumerate(live):
        for batch in record.micro_batches:
            tokens[index] += batch.length_sum_tokens
            if batch.ce_sum is not None:  # not finite: it has no value to show
                sums[batch.bucket][index] += batch.ce_sum
                counts[batch.bucket][index] += batch.n_tokens
    return RunCurves(
        tokens=np.cumsum(tokens),
        loss=_column([record.ce for record in live]),
        accepted=_column([record.accepted_length for record in live]),
        grad_norm=_column([record.grad_norm for record in live]),
        bucket_sum=sums,
        bucket_count=counts,
        step_time_s=_column([record.step_time_s for record in live]),
        segments=segments,
        torn=torn,
    )


def _column(values: list[float | None] | list[float]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def loss_in(curves: RunCurves, *, from_tokens: float, to_tokens: float, bucket: int | None) -> float:
    """Mean cross-entropy of the steps that end within a stretch of tokens, NaN if it holds none.

    Args:
        curves: of one run.
        from_tokens: exclusive beginning.
        to_tokens: inclusive end.
        bucket: of one bucket only, or of all.
    """
    inside = (curves.tokens > from_tokens) & (curves.tokens <= to_tokens)
    chosen = curves.bucket_sum if bucket is None else {bucket: curves.bucket_sum[bucket]} if bucket in curves.bucket_sum else {}
    total = sum(float(curves.bucket_sum[key][inside].sum()) for key in chosen)
    count = sum(float(curves.bucket_count[key][inside].sum()) for key in chosen)
    return total / count if count else float("nan")
