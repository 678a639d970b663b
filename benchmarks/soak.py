"""A day of trouble in minutes: 50 rollbacks, 200 checkpoints and 2000 health checks of one run, with an eye on every process.

A tiny run meets three NaN batches every 40 steps. Each time the health check decides, the supervisor goes back to a clean
checkpoint and starts the trainer again without these batches; everything is real but the size of the models, and MLflow is fed.
A long quiet end follows, in which one trainer saves over and over. A checker of its own process, as a served health check is one,
looks at the run all the while. Memory (resident set) and open file descriptors of the supervisor, the checker and the last trainer
are sampled; what each has in the last quarter of its time is compared with the second quarter, when everything has been
loaded once. Ten minutes on two cores; `--quick` is over before everything has been loaded, so it judges no growth.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.checkpoint import read_ledger
from dflash.records import RollbackEntry, RunPaths
from dflash.stages import reopen_run, train_stage
from dflash.stages.health import health_stage
from dflash.train.processes import recorded_processes
from tests.support.poisoned_run import build_poisoned_run
from tests.support.trainer_process import live_steps, log_lines

NAME = "soak"
FIRST_BAD, APART, BAD_BATCHES = 60, 40, 3
ROLLBACKS, QUIET_BATCHES, CHECKS = 50, 1200, 2000
QUICK_ROLLBACKS, QUICK_QUIET_BATCHES, QUICK_CHECKS = 3, 100, 20
SAMPLES_PER_BATCH = 4
SAMPLE_EVERY_S = 0.25
CHECK_PAUSE_S = 0.1
FLAT_FRAC, FLAT_DESCRIPTORS = 0.05, 2
SETTINGS = (
    "train.max_nonfinite_in_row=3",
    "rollback.max_per_region=3",
    "rollback.max_per_day=1000",
    "rollback.max_per_run=1000",
    "rollback.max_skip_frac=1",
    "rollback.region_steps=10",
    "tracking.enabled=true",
)
CHECKER = "--checker"
"""Option that makes this script the process that checks a run over and over."""


@dataclass
class Usage:
    """What one process held, sample by sample: bytes of resident memory and open file descriptors."""

    memory_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def see(self, process: psutil.Process) -> None:
        """Take a sample."""
        self.memory_bytes.append(process.memory_info().rss)
        self.descriptors.append(process.num_fds())

    def figures(self, name: str) -> dict[str, Any]:
        """Medians of the second and of the last quarter of the time, and whether they are the same but for little."""
        second_b, last_b = quarters(self.memory_bytes)
        second_fd, last_fd = quarters(self.descriptors)
        return {
            f"{name}_memory_mb": [round(second_b / 1e6, 1), round(last_b / 1e6, 1)],
            f"{name}_descriptors": [round(second_fd), round(last_fd)],
            f"{name}_flat": last_b <= (1 + FLAT_FRAC) * second_b and last_fd <= second_fd + FLAT_DESCRIPTORS,
        }


def quarters(values: Sequence[int]) -> tuple[float, float]:
    """Medians of the second and of the last quarter of at least four values."""
    quarter = len(values) // 4
    return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument(CHECKER, type=Path, metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.checker:
        return _check_over_and_over(RunPaths(arguments.checker))
    rollbacks, quiet, checks = (
        (QUICK_ROLLBACKS, QUICK_QUIET_BATCHES, QUICK_CHECKS) if arguments.quick else (ROLLBACKS, QUIET_BATCHES, CHECKS)
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = _soak(Path(folder), rollbacks=rollbacks, quiet=quiet)
    publish(NAME, figures, arguments)
    wanted = figures["rollbacks"] >= rollbacks and figures["health_checks"] >= checks
    flat = arguments.quick or all(value for key, value in figures.items() if key.endswith("_flat"))
    return 0 if wanted and flat else 1


def _soak(root: Path, *, rollbacks: int, quiet: int) -> dict[str, Any]:
    bad = [FIRST_BAD + APART * number + each for number in range(rollbacks) for each in range(BAD_BATCHES)]
    samples = SAMPLES_PER_BATCH * (bad[-1] + quiet)
    paths = build_poisoned_run(root, samples=samples, bad=bad, settings=SETTINGS)
    command = [sys.executable, "-m", f"benchmarks.{NAME}", CHECKER, str(paths.root)]
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as checker:
        with _Watch(paths, checker.pid) as watch:
            outcome = train_stage(reopen_run(paths.root), on_progress=lambda _progress: None)
        told, _ = checker.communicate()
    live = live_steps(paths)
    consumed = {item["batch_id"] for record in live.values() for item in record["micro_batches"]}
    durable = sum(line.get("event") == "save_durable" for line in log_lines(paths))
    ends = sum(isinstance(line, RollbackEntry) and line.phase == "end" for line in read_ledger(paths.ledger))
    return {
        "wall_s": round(time.monotonic() - began_s),
        "rollbacks": ends,
        "restarts_after_crashes": outcome.restarts,
        "checkpoints": durable,
        "health_checks": json.loads(told)["checks"],
        "steps": outcome.steps,
        "bad_batches": len(bad),
        "bad_batches_trained_on": len(consumed & set(bad)),
        "damaged_live_records": sum(record["skipped"] for record in live.values()),
        "last_verdict": health_stage(paths.root, act=False, ended=True).verdict,
        **watch.supervisor.figures("supervisor"),
        **watch.checker.figures("checker"),
        **watch.trainers[-1].figures("last_trainer"),
    }


class _Watch:
    """Samples what the processes hold, in a thread, from entering to leaving."""

    def __init__(self, paths: RunPaths, checker_pid: int) -> None:
        self.supervisor, self.checker = Usage(), Usage()
        self.trainers: list[Usage] = []
        self._paths = paths
        self._own, self._checker = psutil.Process(), psutil.Process(checker_pid)
        self._trainer_pid = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_all, name="watch")

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample_all(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self.supervisor.see(self._own)
            self.checker.see(self._checker)
            self._sample_trainer()

    def _sample_trainer(self) -> None:
        pids = [process.pid for process in recorded_processes(self._paths) if process.role == "trainer"]
        try:
            if pids:
                if pids[0] != self._trainer_pid:
                    self._trainer_pid = pids[0]
                    self.trainers.append(Usage())
                self.trainers[-1].see(psutil.Process(pids[0]))
        except psutil.NoSuchProcess:
            return  # it has ended since it was looked up: there is nothing to sample


def _check_over_and_over(paths: RunPaths) -> int:
    """Check a run, as a process that lives on does, until nobody holds the other end of standard input; tell how often."""
    checks = 0
    while not select.select([sys.stdin], [], [], CHECK_PAUSE_S)[0]:
        if paths.log.is_file():
            health_stage(paths.root, act=True, ended=False)
            checks += 1
    print(json.dumps({"checks": checks}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
