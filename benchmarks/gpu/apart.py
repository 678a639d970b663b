"""Each check in a process of its own: one that fails, crashes or hangs is a row of the table, and the rest go on.

Needs the standard library alone, so that a broken torch is a row, too. Invariant: whatever a check does, its process and all that
it started have ended when its row exists.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SHOWN_LINES = 4
KILL_WAIT_S = 10.0
State = Literal["ok", "FAILED", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a check.

    Attributes:
        spent_s: wall time with the process's start.
        message: why it was skipped, or the last lines of what it said when it failed.
    """

    name: str
    state: State
    spent_s: float
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def bad(self) -> bool:
        """Whether something is wrong or unknown."""
        return self.state in ("FAILED", "not run")


@dataclass(frozen=True, slots=True)
class Job:
    """A command that writes `{"state": ..., "figures": ..., "message": ...}` into the file that is its last argument.

    Attributes:
        limit_s: after which it is taken for hanging.
        alone: measures time, so nothing else may run beside it.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    alone: bool


def run_job(job: Job, *, environment: dict[str, str], limit_s: float) -> Row:
    """Run one check to its end or its limit."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said.txt"
        with said.open("wb") as sink:
            process = subprocess.Popen(
                [*job.command, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        spent_s = time.monotonic() - begin_s
        lines = [line for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        tail = "\n".join(lines[-SHOWN_LINES:])
        if code is None:
            return Row(job.name, "FAILED", spent_s, message=f"still running after {limit_s:.0f} s: it hangs or is too slow\n{tail}")
        if not result.is_file():
            return Row(job.name, "FAILED", spent_s, message=f"ended with code {code} and without a result\n{tail}")
        found = json.loads(result.read_text(encoding="utf-8"))
        return Row(job.name, found["state"], spent_s, found["figures"], found["message"])


def run_jobs(
    jobs: Iterable[Job], *, environment: dict[str, str], lanes: int, budget_s: float, on_row: Callable[[Row], None]
) -> list[Row]:
    """Run all checks: first those that measure nothing, `lanes` at a time, then the others one by one.

    Args:
        jobs: in order of importance.
        environment: of their processes.
        lanes: processes at once, at most.
        budget_s: for all of it; a check that it leaves nothing for is not run.
        on_row: called with each row as it comes.

    Returns:
        Rows in the order of the jobs.
    """
    jobs, end_s = list(jobs), time.monotonic() + budget_s

    def one(job: Job) -> Row:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return Row(job.name, "not run", 0.0, message=f"the {budget_s:.0f} s for all checks are used up")
        return run_job(job, environment=environment, limit_s=min(job.limit_s, left_s))

    rows: dict[str, Row] = {}
    for group, count in (([job for job in jobs if not job.alone], lanes), ([job for job in jobs if job.alone], 1)):
        with ThreadPoolExecutor(count) as pool:
            for future in as_completed([pool.submit(one, job) for job in group]):
                row = future.result()
                rows[row.name] = row
                on_row(row)
    return [rows[job.name] for job in jobs]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process's whole session, which is its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # inside a driver call even that may take a while
        process.wait(timeout=KILL_WAIT_S)


def write_result(path: Path, state: State, figures: dict[str, Any], message: str) -> None:
    """What a check's process leaves behind."""
    path.write_text(json.dumps({"state": state, "figures": figures, "message": message}), encoding="utf-8")


def flat_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """`check` -> state and `check.figure` -> value of all rows."""
    flat: dict[str, Any] = {}
    for row in rows:
        flat[row.name] = row.state
        flat |= {f"{row.name}.{key}": value for key, value in row.figures.items()}
    return flat


def table(rows: Sequence[Row]) -> str:
    """All rows, each figure on a line of its own."""
    lines = []
    for row in rows:
        lines.append(
            f"{row.name:<22}{row.state:<9}{row.spent_s:7.1f} s   {row.message.splitlines()[0] if row.message else ''}".rstrip()
        )
        lines += [f"    {line}" for line in row.message.splitlines()[1:]]
        lines += [f"    {key:<36}{_text(value)}" for key, value in row.figures.items()]
    return "\n".join(lines)


def payload(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON-able values."""
    return [asdict(row) for row in rows]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
