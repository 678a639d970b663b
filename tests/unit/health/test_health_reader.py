"""The reader: only new whole lines, each byte once, and a changed past is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DataError
from dflash.health.lines import EventLine, LogItem, LogReplaced, StepLine, TornLine
from dflash.health.reader import TAIL_BYTES, LogCursor, read_new, start_cursor
from tests.support.log_simulator import log_lines, simulate_run

LOG = log_lines(simulate_run(seed=1, steps=40, lr=lambda step: 1e-3))
BLOCK = 2**20


def read_all(path: Path, cursor: LogCursor, *, max_bytes: int = BLOCK) -> tuple[list[LogItem], LogCursor, int]:
    items: list[LogItem] = []
    bytes_read = 0
    while True:
        result = read_new(path, cursor, max_bytes=max_bytes)
        items += result.items
        cursor = result.cursor
        bytes_read += result.bytes_read
        if not result.more:
            return items, cursor, bytes_read


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(LOG)
    return path


def test_nothing_new_reads_only_the_tail(log: Path) -> None:
    _, cursor, _ = read_all(log, start_cursor())
    result = read_new(log, cursor, max_bytes=BLOCK)
    assert result.items == ()
    assert result.cursor == cursor
    assert result.bytes_read == TAIL_BYTES


def test_growing_log_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = LOG.splitlines(keepends=True)
    cursor, bytes_read, items = start_cursor(), 0, 0
    for line in lines:
        with path.open("ab") as file:
            file.write(line)
        new, cursor, count = read_all(path, cursor)
        items += len(new)
        bytes_read += count
    assert items == len(lines)
    assert bytes_read <= len(LOG) + TAIL_BYTES * len(lines)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, len(LOG)), max_size=12), max_bytes=st.integers(2200, 9000))
def test_any_cut_gives_the_same_items(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], max_bytes: int) -> None:
    path = tmp_path_factory.mktemp("cuts") / "log"
    path.write_bytes(LOG)
    at_once, _, _ = read_all(path, start_cursor())
    path.write_bytes(b"")
    pieces: list[LogItem] = []
    cursor, done = start_cursor(), 0
    for cut in [*sorted(cuts), len(LOG)]:
        with path.open("ab") as file:
            file.write(LOG[done:cut])
        done = cut
        new, cursor, _ = read_all(path, cursor, max_bytes=max_bytes)
        pieces += new
    assert pieces == at_once
    assert cursor.offset == len(LOG)


def test_an_unfinished_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(LOG[:-7])
    items, cursor, _ = read_all(path, start_cursor())
    pending = read_new(path, cursor, max_bytes=BLOCK)
    assert pending.pending_bytes > 0
    assert pending.items == ()
    path.write_bytes(LOG)
    rest, cursor, _ = read_all(path, cursor)
    assert len(items) + len(rest) == len(LOG.splitlines())
    assert cursor.offset == len(LOG)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(LOG[:5000]), "truncated"),
        (lambda path: path.write_bytes(LOG[:-20] + b"x" * 19 + b"\n" + LOG), "rewritten"),
        (lambda path: (path.rename(path.with_suffix(".1")), path.write_bytes(LOG[::-1] * 2)), "replaced by another file"),
    ],
    ids=["truncated", "rewritten", "replaced"],
)
def test_a_changed_past_is_noticed_and_read_from_the_start(log: Path, change: object, reason: str) -> None:
    _, cursor, _ = read_all(log, start_cursor())
    change(log)  # type: ignore[operator]
    result = read_new(log, cursor, max_bytes=10**7)
    assert result.items[0] == LogReplaced(reason=reason)
    fresh = read_new(log, start_cursor(), max_bytes=10**7)
    assert result.items[1:] == fresh.items
    assert result.cursor == fresh.cursor


def test_a_copied_log_is_continued(log: Path) -> None:
    _, cursor, _ = read_all(log, start_cursor())
    copy = log.with_name("copy")
    shutil.copy(log, copy)
    copy.replace(log)
    more = log_lines(simulate_run(seed=2, steps=2, lr=lambda step: 1e-3))
    with log.open("ab") as file:
        file.write(more)
    result = read_new(log, cursor, max_bytes=BLOCK)
    assert result.cursor.inode != cursor.inode
    assert len(result.items) == len(more.splitlines())


def test_a_line_longer_than_a_reading_is_read_whole_if_it_may_be_that_long(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = LOG.splitlines(keepends=True)
    long = lines[1][:-2] + b',"note":"' + b"x" * 10_000 + b'"}\n'
    path.write_bytes(lines[2] + long + lines[3] + b"y" * 50_000 + b"\n" + lines[4])
    cursor, items, more = start_cursor(), [], True
    while more:
        result = read_new(path, cursor, max_bytes=4000, max_line_bytes=20_000)
        items += result.items
        cursor, more = result.cursor, result.more
    steps = [item.step for item in items if isinstance(item, StepLine | EventLine)]
    assert steps == [json.loads(lines[number])["step"] for number in (2, 1, 3, 4)]
    (torn,) = [item for item in items if isinstance(item, TornLine)]
    assert torn.reason == "a line of over 20000 bytes"


def test_a_line_too_long_is_reported_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = LOG.splitlines(keepends=True)
    path.write_bytes(lines[1] + b"x" * 10_000 + b"\n" + lines[2])
    items, cursor, _ = read_all(path, start_cursor(), max_bytes=4000)
    assert [type(item) for item in items] == [StepLine, TornLine, StepLine]
    assert cursor.offset == path.stat().st_size
    assert not cursor.skipping


def test_a_missing_log_reads_as_empty_and_a_vanished_one_as_replaced(log: Path) -> None:
    _, cursor, _ = read_all(log, start_cursor())
    log.unlink()
    assert read_new(log, start_cursor(), max_bytes=BLOCK).items == ()
    gone = read_new(log, cursor, max_bytes=BLOCK)
    assert gone.items == (LogReplaced(reason="removed"),)
    assert gone.cursor == start_cursor()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_new(tmp_path, start_cursor(), max_bytes=BLOCK)
