"""Real trainer processes without torchrun: forked from a server that has torch loaded, so that a start takes no time.

A process can kill itself (a real SIGKILL) right before the n-th file operation of a given name in its checkpoints.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dflash.checkpoint import read_manifest
from dflash.records import RunPaths
from dflash.train.book import CheckpointBook
from dflash.train.follow import LogFollower
from dflash.train.launch import ranks_store
from dflash.train.processes import STORE_VARIABLE
from tests.support.tiny_run import TinyRun

WAIT_S = 120.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["dflash.train.worker", "tests.support.trainer_process"])


@dataclass(frozen=True)
class KillAt:
    """Die before the `occurrence`-th (1-based) file operation called `operation`."""

    operation: str
    occurrence: int


@dataclass(frozen=True)
class Place:
    """Which rank a process is."""

    rank: int
    ranks: int


def start_trainer(run: TinyRun, *, kill_at: KillAt | None = None) -> BaseProcess:
    """Start a trainer of one rank as the supervisor would: from the newest verified checkpoint, in the next segment."""
    return _start(run, *_next_launch(run), kill_at=kill_at, rank=0)


def start_ranks(run: TinyRun, *, kill_at: KillAt | None = None, kill_rank: int = 0) -> list[BaseProcess]:
    """Start every rank of a run, as torchrun would; `kill_rank` dies at `kill_at`."""
    launch = _next_launch(run)
    ranks_store(run.paths.control_dir / "meet").unlink(missing_ok=True)
    return [
        _start(run, *launch, kill_at=kill_at if rank == kill_rank else None, rank=rank)
        for rank in range(run.config.cluster.replicas)
    ]


def _next_launch(run: TinyRun) -> tuple[int, int | None]:
    book, follower = CheckpointBook(run.paths, run.config.checkpoint, run.config.rollback), LogFollower(run.paths.log)
    resume_step = book.newest_verified()
    follower.poll()
    logged = -1 if follower.last_segment is None else follower.last_segment
    return max(logged, book.last_segment) + 1, resume_step


def _start(run: TinyRun, segment: int, resume_step: int | None, *, kill_at: KillAt | None, rank: int) -> BaseProcess:
    place = Place(rank, run.config.cluster.replicas)
    process = _CONTEXT.Process(target=_train, args=(run.paths.root, segment, resume_step, kill_at, place))
    process.start()
    return process


def train_to_end(run: TinyRun) -> None:
    """Run one trainer and require that it finishes."""
    assert end_of(start_trainer(run)) == 0, run.paths.trainer_output.read_text()


def train_ranks_to_end(run: TinyRun) -> None:
    """Run all ranks and require that each of them finishes."""
    codes = [end_of(process) for process in start_ranks(run)]
    assert codes == [0] * run.config.cluster.replicas, run.paths.trainer_output.read_text()


def end_of(process: BaseProcess) -> int:
    """Wait for the process and return its exit code (negative: the signal that killed it)."""
    process.join(WAIT_S)
    assert process.exitcode is not None, "the trainer hangs"
    return process.exitcode


def wait_until(condition: Callable[[], bool], *, process: BaseProcess) -> None:
    """Wait for something that a living process will do."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert process.exitcode is None, f"the trainer ended with {process.exitcode} before it came to this"
        assert time.monotonic() < deadline_s, "the trainer did not come to this"
        time.sleep(0.001)


def wait_until_logged(run: TinyRun, step: int, *, process: BaseProcess) -> None:
    """Wait for the record of a step."""
    wait_until(lambda: any(line["kind"] == "step" and line["step"] == step for line in log_lines(run.paths)), process=process)


def log_lines(paths: RunPaths) -> list[dict[str, Any]]:
    """Every whole, well-formed line of the log."""
    if not paths.log.exists():
        return []
    lines = []
    for line in paths.log.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # a killed writer leaves one torn line, an empty one ends the file
    return lines


def live_steps(paths: RunPaths) -> dict[int, dict[str, Any]]:
    """Live step records by step, by the definition: no later segment starts at or before them."""
    lines = log_lines(paths)
    starts: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "event" and line["event"] in ("start", "resume"):
            starts[line["segment"]] = line["step"]
    live = {}
    for line in lines:
        if line["kind"] == "step" and not any(
            segment > line["segment"] and step <= line["step"] for segment, step in starts.items()
        ):
            assert line["step"] not in live, "two live records of one step"
            live[line["step"]] = line
    return live


def numbers_of(paths: RunPaths) -> dict[int, tuple[Any, ...]]:
    """Everything numeric of the live records that a resume must reproduce exactly."""
    fields = ("ce", "objective", "accuracy", "accepted_length", "grad_norm", "clip_coef", "lr", "micro_batches", "plan_position")
    return {step: tuple(record[field] for field in fields) for step, record in live_steps(paths).items()}


def final_hashes(paths: RunPaths, step: int) -> dict[str, str]:
    """Hashes of weights and optimizer of a checkpoint."""
    manifest = read_manifest(paths.checkpoint(step))
    return {entry.name: entry.sha256 for entry in manifest.files if entry.name.endswith(".safetensors")}


def _train(root: Path, segment: int, resume_step: int | None, kill_at: KillAt | None, place: Place) -> None:
    from dflash.train.worker import train_segment

    paths = RunPaths(root)
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(place.ranks)}
    os.environ[STORE_VARIABLE] = str(ranks_store(paths.control_dir / "meet"))
    output = os.open(paths.trainer_output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    seen = 0

    def on_operation(name: str) -> None:
        nonlocal seen
        if kill_at is not None and name == kill_at.operation:
            seen += 1
            if seen == kill_at.occurrence:
                os.kill(os.getpid(), signal.SIGKILL)

    code = train_segment(paths, segment=segment, resume_step=resume_step, on_operation=on_operation)
    raise SystemExit(code)
