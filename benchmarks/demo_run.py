"""What the whole demo costs after installation: wall time, memory of all its processes, and what it reaches.

Runs `python -m flows.train --config configs/demo.yaml` in an empty run root, without any PREFECT_* or MLFLOW_* variable and
with an empty PREFECT_HOME, and samples the proportional set size (shared pages counted once) of the whole process tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.stages import list_runs, load_summary

NAME = "demo_run"
SAMPLE_EVERY_S = 1.0
QUICK = (
    "data.num_conversations=40",
    "data.max_bad_frac=0.5",
    "train.max_steps=20",
    "evaluate.num_prompts=4",
    "evaluate.untrained_prompts=2",
)


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.monotonic()
        peak_bytes = _run(Path(folder), QUICK if arguments.quick else ())
        wall_s = time.monotonic() - started_s
        summary = load_summary(list_runs(Path(folder) / "runs")[-1])
    figures: dict[str, Any] = {
        "wall_s": round(wall_s, 1),
        "peak_memory_gib": round(peak_bytes / 2**30, 2),
        "acceptance_length": summary.acceptance_length,
        "acceptance_length_untrained": summary.acceptance_length_untrained,
        "acceptance_ci95": list(summary.acceptance_ci95),
        "speedup": summary.speedup,
        "lossless": summary.lossless,
        "padding_efficiency": summary.padding_efficiency,
        "longest_bucket_run": summary.longest_bucket_run,
        "feature_wait_frac": summary.feature_wait_frac,
        "health_verdict": summary.health_verdict,
        "steps": summary.steps,
        "train_time_s": round(summary.train_time_s, 1),
    }
    publish(NAME, figures, arguments)
    return 0


def _run(folder: Path, overrides: tuple[str, ...]) -> int:
    """Run the flow to its end; returns the peak memory of its process tree in bytes."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    settings = {"PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "flows.train", "--config", "configs/demo.yaml"]
    for override in (f"run.root={folder / 'runs'}", *overrides):
        command += ["--set", override]
    process = subprocess.Popen(command, cwd=ROOT, env=clean | settings, stdout=sys.stderr)
    tree, peak_bytes = psutil.Process(process.pid), 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, _memory_bytes(tree))
        time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        raise SystemExit(f"the demo failed with exit code {process.returncode}")
    return peak_bytes


def _memory_bytes(tree: psutil.Process) -> int:
    total = 0
    try:
        members = [tree, *tree.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended between the listing and the reading
    return total


if __name__ == "__main__":
    raise SystemExit(main())
