"""Progress on the command line: what is left is told once it can be told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cli.output import LINE_EVERY_S, _Pace, duration, progress_printer


class Stream:
    """Text as it was written."""

    def __init__(self, *, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is buffered."""


class Clock:
    """Time that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("dflash.cli.output.time.monotonic", lambda: self.now_s)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rate=st.floats(0.01, 1000), total=st.integers(10, 10**6), step_s=st.floats(0.1, 30))
def test_a_steady_pace_gives_the_time_that_is_left(rate: float, total: int, step_s: float) -> None:
    pace = _Pace()
    for tick in range(100):
        done = int(rate * tick * step_s)
        left_s = pace.left_s(min(done, total), total, now_s=tick * step_s)
        if left_s is not None:
            assert done < total
            counted = (total - done) / rate
            assert left_s == pytest.approx(counted, rel=2 / max(1.0, done - 1), abs=2 / rate)


def test_what_was_found_ready_at_the_start_does_not_count_for_long() -> None:
    pace = _Pace()
    pace.left_s(0, 10_000, now_s=0.0)
    left_s = None
    for second in range(400):
        left_s = pace.left_s(5000 + second, 10_000, now_s=1.0 + second)
    assert left_s == pytest.approx(10_000 - 5399)


def test_nothing_is_promised_before_anything_is_known() -> None:
    pace = _Pace()
    assert [pace.left_s(0, 9, now_s=t) for t in (0.0, 5.0, 50.0)] == [None] * 3
    assert pace.left_s(9, 9, now_s=60.0) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (89.4, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (86_700, "24 h 05 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_shorter_line_leaves_nothing_of_a_longer_one_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Stream(tty=True)
    show = progress_printer(stream)
    screen = ""
    for done in (0, 1, 2, 98, 100):
        show("work", done, 100)
        clock.now_s += 10
        for part in stream.text.split("\r"):
            screen = part + screen[len(part) :] if not screen.endswith("\n") else part
        stream.text = ""
    assert screen.rstrip() == "work: 100/100"


def test_a_slow_work_is_heard_of_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Stream(tty=False)
    show = progress_printer(stream)
    for done in range(60):
        show("answers", done, 10_000)
        clock.now_s += 10.0
    lines = stream.text.splitlines()
    assert len(lines) == 1 + int(590 / LINE_EVERY_S)
    assert lines[1] == "answers: 6/10000, 27 h 46 min left"
