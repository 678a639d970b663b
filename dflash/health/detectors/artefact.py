"""Window artefacts: records that average over so few samples that their height says nothing.

The hard decision: such a record is named so that nobody wonders about it, and never counts as anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash.config import SpikeConfig, WatchConfig
from dflash.health.context import RunContext
from dflash.health.detectors.base import Detector, Memory
from dflash.health.lines import StepLine

_FEW_FRAC = 0.34  # of the usual number of samples
_GROUP_STEPS = 50


class ArtefactMemory(Memory):
    """The group that may still grow."""

    open: int | None = None
    last_step: int = 0
    records: int = 0
    batch_ids: list[int] = msgspec.field(default_factory=list)


class ShortWindow(Detector):
    """A height that only few samples explain."""

    name = "short window"
    follows = True
    domain = "diagnosis"
    _memory: ArtefactMemory

    def __init__(self, spike: SpikeConfig, watch: WatchConfig) -> None:
        super().__init__(ArtefactMemory())
        self._limit_z, self._artefact_z = spike.loss_z, watch.artefact_z

    def rule(self) -> str:
        """The rule with its thresholds."""
        return (
            f"a micro-batch of under {100 * _FEW_FRAC:.0f} % of the usual samples over {self._limit_z:g} deviations up, but under "
            f"{self._artefact_z:g} once scaled by their number: noted as an artefact, counted as nothing"
        )

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:
        """Judge consecutive records."""
        for record, points in zip(records, context.judged, strict=False):
            for judged in points:
                level = judged.level
                if judged.batch.n_tokens > _FEW_FRAC * level.count:
                    continue
                self.checked += 1
                unscaled = (judged.value - level.median) / level.scale
                if unscaled > self._limit_z and judged.z < self._artefact_z:
                    self._note(record.step, judged.batch.batch_id, bucket=judged.batch.bucket, unscaled=unscaled, scaled=judged.z)
        return len(records)

    def _note(self, step: int, batch_id: int, *, bucket: int, unscaled: float, scaled: float) -> None:
        memory = self._memory
        if memory.open is not None and step - memory.last_step <= _GROUP_STEPS:
            memory.records += 1
            memory.batch_ids = [*memory.batch_ids, batch_id][:_GROUP_STEPS]
            self.findings.amend(memory.open, last_step=step, records=memory.records, batch_ids=tuple(memory.batch_ids))
        else:
            memory.records, memory.batch_ids = 1, [batch_id]
            memory.open = self._finding(
                "info",
                f"artefact: few samples at step {step} ({unscaled:.1f} deviations up, {scaled:.1f} once scaled by their number)",
                steps=(step, step, step),
                bucket=bucket,
                batch_ids=(batch_id,),
                z_unscaled=round(unscaled, 2),
                z=round(scaled, 2),
                records=1,
            )
        memory.last_step = step
