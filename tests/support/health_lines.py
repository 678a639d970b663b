"""Single log lines for tests that feed one detector by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dflash.health.context import RunContext
from dflash.health.detectors import Detector
from dflash.health.lines import EventLine, MicroBatchLine, StepLine
from dflash.records.log import LOG_SCHEMA_VERSION


def micro(
    batch_id: int, *, bucket: int = 0, loss: float | None = 1.0, n_tokens: int = 100, rows: Sequence[int] = (), epoch: int = 0,
    hits: int | None = None,
) -> MicroBatchLine:  # fmt: skip
    """A micro-batch of a given mean loss, and of given samples and hits."""
    return MicroBatchLine(
        batch_id=batch_id, bucket=bucket, epoch=epoch, rows=tuple(rows), n_tokens=n_tokens,
        ce_sum=None if loss is None else loss * n_tokens, correct=() if hits is None else (hits,),
        valid=() if hits is None else (n_tokens,),
    )  # fmt: skip


def step_line(step: int, *, micro_batches: Sequence[MicroBatchLine] | None = None, **changes: Any) -> StepLine:
    """A calm step of one micro-batch."""
    batches = (micro(step),) if micro_batches is None else tuple(micro_batches)
    line = StepLine(
        segment=0,
        step=step,
        wall_time_s=float(step),
        mono_time_s=float(step),
        ce=1.0,
        accuracy=0.5,
        accepted_length=1.0,
        grad_norm=1.0,
        clip_coef=1.0,
        lr=1e-3,
        skipped=False,
        nonfinite=(),
        micro_batches=batches,
        plan_position=step,
        step_time_s=1.0,
        tokens_per_s=100.0,
        ready_depth=10,
        feature_depth=2,
        target_depths=(),
        schema_version=LOG_SCHEMA_VERSION,
    )
    return msgspec.structs.replace(line, **changes)


def event_line(name: str, step: int, **details: Any) -> EventLine:
    """An event at the wall time of its step."""
    return EventLine(segment=0, step=step, wall_time_s=float(step), event=name, details=details, schema_version=LOG_SCHEMA_VERSION)


def feed(detector: Detector, lines: Sequence[StepLine | EventLine], *, context: RunContext | None = None) -> RunContext:
    """Feed one detector as the panel does, and return the context."""
    context = RunContext() if context is None else context
    for line in lines:
        if isinstance(line, StepLine):
            context.see_step(line)
            detector.on_step(line, context)
        else:
            context.see_event(line)
            detector.on_event(line)
    return context
