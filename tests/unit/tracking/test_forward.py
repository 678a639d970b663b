"""Forwarding of the log: every step exactly once, whatever fails in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.records import RunPaths
from dflash.tracking import LogForwarder, MlflowTracker, NullTracker, Tracker
from dflash.tracking.forward import BeginSegment
from dflash.tracking.state import TrackingState, load_state, save_state
from tests.unit.tracking.tracking_fakes import FakeStore, line_of, no_rollback, step_record

FRESH = TrackingState("fake", "dflash", "", segment=0, log_offset_bytes=0, last_step=-1, sending=False)


def process(
    store: FakeStore, paths: RunPaths, *, run_name: str = "demo-001.s0", begin_segment: BeginSegment = no_rollback
) -> LogForwarder:
    """A forwarder as a new process makes it: with what the run's folder remembers, and a clock past every pause."""
    ticks = iter(range(0, 10**9, 1000))
    tracker = MlflowTracker(
        store.connect,  # type: ignore[arg-type] - a fake with the same methods
        uri="fake",
        run_name=run_name,
        tags={},
        state=load_state(paths.tracking_state) or FRESH,
        state_path=paths.tracking_state,
        clock=lambda: float(next(ticks)),
    )
    return LogForwarder(paths, tracker, begin_segment=begin_segment)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def append(paths: RunPaths, data: bytes) -> None:
    with paths.log.open("ab") as log:
        log.write(data)


def test_complete_lines_are_sent_and_a_torn_one_waits_for_its_end(paths: RunPaths) -> None:
    store = FakeStore()
    forwarder = process(store, paths)
    assert forwarder.forward() == 0, "no log yet"
    torn = line_of(step_record(2))
    append(paths, line_of(step_record(0)) + line_of(step_record(1)) + torn[:40])
    assert forwarder.forward() == 2
    append(paths, torn[40:])
    assert forwarder.forward() == 1
    assert forwarder.forward() == 0
    assert store.steps() == [0, 1, 2]


def test_events_and_damaged_lines_are_passed_over(paths: RunPaths) -> None:
    store = FakeStore()
    append(paths, b'{"kind":"event","event":"start","step":0}\n' + line_of(step_record(0)) + b"\x00\x01 not json\n[]\n")
    append(paths, line_of(step_record(1)))
    assert process(store, paths).forward() == 2
    assert store.steps() == [0, 1]


def test_steps_that_a_resumed_trainer_did_again_are_not_sent_again(paths: RunPaths) -> None:
    store = FakeStore()
    append(paths, b"".join(line_of(step_record(step)) for step in range(6)))
    process(store, paths).forward()
    append(paths, b"".join(line_of(step_record(step, segment=1)) for step in range(4, 9)))
    process(store, paths).forward()
    assert store.steps() == list(range(9))


def test_a_log_larger_than_a_chunk_arrives_whole(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.tracking.forward.CHUNK_BYTES", 1000)
    store = FakeStore()
    append(paths, b"".join(line_of(step_record(step)) for step in range(50)))
    assert process(store, paths).forward() == 50
    assert store.steps() == list(range(50))


def test_a_crash_between_sending_and_remembering_repeats_nothing(paths: RunPaths) -> None:
    store = FakeStore()
    append(paths, b"".join(line_of(step_record(step)) for step in range(3)))
    process(store, paths).forward()
    before = load_state(paths.tracking_state)
    assert before is not None
    append(paths, b"".join(line_of(step_record(step)) for step in range(3, 7)))
    process(store, paths).forward()
    # What a kill after the store's answer leaves on disk: the old offset, marked as being sent.
    crashed = TrackingState("fake", "dflash", before.run_id, 0, before.log_offset_bytes, before.last_step, sending=True)
    save_state(paths.tracking_state, crashed)
    append(paths, line_of(step_record(7)))
    process(store, paths).forward()
    assert store.steps() == list(range(8))


def test_a_log_that_became_shorter_is_read_from_its_beginning(paths: RunPaths) -> None:
    store = FakeStore()
    append(paths, b"".join(line_of(step_record(step)) for step in range(5)))
    process(store, paths).forward()
    paths.log.write_bytes(b"".join(line_of(step_record(step)) for step in (0, 5)))
    process(store, paths).forward()
    assert store.steps() == list(range(6))


def test_tracking_that_is_switched_off_sends_nothing_and_remembers_nothing(paths: RunPaths) -> None:
    append(paths, line_of(step_record(0)))
    assert LogForwarder(paths, NullTracker(), begin_segment=no_rollback).forward() == 0
    assert not paths.tracking_state.exists()


ACTIONS = st.lists(st.sampled_from(["write", "half", "forward", "restart", "away", "back", "break"]), min_size=5, max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(actions=ACTIONS)
def test_every_step_is_sent_once_and_in_order_whatever_happens(actions: list[str]) -> None:
    with TemporaryDirectory() as folder:
        paths, store, step, rest = RunPaths(Path(folder)), FakeStore(), 0, b""
        forwarder = process(store, paths)
        for action in actions:
            if action in ("write", "half"):
                line = rest or line_of(step_record(step))
                cut = len(line) if action == "write" else len(line) // 2
                append(paths, line[:cut])
                step, rest = (step, line[cut:]) if line[cut:] else (step + 1, b"")
            elif action == "forward":
                forwarder.forward()
            elif action == "restart":
                forwarder = process(store, paths)
            elif action == "break":
                store.fail_after = 1
            else:
                store.away = action == "away"
        store.away, store.fail_after = False, None
        append(paths, rest + line_of(step_record(step + 1)))
        forwarder.forward()
        done = [*range(step + bool(rest)), step + 1]
        assert store.steps() == done


def rollback_line(segment: int, target: int) -> bytes:
    return line_of({"kind": "event", "event": "rollback_end", "segment": segment, "step": target, "details": {"rung": 1}})


@pytest.mark.parametrize("chunk_bytes", [700, 1 << 20])
def test_a_rollback_ends_the_segment_and_its_steps_go_to_a_run_of_their_own(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr("dflash.tracking.forward.CHUNK_BYTES", chunk_bytes)
    store = FakeStore()
    seen: list[int] = []

    def begin_segment(event: Mapping[str, Any]) -> Tracker:
        seen.append(event["segment"])
        state = load_state(paths.tracking_state)
        assert state is not None
        save_state(paths.tracking_state, replace(state, run_id="", segment=event["segment"], last_step=-1))
        return process(store, paths, run_name=f"demo-001.s{event['segment']}").tracker

    append(paths, b"".join(line_of(step_record(step)) for step in range(6)))
    append(paths, rollback_line(1, 3) + b"".join(line_of(step_record(step, segment=1)) for step in range(3, 8)))
    append(paths, rollback_line(2, 2) + b"".join(line_of(step_record(step, segment=2)) for step in range(2, 5)))
    forwarder = process(store, paths, begin_segment=begin_segment)
    assert forwarder.forward() == 14
    assert seen == [1, 2]
    assert [store.steps(run) for run in store.runs] == [list(range(6)), list(range(3, 8)), list(range(2, 5))]
    assert [run["name"] for run in store.runs.values()] == ["demo-001.s0", "demo-001.s1", "demo-001.s2"]
    # A new process continues the newest segment and enters none twice.
    append(paths, line_of(step_record(5, segment=2)))
    assert process(store, paths, begin_segment=begin_segment).forward() == 1
    assert (seen, store.steps("run2")) == ([1, 2], [2, 3, 4, 5])


def probe_line(step: int, **details: Any) -> bytes:
    return (
        json.dumps({"kind": "event", "event": "acceptance_probe", "segment": 0, "step": step, "details": details}).encode() + b"\n"
    )


def points_of(store: FakeStore) -> list[Any]:
    return [point for run in store.runs.values() for point in run["points"] if point.name.startswith("probe/")]


def test_acceptance_probes_are_metrics_at_the_step_of_their_checkpoint(paths: RunPaths) -> None:
    store = FakeStore()
    failed = probe_line(1, outcome="failed", reason="acceptance_probe")
    probed = probe_line(2, outcome="measured", acceptance_length=2.5, acceptance_ci=[2.25, 3.0])
    append(paths, line_of(step_record(0)) + failed + line_of(step_record(1)) + probed)
    assert process(store, paths).forward() == 2
    found = {(point.name, point.step): point.value for point in points_of(store)}
    assert found == {
        ("probe/acceptance_length", 2): 2.5,
        ("probe/acceptance_ci_low", 2): 2.25,
        ("probe/acceptance_ci_high", 2): 3.0,
    }
    assert process(store, paths).forward() == 0
    assert len(points_of(store)) == 3
