"""The log writer, the follower and the progress reader."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.records import RunPaths, StepRecord, from_json, to_json
from dflash.train.follow import LogFollower
from dflash.train.progress import read_progress
from dflash.train.run_log import RunLog
from tests.support.full_disk import full_disk
from tests.support.trainer_process import live_steps


def record(step: int, *, segment: int = 0, wait_time_s: float = 0.25, step_time_s: float = 1.0) -> StepRecord:
    return StepRecord(
        segment=segment,
        step=step,
        wall_time_s=100.0 + step,
        mono_time_s=1.0 + step,
        ce=2.0,
        objective=None,
        accuracy=0.5,
        accepted_length=1.5,
        coverage_frac=0.75,
        grad_norm=1.0,
        clip_coef=1.0,
        lr=0.1,
        warmup_factor=1.0,
        skipped=False,
        nonfinite=("objective",),
        micro_batches=(),
        plan_position=step + 1,
        padding_frac=0.0,
        step_time_s=step_time_s,
        wait_time_s=wait_time_s,
        tokens_per_s=100.0,
        ready_depth=1,
        feature_depth=1,
        target_depths=(step,),
    )


@contextmanager
def opened(path: Path, *, segment: int = 0, capacity: int = 1000) -> Iterator[RunLog]:
    defects: list[BaseException] = []
    log = RunLog(path, segment=segment, capacity_records=capacity, heartbeat_s=60.0, on_defect=defects.append)
    try:
        yield log
    finally:
        log.close()
    assert not defects


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_and_events_are_written_in_order_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    with opened(path, segment=3) as log:
        log.event("start", 0, {"total_steps": 9})
        log.step(record(0, segment=3))
        log.step(record(1, segment=3))
        log.event("finish", 2, {})
    text = path.read_text().splitlines()
    assert [(line["kind"], line["step"]) for line in lines_of(path)] == [("event", 0), ("step", 0), ("step", 1), ("event", 2)]
    assert from_json(StepRecord, text[1], origin="log") == record(0, segment=3)
    assert json.loads(text[1])["objective"] is None
    assert json.loads(text[1])["nonfinite"] == ["objective"]
    assert json.loads(text[0])["segment"] == 3


def test_sync_puts_everything_appended_before_it_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    sizes: list[int] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real_fsync(descriptor)

    with opened(path) as log:
        monkeypatch.setattr(os, "fsync", fsync)
        for step in range(20):
            log.step(record(step))
        log.sync()
        assert len(lines_of(path)) == 20
        assert sizes[-1] == path.stat().st_size
        log.sync()
    assert [line["step"] for line in lines_of(path)] == list(range(20))


def test_many_threads_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with opened(path) as log:

        def emit(start: int) -> None:
            for number in range(start, start + 50):
                log.event("heartbeat", number, {"text": "x" * (number % 300)})
                if number % 10 == 0:
                    log.sync()

        threads = [threading.Thread(target=emit, args=(1000 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines_of(path)) == 200


def test_a_full_queue_drops_records_counts_them_and_never_drops_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    entered, release = threading.Event(), threading.Event()
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        entered.set()
        assert release.wait(30)
        return real_write(descriptor, data)

    with opened(path, capacity=3) as log:
        monkeypatch.setattr("dflash.train.run_log.os.write", write)
        log.step(record(0))
        assert entered.wait(30)
        for step in range(1, 9):
            log.step(record(step))
        log.event("epoch", 9, {})
        release.set()
    steps = [line["step"] for line in lines_of(path) if line["kind"] == "step"]
    assert steps == [0, 1, 2, 3]
    events = [(line["event"], line["details"]) for line in lines_of(path) if line["kind"] == "event"]
    assert events == [("epoch", {}), ("log_drops", {"dropped": 5, "first_step": 4, "last_step": 8})]


@pytest.mark.parametrize("tail", [b"", b'{"kind":"st', b"\n"])
def test_an_earlier_writers_tail_is_kept_and_the_next_line_starts_cleanly(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.jsonl"
    with opened(path) as log:
        log.step(record(0))
    before = path.read_bytes() + tail
    path.write_bytes(before)
    with opened(path, segment=1) as log:
        log.event("resume", 0, {})
    after = path.read_bytes()
    assert after.startswith(before)
    assert json.loads(after.split(b"\n")[-2])["event"] == "resume"
    assert after.count(b"\n\n") == (1 if tail == b"\n" else 0)


def stuck(log: RunLog) -> bool:
    try:
        log.sync()
    except OSError:
        return True
    return False


def test_a_full_disk_delays_records_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.train.run_log._RETRY_S", 0.001)
    path = tmp_path / "log.jsonl"
    with opened(path) as log:
        log.step(record(0))
        log.sync()
        with full_disk(limit_bytes=path.stat().st_size + 100):
            for step in range(1, 40):
                log.step(record(step))
            assert stuck(log), "a checkpoint must not be committed before its records"
            log.event("save_failed", 40, {})
        log.sync()
        assert [line["step"] for line in readable(path)] == list(range(41))
    torn = [line for line in path.read_text().splitlines() if line and not line.endswith("}")]
    assert len(torn) == 1, "what was written of the first refused record stays a torn line"


def test_a_log_that_cannot_be_written_to_the_last_is_reported_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.train.run_log._RETRY_S", 0.001)
    defects: list[BaseException] = []
    log = RunLog(tmp_path / "log.jsonl", segment=0, capacity_records=9, heartbeat_s=60.0, on_defect=defects.append)
    with full_disk(limit_bytes=10):
        log.step(record(0))
        log.close()
    assert [type(defect) for defect in defects] == [OSError]


def test_a_silent_log_beats_at_the_step_it_stands_at(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, segment=2, capacity_records=9, heartbeat_s=0.005, on_defect=lambda error: pytest.fail(str(error)))
    log.step(record(7, segment=2))
    while sum(line.get("event") == "heartbeat" for line in readable(path)) < 2:
        threading.Event().wait(0.001)
    log.close()
    beats = [line for line in readable(path) if line.get("event") == "heartbeat"]
    assert {(line["segment"], line["step"]) for line in beats} == {(2, 7)}


def readable(path: Path) -> list[dict[str, object]]:
    lines = []
    for line in path.read_text().split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def write_log(paths: RunPaths, segments: list[tuple[int, int]], *, torn_at: int | None = None) -> None:
    """Segments of (first step, number of records), each begun by its event."""
    lines = []
    for number, (first, count) in enumerate(segments):
        lines.append(
            json.dumps(
                {
                    "kind": "event",
                    "event": "resume" if number else "start",
                    "segment": number,
                    "step": first,
                    "details": {"total_steps": 50},
                }
            )
        )
        lines += [to_json(record(step, segment=number, wait_time_s=0.1 * number)) for step in range(first, first + count)]
    if torn_at is not None:
        lines[torn_at] = lines[torn_at][:7]
    paths.root.mkdir(parents=True, exist_ok=True)
    with paths.log.open("a") as file:
        file.write("".join(line + "\n" for line in lines))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=5), st.integers(60, 900))
def test_the_follower_agrees_with_the_definition_of_live_records(
    tmp_path_factory: pytest.TempPathFactory, segments: list[tuple[int, int]], piece: int
) -> None:
    paths = RunPaths(tmp_path_factory.mktemp("follow"))
    segments[0] = (0, segments[0][1])
    write_log(paths, segments)
    data = paths.log.read_bytes()
    paths.log.write_bytes(b"")
    follower = LogFollower(paths.log)
    for start in range(0, len(data), piece):
        with paths.log.open("ab") as file:
            file.write(data[start : start + piece])
        follower.poll()
    live = live_steps(paths)
    assert follower.end == max(live, default=-1) + 1
    assert follower.last_segment == len(segments) - 1
    assert follower.train_time_s() == pytest.approx(len(live))
    waited = sum(item["wait_time_s"] for item in live.values())
    assert follower.wait_frac() == pytest.approx(waited / len(live) if live else 0)
    for first, end in ((0, follower.end), (2, 6), (3, 3)):
        wanted = len([step for step in live if first <= step < end]) / (end - first) if end > first else 1
        assert follower.coverage_frac(first, end) == pytest.approx(wanted)


def test_coverage_counts_steps_that_never_came_as_missing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_log(paths, [(0, 10)], torn_at=4)
    follower = LogFollower(paths.log)
    follower.poll()
    assert follower.coverage_frac(0, 10) == pytest.approx(0.9)
    assert follower.coverage_frac(5, 20) == pytest.approx(5 / 15)
    assert LogFollower(tmp_path / "none").coverage_frac(0, 5) == 0


def test_progress_is_read_from_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    assert read_progress(paths).total_steps == read_progress(paths).step == 0
    write_log(paths, [(0, 0)])
    progress = read_progress(paths)
    assert (progress.step, progress.total_steps, progress.eta_s) == (0, 50, None)
    write_log(paths, [(0, 30), (20, 5)])
    progress = read_progress(paths)
    assert (progress.step, progress.total_steps) == (25, 50)
    assert (progress.ce, progress.accepted_length, progress.tokens_per_s) == (2.0, 1.5, 100.0)
    assert progress.eta_s == pytest.approx(25.0)
    # A log far longer than the tail: the total comes from its head, the rest from its end; a torn end is ignored.
    monkeypatch.setattr("dflash.train.progress._TAIL_BYTES", 1500)
    with paths.log.open("a") as file:
        file.write("".join(to_json(record(step, segment=1)) + "\n" for step in range(25, 40)) + '{"kind":"step","st')
    assert (read_progress(paths).step, read_progress(paths).total_steps) == (40, 50)
