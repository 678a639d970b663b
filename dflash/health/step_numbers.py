"""Which step each record of a log has, in memory that does not grow with a log that records every k-th step.

Invariant: `of(n)` is the step of the n-th record, exactly; equal distances are kept as one stretch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash.records import Finding

_NAMED = re.compile(r"\b(steps?) (\d+)(?: to (\d+))?")

_ONLY_BUCKET = " of bucket 0"


class StepNumbers:
    """Steps of the records seen so far."""

    def __init__(self) -> None:
        self._firsts: list[int] = []  # number of the first record of each stretch
        self._steps: list[int] = []
        self._strides: list[int] = []
        self._count = 0
        self._last = 0

    def __len__(self) -> int:
        return self._count

    def append(self, step: int) -> None:
        """The next record has this step."""
        if not self._firsts:
            self._begin(step)
        elif self._count == self._firsts[-1] + 1:
            self._strides[-1] = step - self._last
        elif step != self._last + self._strides[-1]:
            self._begin(step)
        self._last = step
        self._count += 1

    def _begin(self, step: int) -> None:
        self._firsts.append(self._count)
        self._steps.append(step)
        self._strides.append(0)

    def of(self, record: int) -> int:
        """Step of a record; of one past the end, of the last."""
        record = min(max(record, 0), max(self._count - 1, 0))
        place = bisect_right(self._firsts, record) - 1
        if place < 0:
            return record
        return self._steps[place] + self._strides[place] * (record - self._firsts[place])

    def in_steps(self, finding: Finding) -> Finding:
        """A finding made in record numbers, in the log's own steps; its batches, which mean nothing there, are left out."""
        return replace(
            finding,
            message=self.in_text(finding.message),
            bucket=None,
            first_step=self.of(finding.first_step),
            last_step=self.of(finding.last_step),
            onset_step=self.of(finding.onset_step),
            values=self._in_values(finding.values),
            batch_ids=(),
        )

    def in_text(self, text: str) -> str:
        """A detector's sentence with every `step N` translated (counts such as `50 steps` stay: they count records)."""

        def translated(match: re.Match[str]) -> str:
            numbers = [str(self.of(int(number))) for number in match.groups()[1:] if number is not None]
            return f"{match.group(1)} {' to '.join(numbers)}"

        return _NAMED.sub(translated, text).replace(_ONLY_BUCKET, "")

    def _in_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.of(value) if name.endswith("_step") and isinstance(value, int) and not isinstance(value, bool) else value
            for name, value in values.items()
        }
