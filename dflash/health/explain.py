"""One finding in full: what was seen, against what, by which rule, and what to do."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.errors import DataError
from dflash.health.advice import batches_in_words, what_to_do
from dflash.health.report_text import WIDTH, printable
from dflash.records import Finding, HealthReport

_KNOWN_SHOWN = 12


def explain(report: HealthReport, which: str) -> tuple[list[Finding], str]:
    """The findings that `which` names, and a text about them.

    Args:
        report: of one check.
        which: number of a finding as the report shows it (from 1), or a detector's name.

    Raises:
        DataError: there is no such finding.
    """
    if which.strip().isdigit():
        number = int(which)
        found = [finding for place, finding in enumerate(report.findings, start=1) if place == number]
    else:
        found = [finding for finding in report.findings if finding.detector == which.strip().lower()]
    if not found:
        names = ", ".join(dict.fromkeys(finding.detector for finding in report.findings)) or "none: there are no findings"
        raise DataError(
            f"the report on {report.run} has no finding {which!r}",
            remedy=f"give a number from 1 to {len(report.findings)}, or a detector: {names}",
        )
    rules = {row.detector: row.rule for row in report.detectors}
    lines = [line for finding in found[:_KNOWN_SHOWN] for line in _lines(finding, rules.get(finding.detector, ""))]
    if len(found) > _KNOWN_SHOWN:
        lines.append(f"... and {len(found) - _KNOWN_SHOWN} more of the kind, in the JSON report")
    return found, "\n".join(printable(line) for line in lines)


def _lines(finding: Finding, rule: str) -> Iterator[str]:
    yield f"{finding.detector} ({finding.severity}, {finding.domain})"
    yield from _paragraph(f"What: {finding.message}.")
    yield f"  Steps: {finding.first_step} to {finding.last_step}, began at {finding.onset_step}"
    if finding.bucket is not None:
        yield f"  Bucket: {finding.bucket}"
    yield from _paragraph(f"Rule: {rule}.") if rule else ()
    yield from _values(finding.values, indent=4, title="Measured")
    batches = batches_in_words(finding)
    yield from _paragraph(f"Concerned: {batches}.") if batches else ()
    yield from _paragraph(f"What to do: {what_to_do(finding)}")
    yield ""


def _values(values: Mapping[str, Any], *, indent: int, title: str) -> Iterator[str]:
    if values:
        yield f"{' ' * (indent - 2)}{title}:"
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _values(value, indent=indent + 2, title=name)
        else:
            shown = (
                f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value, default=str)
            )
            yield from textwrap.wrap(
                f"{name.replace('_', ' ')} = {shown}", WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)
            )


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=True)
