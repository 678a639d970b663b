"""The supervisor's side of acceptance probes: keeps the probing process going, and takes its outcomes in.

Invariant: none of it can slow or end the training: the process has its own priority and device, nothing waits for it, and what
goes wrong here is logged. Every outcome becomes one event of the run log, found again there after a crash; the `best` pointer is
moved here alone, by whoever holds the run's lock.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from dflash.checkpoint import (
    ProbeFile,
    ProbesHeldError,
    hold_probes,
    list_checkpoints,
    outcomes,
)
from dflash.errors import DflashError
from dflash.records import EventRecord, ProbeRecord, RunPaths
from dflash.stages.probe import checkpoint_key, give_up, point_to_best
from dflash.stages.run import Run
from dflash.train.follow import parse_lines
from dflash.train.probes import due_steps
from dflash.train.processes import end_child
from dflash.train.progress import newest_segment
from dflash.train.run_log import append_event

logger = logging.getLogger(__name__)

EVENT: Final = "acceptance_probe"
_FIRST_WAIT_S = 2.0
_LONGEST_WAIT_S = 300.0
_STARTS_WITHOUT_A_WORD = 3
_END_S = 5.0


@contextmanager
def probe_watch(run: Run) -> Iterator[ProbeWatch]:
    """Watch the probes of a run while the block runs; its process ends with it."""
    watch = ProbeWatch(run)
    try:
        yield watch
    finally:
        watch.close()


class ProbeWatch:
    """Called on the supervisor's ticks.

    Args:
        run: whose probes; nothing is done where its configuration has none.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._child = _Child(run.paths, timeout_s=run.config.probe.timeout_s, niceness=run.config.probe.niceness)
        self._flow = _Patience(run.config.probe.timeout_s)
        self._taken: set[tuple[int, int, str]] | None = None
        self._file = ProbeFile(run.paths.probes)
        self._wanted = False
        self._seen: object = None
        self._trouble = ""

    def tick(self) -> None:
        """Start the process if something is due, and take in what it has found."""
        if not self._run.config.probe.every_steps:
            return
        try:
            self._tick()
        except (OSError, DflashError) as error:
            if str(error) != self._trouble:
                logger.error("the probes are not looked after, training goes on: %s", error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    def close(self) -> None:
        """End the process."""
        self._child.end()

    def _tick(self) -> None:
        paths = self._run.paths
        self._file.poll()
        seen, records = self._glance(), self._file.records
        if seen != self._seen:
            known = outcomes(records)
            self._wanted = any(checkpoint_key(paths, step) not in known for step in due_steps(paths, self._run.config))
        if self._run.config.probe.runner == "supervisor":
            self._see_to_child(lines=len(records))
        elif self._flow.is_overdue(wanted=self._wanted, lines=len(records)):
            self._give_up("no flow run has probed it (is the automation installed, and a worker up?)")
        if seen != self._seen:
            new = [record for record in outcomes(records).values() if _identity(record) not in self._taken_in()]
            for record in sorted(new, key=lambda record: record.at):
                self._take_in(record)
            if records:
                point_to_best(self._run, records)
            self._seen = seen

    def _see_to_child(self, *, lines: int) -> None:
        paths = self._run.paths
        self._child.tick(wanted=self._wanted, lines=lines)
        if self._child.is_hopeless:
            self._give_up(f"its process died {_STARTS_WITHOUT_A_WORD} times, see {paths.probe_output.name}")
            self._child.hope_again()

    def _give_up(self, reason: str) -> None:
        """The verdicts wait no longer, unless somebody else is probing: our own process cannot begin then, and need not."""
        try:
            with hold_probes(self._run.paths) as writer:
                give_up(self._run, writer, reason=reason)
        except ProbesHeldError:
            logger.debug("somebody else is probing: waiting on")

    def _glance(self) -> object:
        """What everything here comes from, cheaply: while it stays the same, nothing else is due, and the best stays the best."""
        ledger, directory = self._run.paths.ledger, self._run.paths.checkpoints_dir
        steps = tuple(list_checkpoints(directory))
        return self._file.size_bytes, steps, ledger.stat().st_size if ledger.is_file() else 0

    def _take_in(self, record: ProbeRecord) -> None:
        details: dict[str, Any] = {
            "outcome": record.outcome, "checkpoint_segment": record.segment, "prompts_sha256": record.prompts_sha256,
        }  # fmt: skip
        if record.figures is None:
            details["reason"] = record.reason
            logger.warning("no acceptance length of step-%d (%s): %s", record.step, record.outcome, record.reason)
        else:
            figures = record.figures
            details |= {
                "acceptance_length": figures.acceptance_length,
                "acceptance_ci": figures.acceptance_ci and list(figures.acceptance_ci),
                "survival_per_position": list(figures.survival_per_position),
                "prompts": len(figures.counted),
                "verifications": sum(figures.verifications),
                "decode_s": figures.decode_s,
            }
            ends = "" if figures.acceptance_ci is None else " [{:.3f}, {:.3f}]".format(*figures.acceptance_ci)
            logger.info("acceptance length of step-%d: %.3f%s", record.step, figures.acceptance_length, ends)
        event = EventRecord(
            segment=newest_segment(self._run.paths),
            step=record.step,
            wall_time_s=time.time(),
            mono_time_s=time.monotonic(),
            event=EVENT,
            details=details,
        )
        append_event(self._run.paths.log, event)
        self._taken_in().add(_identity(record))

    def _taken_in(self) -> set[tuple[int, int, str]]:
        """What the log holds already; read from it once."""
        if self._taken is None:
            self._taken = set(_logged_probes(self._run.paths.log))
        return self._taken


class _Patience:
    """How long somebody else has been waited for who was to write a line."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lines = 0
        self._word_at_s = time.monotonic()

    def is_overdue(self, *, wanted: bool, lines: int) -> bool:
        """Whether something has been wanted for the whole time limit without a new line; asking again begins a new wait."""
        now_s = time.monotonic()
        if not wanted or lines != self._lines or now_s - self._word_at_s <= self._timeout_s:
            if not wanted or lines != self._lines:
                self._word_at_s = now_s
            self._lines = lines
            return False
        self._word_at_s = now_s
        return True


class _Child:
    """The probing process: started when there is work, started again with ever longer waits when it dies."""

    def __init__(self, paths: RunPaths, *, timeout_s: float, niceness: int) -> None:
        self._paths = paths
        self._timeout_s = timeout_s
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._start_at_s = 0.0
        self._lines = 0
        self._word_at_s = time.monotonic()

    @property
    def is_hopeless(self) -> bool:
        """Whether it died several times in a row without a line about any checkpoint."""
        return self._deaths >= _STARTS_WITHOUT_A_WORD

    def hope_again(self) -> None:
        """Forget the deaths: what could not be probed has been noted."""
        self._deaths = 0

    def tick(self, *, wanted: bool, lines: int) -> None:
        """See to it that it runs while something is wanted, and that it gets on; `lines` is the length of its file."""
        now_s = time.monotonic()
        if lines != self._lines or not wanted:
            self._word_at_s = now_s
        if lines > self._lines:
            self._deaths = 0
        self._lines = lines
        if self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._process = None
                self._deaths += 1
                wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**self._deaths)
                self._start_at_s = now_s + wait_s
                logger.warning("the probing process ended with %d, see %s", code, self._paths.probe_output)
            elif now_s - self._word_at_s > self._timeout_s:
                logger.warning("no word of the probing process for %.0f s: ending it", self._timeout_s)
                self._process.kill()
                self._word_at_s = now_s
        elif wanted and now_s >= self._start_at_s:
            self._start()

    def end(self) -> None:
        """End it if it runs; a probe that is cut off is begun again by the next supervisor."""
        if self._process is not None:
            end_child(self._process, grace_s=_END_S)
            self._process = None

    def _start(self) -> None:
        self._paths.probe_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "dflash", "probe", str(self._paths.root.resolve()), "--parent", str(os.getpid())]
        with self._paths.probe_output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        with suppress(ProcessLookupError, PermissionError):
            own = os.getpriority(os.PRIO_PROCESS, 0)  # a supervisor that was started with a higher one has no right to less
            os.setpriority(os.PRIO_PROCESS, self._process.pid, max(own, self._niceness))  # at once: its imports alone take seconds


def _identity(record: ProbeRecord) -> tuple[int, int, str]:
    return record.step, record.segment, record.prompts_sha256


def _logged_probes(log: Path) -> Iterator[tuple[int, int, str]]:
    if not log.is_file():
        return
    with log.open("rb") as file:
        for line in file:
            if EVENT.encode() not in line:
                continue
            for event in parse_lines(line):
                if event.get("event") == EVENT:
                    details = event["details"]
                    yield event["step"], details["checkpoint_segment"], details["prompts_sha256"]
