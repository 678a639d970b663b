"""What a detector is: a rule in words, a memory in plain values, and findings that it may add to or amend.

Invariant: a detector is a pure function of the live records and events fed to it; `parts()` is everything it knows,
so what they encode to is also a snapshot to go back to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from dflash.health.baseline import Baseline
from dflash.health.context import RunContext
from dflash.health.lines import EventLine, StepLine
from dflash.health.seen import Seen
from dflash.records import DetectorSummary, Domain, Finding, Severity

# Findings that one detector keeps in full; older and lighter ones are then only counted.
MAX_KEPT = 100
_WEIGHT = {"info": 0, "warn": 1, "critical": 2}


class Findings(msgspec.Struct):
    """A detector's findings by number; amended while an episode lasts, counted even when no longer kept."""

    kept: dict[int, Finding] = msgspec.field(default_factory=dict)
    next_number: int = 0
    total: int = 0
    critical: int = 0

    def add(self, finding: Finding) -> int:
        """Keep a finding and return its number."""
        number = self.next_number
        self.kept[number] = finding
        self.next_number += 1
        self.total += 1
        self.critical += finding.severity == "critical"
        if len(self.kept) > MAX_KEPT:
            del self.kept[min(self.kept, key=self._worth)]
        return number

    def _worth(self, number: int) -> tuple[int, int]:
        """Light before heavy, old before new; but among the critical ones the first matters most."""
        severity = self.kept[number].severity
        return _WEIGHT[severity], -number if severity == "critical" else number

    def amend(
        self,
        number: int,
        *,
        last_step: int | None = None,
        message: str | None = None,
        batch_ids: tuple[int, ...] | None = None,
        **values: Any,
    ) -> None:
        """Extend a finding, if it is still kept."""
        old = self.kept.get(number)
        if old is not None:
            self.kept[number] = replace(
                old,
                last_step=old.last_step if last_step is None else last_step,
                message=old.message if message is None else message,
                batch_ids=old.batch_ids if batch_ids is None else batch_ids,
                values={**old.values, **values},
            )

    def remove(self, number: int) -> None:
        """Take back a finding that has been explained."""
        old = self.kept.pop(number, None)
        if old is not None:
            self.total -= 1
            self.critical -= old.severity == "critical"

    def keep_before(self, step: int) -> None:
        """Take back what rests on records from `step` on."""
        for number in [number for number, finding in self.kept.items() if finding.last_step >= step]:
            self.remove(number)


class Memory(msgspec.Struct):
    """What a detector remembers besides its findings; subclasses add fields."""


class Detector(ABC):
    """One row of the table of detectors.

    Attributes:
        name: shown in reports and findings.
        domain: only critical findings of `training` make weights dirty.
        sparse: looks at every fourth step only, which is enough for what moves slowly.
        follows: asks what the loss detector has said of the records it judges, and so judges them behind it.
        checked: records (or points) that were judged.
    """

    name: ClassVar[str]
    domain: ClassVar[Domain]
    sparse: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def __init__(self, memory: Memory) -> None:
        self.findings = Findings()
        self.checked = 0
        self._memory = memory

    @abstractmethod
    def rule(self) -> str:
        """The rule with its thresholds, in one sentence."""

    def note(self) -> str:
        """What limits or explains this check, or an empty string."""
        return ""

    def on_step(self, record: StepLine, context: RunContext, /) -> None:
        """Judge a live step record; `context` has already seen it."""
        self.on_stretch((record,), context)

    def on_stretch(self, records: Sequence[StepLine], context: RunContext, /) -> int:  # noqa: ARG002 - not every detector looks at steps
        """Judge the first of several consecutive live step records, and return how many; the others are for `on_step`.

        `context` has seen them all and knows what events have said before them. One that `follows` judges them all.
        """
        return len(records)

    def on_event(self, event: EventLine) -> None:  # noqa: B027 - nor at events
        """Judge an event."""

    def on_new_process(self) -> None:  # noqa: B027 - few depend on the process
        """A new segment begins: forget what belonged to the process that wrote the previous one."""

    def reported(self) -> list[Finding]:
        """Findings as they stand now."""
        return list(self.findings.kept.values())

    def summary(self) -> DetectorSummary:
        """What was looked at, by which rule, and how much was found."""
        return DetectorSummary(
            detector=self.name,
            rule=self.rule(),
            checked=self.checked,
            findings=self.findings.total,
            critical=self.findings.critical,
            note=self.note(),
        )

    def parts(self) -> dict[str, Any]:
        """Everything this detector knows, still shared with the detector: to be encoded at once."""
        return {"checked": self.checked, "findings": self.findings, "memory": self._memory}

    def light_parts(self) -> dict[str, Any]:
        """What a snapshot is made of."""
        return self.parts()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go (back) to a state."""
        self.checked = int(state["checked"])
        self.findings = msgspec.convert(state["findings"], Findings)
        self._memory = msgspec.convert(state["memory"], type(self._memory), dec_hook=_of_plain)

    def _finding(
        self, severity: Severity, message: str, *, steps: tuple[int, int, int], bucket: int | None = None,
        batch_ids: tuple[int, ...] = (), **values: Any,
    ) -> int:  # fmt: skip
        """Add a finding; `steps` are (onset, first, last)."""
        onset, first, last = steps
        return self.findings.add(
            Finding(
                detector=self.name,
                severity=severity,
                domain=self.domain,
                message=message,
                first_step=first,
                last_step=last,
                onset_step=onset,
                bucket=bucket,
                values=values,
                batch_ids=batch_ids,
            )
        )

    def _alarm(self, message: str, *, onset: int, record: StepLine, context: RunContext, bucket: int | None, **values: Any) -> int:
        """Add a critical finding that names every batch consumed from just before the onset to this record."""
        return self._finding(
            "critical",
            message,
            steps=(onset, onset, record.step),
            bucket=bucket,
            batch_ids=context.batches_between(onset - 1, record.step),
            alarm_step=record.step,
            segment=record.segment,
            **values,
        )


def plain(value: Any) -> Any:
    """The state of what a memory may hold besides plain values, for `msgspec`."""
    if isinstance(value, Baseline):
        return value.state()
    if isinstance(value, Seen):
        return value.text()
    raise NotImplementedError(f"a detector's memory holds a {type(value).__name__}")


def _of_plain(kind: type, value: Any) -> Any:
    if kind is Baseline:
        return Baseline.from_state(value)
    if kind is Seen:
        return Seen.of_text(value)
    raise NotImplementedError(f"a detector's memory declares a {kind.__name__}")
