"""Whether a trainer that is killed (SIGKILL) and started again ends exactly like one that was left alone.

Trains the demo once in peace and once while its trainer is killed at seeded random steps; the supervisor starts it again
from the last durable checkpoint. Compares every live loss and every bit of the final weights.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.records import RunPaths
from dflash.storage import sha256_file
from dflash.train.processes import recorded_processes
from tests.support.trainer_process import log_lines

NAME = "resume_exact"
COMMON = ("data.max_bad_frac=0.5", "checkpoint.interval_steps=10", "tracking.enabled=false", "train.max_restarts=20")


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    steps, kills, chats = (30, 1, 40) if arguments.quick else (200, 6, 300)
    size = (f"data.num_conversations={chats}", f"train.max_steps={steps}", "train.epochs=20")
    with tempfile.TemporaryDirectory() as folder:
        settings = (*COMMON, *size, f"run.root={folder}")
        quiet = _train(settings, name="quiet", kill_at=[])
        kill_at = sorted(random.Random(0).sample(range(5, steps - 5), kills))
        killed = _train(settings, name="killed", kill_at=kill_at)
        first, second = _losses(quiet), _losses(killed)
        weights = [sha256_file(paths.checkpoint(steps) / "drafter.safetensors") for paths in (quiet, killed)]
        moments = [sha256_file(paths.checkpoint(steps) / "optimizer.safetensors") for paths in (quiet, killed)]
        segments = 1 + max(line["segment"] for line in log_lines(killed))
    figures: dict[str, Any] = {
        "steps": steps,
        "kills": kills,
        "killed_after_steps": kill_at,
        "segments": segments,
        "live_losses": len(second),
        "equal_losses": sum(first.get(step) == loss for step, loss in second.items()),
        "final_weights_bit_equal": weights[0] == weights[1],
        "final_moments_bit_equal": moments[0] == moments[1],
    }
    publish(NAME, figures, arguments)
    return 0


def _train(settings: tuple[str, ...], *, name: str, kill_at: list[int]) -> RunPaths:
    command = [sys.executable, "-m", "dflash", "train", "configs/demo.yaml", *settings, f"run.name={name}"]
    root = Path(next(value for value in settings if value.startswith("run.root=")).partition("=")[2])
    paths = RunPaths(root / f"{name}-001")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr) as process:
        pending = list(kill_at)
        while True:
            try:
                process.wait(timeout=0.02)
                break
            except subprocess.TimeoutExpired:
                if pending and len(_losses(paths)) > pending[0]:
                    _kill_trainer(paths)
                    pending.pop(0)
    if process.returncode or pending:
        raise SystemExit(f"training {name} failed with exit code {process.returncode}, kills left: {pending}")
    return paths


def _kill_trainer(paths: RunPaths) -> None:
    for process in recorded_processes(paths):
        if process.role == "trainer":
            os.kill(process.pid, signal.SIGKILL)


def _losses(paths: RunPaths) -> dict[int, float | None]:
    """Loss of every live record: a later segment replaces what it trains again."""
    losses: dict[int, float | None] = {}
    for line in log_lines(paths):
        if line["kind"] == "step":
            losses = {step: loss for step, loss in losses.items() if step < line["step"]}
            losses[line["step"]] = line["ce"]
    return losses


if __name__ == "__main__":
    raise SystemExit(main())
