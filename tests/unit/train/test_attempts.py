"""Attempts: who works on a run, and by what facts a dead flow run is told from a living or an ended one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.records import RunPaths
from dflash.train import attempts as room_of_attempts
from dflash.train import heartbeat as room
from dflash.train.attempts import (
    DIED,
    FINISHED,
    announce_attempt,
    any_unsettled,
    attempts,
    begin_attempt,
    deaths,
    end_attempt,
    end_of,
    note_told,
    open_attempts,
    read_attempt,
    untold_ends,
)
from dflash.train.heartbeat import LENGTH_BYTES, Heart, heartbeat_age_s, write_heartbeat
from dflash.train.processes import boot_id, identify
from dflash.train.runs import hold_run

PATIENCE_S = 10.0


class Other:
    """A forked process that works on the run as the flow run `a` and then waits to be killed."""

    def __init__(self, paths: RunPaths) -> None:
        begun, begins = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                begin_attempt(paths, flow_run="a", deployment="d", parameters={"config": "a.yaml"})
                os.write(begins, b".")
                signal.pause()
            finally:
                os._exit(1)
        os.close(begins)
        with os.fdopen(begun, "rb") as channel:
            assert channel.read(1) == b"."

    def kill(self) -> None:
        """Kill it and wait for its end; once is enough."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "demo-001")


@pytest.fixture
def other(paths: RunPaths) -> Iterator[Other]:
    process = Other(paths)
    yield process
    process.kill()


def names(paths: RunPaths) -> list[str]:
    return [attempt.flow_run for attempt in open_attempts(paths, patience_s=PATIENCE_S)]


def beat(paths: RunPaths, **changes: object) -> None:
    """A supervisor's heartbeat of this moment, changed."""
    me = identify(os.getpid(), role="supervisor")
    assert me is not None
    now = {"pid": me.pid, "start_time": me.start_ticks, "boot_id": me.boot_id, "at": time.time(), "mono": time.monotonic()}
    paths.control_dir.mkdir(parents=True, exist_ok=True)
    write_heartbeat(paths.heartbeat, now | changes)


def test_a_living_process_is_no_death_and_a_killed_one_is(paths: RunPaths, other: Other) -> None:
    assert names(paths) == []
    other.kill()
    assert names(paths) == ["a"]
    (attempt,) = attempts(paths)
    assert (attempt.deployment, attempt.parameters, attempt.number) == ("d", {"config": "a.yaml"}, 0)


def test_a_pid_that_was_given_to_another_process_does_not_keep_a_flow_run_alive(paths: RunPaths) -> None:
    begin_attempt(paths, flow_run="a", deployment=None, parameters={})
    assert names(paths) == []
    file = paths.attempts_dir / "a.json"
    noted = json.loads(file.read_text())
    noted["process"]["start_ticks"] -= 1
    file.write_text(json.dumps(noted))
    assert names(paths) == ["a"]


def test_whoever_holds_the_run_or_has_a_fresh_heartbeat_lives(paths: RunPaths, other: Other) -> None:
    other.kill()
    with hold_run(paths):
        assert names(paths) == []
    beat(paths)
    assert names(paths) == [], "it may be in another container, where its pid means nothing"
    beat(paths, mono=time.monotonic() - PATIENCE_S - 1)
    assert names(paths) == ["a"]


@pytest.mark.parametrize("jump_s", [-86400.0, -3600.0, 3600.0, 86400.0])
def test_a_wall_clock_that_jumps_changes_no_age(paths: RunPaths, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    beat(paths, mono=time.monotonic() - 3)
    now_s = time.time()
    monkeypatch.setattr(room.time, "time", lambda: now_s + jump_s)
    assert 3 <= heartbeat_age_s(paths) < PATIENCE_S
    beat(paths, mono=time.monotonic() - 60)
    assert 60 <= heartbeat_age_s(paths) < 70


def test_a_heartbeat_of_another_boot_is_judged_by_the_wall_clock_in_both_directions(paths: RunPaths) -> None:
    beat(paths, boot_id="another", mono=time.monotonic())
    assert heartbeat_age_s(paths) < PATIENCE_S
    for apart_s in (-3600.0, 3600.0):
        beat(paths, boot_id="another", at=time.time() + apart_s)
        assert heartbeat_age_s(paths) == pytest.approx(3600, abs=5)
    assert boot_id() != "another"


@pytest.mark.parametrize("text", ["", "[1]", '{"at": 1}', '{"boot_id": 3, "at": "x"}'])
def test_a_heartbeat_that_cannot_be_read_is_none(paths: RunPaths, text: str) -> None:
    paths.control_dir.mkdir(parents=True)
    paths.heartbeat.write_text(text)
    assert heartbeat_age_s(paths) == float("inf")


def test_a_heartbeat_is_written_in_place_and_whole_whatever_was_there(paths: RunPaths) -> None:
    paths.control_dir.mkdir(parents=True)
    paths.heartbeat.write_text("x" * 5000)
    beat(paths, pid=1)
    inode = paths.heartbeat.stat().st_ino
    beat(paths, pid=2)
    assert (paths.heartbeat.stat().st_ino, paths.heartbeat.stat().st_size) == (inode, LENGTH_BYTES)
    assert json.loads(paths.heartbeat.read_text())["pid"] == 2
    assert heartbeat_age_s(paths) < 5


def test_a_heartbeat_that_cannot_be_written_is_due_again_in_its_time(paths: RunPaths) -> None:
    heart = Heart(paths, every_s=3600.0)
    assert heart.is_due()
    with pytest.raises(FileNotFoundError):
        heart.beat()
    assert not heart.is_due()
    paths.control_dir.mkdir(parents=True)
    heart.beat()
    assert heartbeat_age_s(paths) < 60
    assert json.loads(paths.heartbeat.read_text())["pid"] == os.getpid()


def test_an_end_is_noted_once_and_ends_the_attempt(paths: RunPaths, other: Other) -> None:
    other.kill()
    assert any_unsettled(paths)
    end_attempt(paths, "a", how=FINISHED, records=5, continued_by=None)
    end_attempt(paths, "a", how=DIED, records=9, continued_by="b")
    end = end_of(paths, "a")
    assert end is not None
    assert (end.how, end.records, end.continued_by) == (FINISHED, 5, None)
    assert names(paths) == []
    assert deaths(paths) == []
    assert [attempt.flow_run for attempt, _ in untold_ends(paths)] == ["a"]
    assert any_unsettled(paths), "the server may not know it"
    note_told(paths, "a")
    assert untold_ends(paths) == []
    assert not any_unsettled(paths)


def test_an_announced_flow_run_takes_its_number_and_its_process_comes_later(paths: RunPaths, other: Other) -> None:
    other.kill()
    (dead,) = attempts(paths)
    announced = announce_attempt(paths, dead, flow_run="b")
    assert (announced.number, announced.process, announced.parameters) == (1, None, dead.parameters)
    assert names(paths) == ["a", "b"], "only the server knows whether `b` may still begin"
    begun = begin_attempt(paths, flow_run="b", deployment="d", parameters={"config": "a.yaml"})
    assert begun.process is not None
    assert announce_attempt(paths, dead, flow_run="b") == begun, "a late announcement hides nothing"
    assert names(paths) == ["a"], "the newest lives; the one before it is gone and has no end"
    assert [attempt.number for attempt in attempts(paths)] == [0, 1]


def test_a_flow_run_that_is_retried_is_the_newest_and_its_earlier_end_hides_no_death(paths: RunPaths, other: Other) -> None:
    other.kill()
    end_attempt(paths, "a", how="TrainerCrashedError", records=5, continued_by=None)
    note_told(paths, "a")
    begin_attempt(paths, flow_run="b", deployment="d", parameters={})
    end_attempt(paths, "b", how=FINISHED, records=5, continued_by=None)
    again = Other(paths)
    try:
        newest = attempts(paths)[-1]
        assert (newest.flow_run, newest.number) == ("a", 2)
        assert end_of(paths, "a") is None
        assert names(paths) == []
    finally:
        again.kill()
    assert names(paths) == ["a"]
    assert any_unsettled(paths)


def test_an_announcement_never_overwrites_a_beginning(paths: RunPaths, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is: the look before it and its writing are two moments."""
    other.kill()
    (dead,) = attempts(paths)
    stock = room_of_attempts.create_exclusively

    def late(path: Path, data: bytes) -> bool:
        begin_attempt(paths, flow_run="b", deployment="d", parameters={})
        return stock(path, data)

    monkeypatch.setattr(room_of_attempts, "create_exclusively", late)
    announced = announce_attempt(paths, dead, flow_run="b")
    assert announced.process is not None
    assert read_attempt(paths, "b") == announced


def test_notes_that_cannot_be_read_are_no_attempts(paths: RunPaths) -> None:
    assert attempts(paths) == []
    begin_attempt(paths, flow_run="a", deployment=None, parameters={})
    (paths.attempts_dir / "b.json").write_text("{")
    (paths.attempts_dir / ".c.json").write_text("{}")
    (paths.attempts_dir / "a.end.json").write_text("[]")
    assert [attempt.flow_run for attempt in attempts(paths)] == ["a"]
    assert end_of(paths, "a") is None
