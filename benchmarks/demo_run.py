"""What the whole demo costs after installation: wall time, time to the first step, memory, logging, and what it reaches.

Runs `python -m flows.train --config configs/demo.yaml` in an empty run root, without any PREFECT_* or MLFLOW_* variable and
with an empty PREFECT_HOME, and samples the proportional set size (shared pages counted once) of the whole process tree. The time
to the first step is given from the start of the training (its supervisor takes the run's lock: a new process, the target, the
drafter, the reader and the first features follow) and from the start of the whole program (data, answers and plan before that).
Logging is what it takes (CPU time, its thread included) to make the records of this very run again from their numbers and to write
them, against the run's own median step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.records import RunPaths, StepRecord, from_json
from dflash.stages import list_runs, load_summary
from dflash.train.metrics import BatchFacts, RankReport, StepContext, step_record
from dflash.train.run_log import RunLog
from dflash.train.step import Sums, Update

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
        started_s, started_at_s = time.monotonic(), time.time()
        peak_bytes = _run(Path(folder), QUICK if arguments.quick else ())
        wall_s = time.monotonic() - started_s
        paths = RunPaths(list_runs(Path(folder) / "runs")[-1])
        summary = load_summary(paths.root)
        first_step_at_s = _first_step_at_s(paths)
        log_frac = _logging_frac(paths, Path(folder) / "log.jsonl")
        training_at_s = paths.lock.stat().st_mtime  # made by the supervisor, and never written to
    figures: dict[str, Any] = {
        "wall_s": round(wall_s, 1),
        "training_to_first_step_s": round(first_step_at_s - training_at_s, 1),
        "program_to_first_step_s": round(first_step_at_s - started_at_s, 1),
        "log_and_metrics_frac_of_step": round(log_frac, 5),
        "peak_memory_gib": round(peak_bytes / 2**30, 2),
        "acceptance_length": summary.acceptance_length,
        "acceptance_length_untrained": summary.acceptance_length_untrained,
        "acceptance_ci95": list(summary.acceptance_ci95 or ()),
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


def _steps(paths: RunPaths) -> list[StepRecord]:
    lines = paths.log.read_bytes().splitlines()
    return [from_json(StepRecord, line, origin="log") for line in lines if msgspec.json.decode(line)["kind"] == "step"]


def _first_step_at_s(paths: RunPaths) -> float:
    """Wall time at which the first update was done."""
    return _steps(paths)[0].wall_time_s


def _logging_frac(paths: RunPaths, path: Path) -> float:
    """CPU time of one record and its writing over the median step."""
    records = _steps(paths)
    parts = [_parts(record) for record in records]
    log = RunLog(path, segment=0, capacity_records=len(records), heartbeat_s=60.0, on_defect=_fail)
    began_s = time.process_time()
    for context, update, report in parts:
        log.step(step_record(context, update, [report]))
    log.close()
    spent_s = time.process_time() - began_s
    return spent_s / len(records) / statistics.median(record.step_time_s for record in records)


def _parts(record: StepRecord) -> tuple[StepContext, Update, RankReport]:
    """What the trainer made a record from."""
    numbers = [asdict(micro) for micro in record.micro_batches]
    sums = tuple(Sums(**{field.name: micro[field.name] for field in fields(Sums)}) for micro in numbers)
    facts = tuple(BatchFacts(**{field.name: micro[field.name] for field in fields(BatchFacts)}) for micro in numbers)
    context = StepContext(**{field.name: getattr(record, field.name) for field in fields(StepContext)})
    norm, coef = (float("nan") if value is None else value for value in (record.grad_norm, record.clip_coef))
    update = Update(sums=sums, grad_norm=norm, clip_coef=coef, nonfinite=record.nonfinite, over_limit=False)
    depths = (record.ready_depth, record.feature_depth)
    report = RankReport(
        batches=facts, wait_time_s=record.wait_time_s, depths=depths, finished=record.target_depths, stop=False
    )  # fmt: skip
    return context, update, report


def _fail(error: BaseException) -> None:
    raise error


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
