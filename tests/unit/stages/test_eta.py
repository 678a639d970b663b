"""The time that is left, and how it is said."""

from __future__ import annotations

import io

import pytest

from dflash.cli.output import progress_printer
from dflash.stages.eta import TimeLeft, duration


def test_the_rest_is_judged_by_the_rate_so_far() -> None:
    left = TimeLeft()
    assert left.text("tokenize", 100, 1100, now_s=50.0) == "", "the first report says nothing about a rate"
    assert left.text("tokenize", 110, 1100, now_s=51.0) == "", "too early"
    assert left.text("tokenize", 200, 1100, now_s=60.0) == "about 2 min left", "100 in 10 s, 900 to go"
    assert left.text("tokenize", 1100, 1100, now_s=61.0) == ""
    assert left.text("bucket", 5, 10, now_s=62.0) == "", "another label begins anew"
    assert left.text("bucket", 7, 10, now_s=66.0) == "about 6 s left"
    assert left.text("bucket", 1, 10, now_s=70.0) == "", "so does a count that falls"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (120, "2 min"), (3600, "60 min"), (12_000, "3 h 20 min")]
)
def test_durations_are_rounded_for_people(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_lines_outside_a_terminal_come_once_a_tenth() -> None:
    out = io.StringIO()
    show = progress_printer(out)
    for done in range(101):
        show("tokenize", done, 100)
    lines = out.getvalue().splitlines()
    assert lines[0] == "tokenize: 0/100"
    assert lines[-1] == "tokenize: 100/100"
    assert len(lines) == 11
