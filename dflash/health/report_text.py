"""The report as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dflash.health.advice import VERDICT_MEANS, is_settled, what_to_do
from dflash.health.decision import decided
from dflash.records import HealthReport

WIDTH = 80
SHOWN = 12
_MARKS = {"critical": "!!", "warn": " !", "info": "  "}


def render_text(report: HealthReport) -> str:
    """The verdict, the findings and what was checked, in lines of at most 80 characters."""
    return "".join(f"{printable(line)}\n" for line in _lines(report))


def _lines(report: HealthReport) -> Iterator[str]:
    yield f"{report.verdict.upper()}  {report.run}"[:WIDTH]
    yield from _wrapped(report.headline, indent="  ")
    yield from _wrapped(VERDICT_MEANS[report.verdict], indent="  ")
    if report.last_step is not None:
        covered = f"{100 * report.coverage_frac:.1f} % in the log"
        yield f"  steps {report.first_step} to {report.last_step}, {covered}, checked {report.checked_at}"[:WIDTH]
    yield from _read_as(report)
    if report.decision is not None:
        yield from _wrapped(f"Decision: {decided(report.decision, last_step=report.last_step)}", indent="  ")
    yield from _found(report)
    yield ""
    yield f"{'Checked':<18}{'judged':>9}{'found':>7}  note"
    for row in report.detectors:
        note = textwrap.shorten(row.note, WIDTH - 36, placeholder=" ...")
        yield f"{row.detector:<18}{row.checked:>9}{row.findings:>7}  {note}".rstrip()


def _read_as(report: HealthReport) -> Iterator[str]:
    """How somebody else's log was understood."""
    foreign = report.stats.get("foreign")
    if foreign is not None:
        given = " (as given)" if foreign["given"] else " (guessed from the names; --map says it otherwise)"
        fields = ", ".join(f"{quantity} = {field}" for quantity, field in foreign["fields"].items())
        yield from _wrapped(f"Read as {foreign['format']}: {fields}{given}", indent="  ", hang="    ")
        for note in foreign["notes"]:
            yield from _wrapped(f"Note: {note}", indent="  ", hang="    ")


def _found(report: HealthReport) -> Iterator[str]:
    """What stands, with what to do about it, then what has settled."""
    if not report.findings:
        return
    yield ""
    yield "Found"
    numbers = {id(finding): number for number, finding in enumerate(report.findings, start=1)}
    ordered = sorted(report.findings, key=is_settled)
    for finding in ordered[:SHOWN]:
        settled = finding.values.get("resolved_step")
        state = f" (settled by step {settled})" if settled is not None else ""
        text = f"{numbers[id(finding)]}. {finding.detector}: {finding.message}{state}"
        yield from _wrapped(text, indent=f"{_MARKS[finding.severity]} ", hang="     ")
    if len(ordered) > SHOWN:
        yield f"   ... and {len(ordered) - SHOWN} more, in report.json"
    for advice in dict.fromkeys(what_to_do(finding) for finding in ordered if not is_settled(finding)):
        yield from _wrapped(f"-> {advice}", indent="   ", hang="      ")


def _wrapped(text: str, *, indent: str, hang: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent if hang is None else hang, break_long_words=True
    )


def printable(text: str) -> str:
    """No control characters: what a log holds must not steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
