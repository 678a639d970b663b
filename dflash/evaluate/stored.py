"""Evaluations as they lie in a run's `eval/` folder: their files' names, and which one is the newest."""

from __future__ import annotations

from pathlib import Path

RESULT_FILE = "result.json"
VERIFICATIONS_FILE = "verifications.parquet"
PROMPTS_FILE = "prompts.jsonl"
EVIDENCE_FILE = "evidence.json"
BASELINES_FILE = "baselines.json"
SWEEP_FILE = "sweep.json"
SWEEP_TEXT = "sweep.txt"
SWEEP_PICTURE = "sweep.png"
REPORT_FILE = "report.html"


def newest_evaluation(eval_dir: Path, label: str) -> Path | None:
    """The folder of the newest whole evaluation of a label, `eval/<label>-step-N`; None if there is none."""
    return _newest(eval_dir, label, RESULT_FILE)


def newest_sweep(eval_dir: Path) -> Path | None:
    """The folder of the newest whole sweep, `eval/sweep-step-N`; None if there is none."""
    return _newest(eval_dir, "sweep", SWEEP_FILE)


def _newest(eval_dir: Path, label: str, file_name: str) -> Path | None:
    steps = {int(file.parent.name.rpartition("-")[2]): file.parent for file in eval_dir.glob(f"{label}-step-*/{file_name}")}
    return steps[max(steps)] if steps else None
