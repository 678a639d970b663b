"""What the checks found, as lines of at most 80 columns, as JSON-able values, and as a verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.errors import PreflightError
from dflash.records import CheckResult

WIDTH = 80


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The results of one examination and how long it took."""

    results: tuple[CheckResult, ...]
    seconds: float

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Checks that must stop what follows."""
        return tuple(result for result in self.results if result.status == "fail")

    @property
    def payload(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "passed": not self.failures,
            "seconds": round(self.seconds, 3),
            "checks": [asdict(result) for result in self.results],
        }

    @property
    def text(self) -> str:
        """The table and a closing line."""
        counts = {status: sum(result.status == status for result in self.results) for status in ("ok", "warn", "fail", "skip")}
        closing = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{render_checks(self.results)}\n{closing}; {self.seconds:.1f} s"


def render_checks(results: Sequence[CheckResult]) -> str:
    """One entry a check, wrapped to 80 columns, with the remedy under what is not in order."""
    name_width = max((len(result.name) for result in results), default=0)
    lines: list[str] = []
    for result in results:
        head = f"{result.status:<4}  {result.name:<{name_width}}  "
        lines += _wrapped(result.message, first=head, rest=" " * len(head))
        if result.remedy:
            lines += _wrapped(result.remedy, first=f"{' ' * len(head)}-> ", rest=" " * (len(head) + 3))
    return "\n".join(lines)


def require_passed(report: DoctorReport) -> None:
    """Refuse to go on after a failure; warnings and what could not be looked at do not stop anything.

    Raises:
        PreflightError: names every check that failed, with its remedy.
    """
    failures = report.failures
    if failures:
        text = "; ".join(f"{failure.name}: {failure.message}" for failure in failures)
        raise PreflightError(
            f"{len(failures)} of {len(report.results)} checks failed: {text}",
            remedy="; ".join(f.remedy for f in failures if f.remedy),
        )


def _wrapped(text: str, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width=WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
