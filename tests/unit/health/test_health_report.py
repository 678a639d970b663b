"""The report for people: verdict first, self-contained, escaped, 80 columns."""

from __future__ import annotations

import base64
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dflash.health.advice import VERDICT_MEANS, WHAT_TO_DO, batches_in_words
from dflash.health.history import History
from dflash.health.report_html import render_html
from dflash.health.report_text import render_text
from dflash.records import HealthReport
from tests.support.health_runs import healthy, items_of, new_checker, remedy
from tests.support.log_simulator import change_steps, nonfinite, scaled, spike

HOSTILE = "<script>alert(1)</script>\x1b[31m\"'&"
VOID = {"meta", "img", "br"}


def sick() -> tuple[HealthReport, History]:
    records = spike(healthy(seed=6, steps=700), step=330, factor=9)
    records = nonfinite(records, steps=[400], skipped=True)
    records = spike(records, step=500, factor=4, forever=True)
    checker = new_checker()
    checker.feed(items_of(records))
    return checker.report(run="demo-007", now_s=1.7e9, ended=True, remedy=remedy), checker.history


REPORT, HISTORY = sick()


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(REPORT, HISTORY)


class Balance(HTMLParser):
    """Every element that is opened is closed, in order; collects the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(page: str) -> list[str]:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return parser.tags


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    assert "script" not in tags_of(page)
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "http" not in page
    assert "@import" not in page


def test_the_verdict_comes_first_then_the_decision_then_the_findings(page: str) -> None:
    order = [
        "Unhealthy",
        "Training is damaged",
        "Decision:</strong> roll back",
        "Loss over the run",
        "card finding critical",
        "<h2>How it ran",
        "Step time and saves",
        "<h2>Buckets",
        "<h2>What was checked",
    ]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert "step-400" in page


def test_every_bucket_has_a_picture_and_the_whole_run_has_five(page: str) -> None:
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", page)]
    assert len(pictures) == 6 + 5
    for title in ("Gradient norm", "Step time and saves", "Queues", "Runs of one bucket"):
        assert f"<figcaption>{title}</figcaption>" in page
    for png in pictures:
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", png[16:24])
        assert width > 300
        assert height > 200
    for bucket in range(6):
        assert f"Bucket {bucket}" in page


def test_all_detectors_are_listed_with_what_they_checked(page: str) -> None:
    table = page[page.index("What was checked") :]
    for row in REPORT.detectors:
        assert row.detector in table
        assert f">{row.checked:,}<" in table


def test_hostile_text_is_escaped_in_the_page_and_harmless_in_a_terminal() -> None:
    findings = tuple(replace(f, message=HOSTILE) for f in REPORT.findings)
    detectors = tuple(replace(d, note=HOSTILE, rule=HOSTILE) for d in REPORT.detectors)
    hostile = replace(REPORT, run=HOSTILE, headline=HOSTILE, findings=findings, detectors=detectors, checked_at=HOSTILE)
    page = render_html(hostile, History())
    assert "script" not in tags_of(page)
    assert "<script" not in page
    assert "\x1b" not in render_text(hostile)


@pytest.mark.parametrize("verdict", ["healthy", "watch", "unhealthy", "blind"])
def test_the_text_keeps_to_80_columns(verdict: str) -> None:
    long = replace(
        REPORT, verdict=verdict, run="r" * 200, findings=tuple(replace(f, message=f.message + " x" * 200) for f in REPORT.findings)
    )  # type: ignore[arg-type]
    for report in (REPORT, long):
        text = render_text(report)
        assert max(len(line) for line in text.splitlines()) <= 80
    assert text.startswith(verdict.upper())
    assert VERDICT_MEANS[verdict][:20] in text  # type: ignore[index]


def test_the_text_names_what_was_found_what_to_do_and_what_was_checked() -> None:
    text = render_text(REPORT)
    assert "roll back to checkpoint step-400" in text
    assert "has not come back" in text
    assert "(settled by step" in text
    assert "-> Stop the run" in text
    for row in REPORT.detectors:
        assert row.detector in text


def test_an_empty_log_has_a_report_too() -> None:
    report = new_checker().report(run="new", now_s=1.7e9, ended=False, remedy=remedy)
    page = render_html(report, History())
    tags_of(page)
    assert "Blind" in page
    assert "img" not in tags_of(page)
    assert "BLIND  new" in render_text(report)


def test_there_is_advice_for_every_detector() -> None:
    assert {row.detector for row in REPORT.detectors} == set(WHAT_TO_DO)


def test_batches_are_given_as_a_range_where_they_are_one() -> None:
    base = REPORT.findings[0]
    assert batches_in_words(replace(base, batch_ids=())) == ""
    assert batches_in_words(replace(base, batch_ids=(7,))) == "batch 7 of the plan"
    assert batches_in_words(replace(base, batch_ids=(7, 8, 9))) == "batches 7 to 9 of the plan"
    assert batches_in_words(replace(base, batch_ids=(7, 9))) == "batches 7, 9 of the plan"
    assert batches_in_words(replace(base, batch_ids=tuple(range(0, 60, 2)))).endswith("and 18 more of the plan")


def test_a_loss_of_zero_can_be_drawn() -> None:
    checker = new_checker()
    records = change_steps(healthy(seed=6, steps=700)[:120], lambda r: scaled(r, loss=0.0, grad_norm=0.0) if r.step > 90 else r)
    checker.feed(items_of(records))
    report = checker.report(run="zero", now_s=1.7e9, ended=False, remedy=remedy)
    assert "Loss over the run" in render_html(report, checker.history)
