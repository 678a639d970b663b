"""Gradient explosion: clipping leaves next to nothing of the updates for many steps on end.

The hard decision: a small clip coefficient alone means nothing (a run may be clipped hard all its life); it counts
where the norm is also far above what it was when the stretch began.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.config import WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine

_FAR_ABOVE = 5.0
_PACE = 1 / 64


class ExplosionMemory(Memory):
    """Usual norm before the stretch, and the stretch."""

    usual: float | None = None
    in_row: int = 0
    first_step: int = 0
    alarm: int | None = None


class GradientExplosion(Detector):
    """Clip coefficients near zero for many steps in a row."""

    name = "gradient explosion"
    domain = "training"
    _memory: ExplosionMemory

    def __init__(self, watch: WatchConfig) -> None:
        super().__init__(ExplosionMemory())
        self._watch = watch

    def rule(self) -> str:
        """The rule with its thresholds."""
        w = self._watch
        return f"clip coefficient under {w.clip_frac:g}, at over {_FAR_ABOVE:g}x the usual norm, for {w.clip_steps} steps in a row"

    def on_stretch(self, records: Sequence[StepLine], _context: RunContext, /) -> int:
        """Judge records whose updates are not clipped to next to nothing, and return how many."""
        memory, clip_frac = self._memory, self._watch.clip_frac
        usual, checked, done = memory.usual, 0, 0
        for done, record in enumerate(records):  # noqa: B007 - counts what was done
            norm, clip = record.grad_norm, record.clip_coef
            if norm is None or clip is None:
                continue
            if usual is None:
                usual = norm
            elif clip >= clip_frac or norm < _FAR_ABOVE * usual:
                usual += _PACE * ((min(2 * usual, norm)) - usual)
                memory.in_row, memory.alarm = 0, None
            else:
                break
            checked += 1
        else:
            done = len(records)
        memory.usual = usual
        self.checked += checked
        return done

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record."""
        norm, clip, memory = record.grad_norm, record.clip_coef, self._memory
        usual = memory.usual
        if self.on_stretch((record,), context) or norm is None or clip is None or usual is None:
            return
        self.checked += 1
        if not memory.in_row:
            memory.first_step = record.step
        memory.in_row += 1
        if memory.alarm is not None:
            self.findings.amend(memory.alarm, last_step=record.step)
        elif memory.in_row >= self._watch.clip_steps:
            memory.alarm = self._alarm(
                f"gradient norm {norm / usual:.0f}x the usual since step {memory.first_step}: clipping leaves {clip:.3f} of it",
                onset=memory.first_step,
                record=record,
                context=context,
                bucket=None,
                grad_norm=norm,
                usual=usual,
                clip_coef=clip,
            )
