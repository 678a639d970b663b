"""Evaluations as they lie in a run's `eval/` folder: their files' names, and which one is the newest."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from dflash.storage import alone

RESULT_FILE = "result.json"
VERIFICATIONS_FILE = "verifications.parquet"
PROMPTS_FILE = "prompts.jsonl"
EVIDENCE_FILE = "evidence.json"
BASELINES_FILE = "baselines.json"
SWEEP_FILE = "sweep.json"
SWEEP_TEXT = "sweep.txt"
SWEEP_PICTURE = "sweep.png"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"


def writing_alone(eval_dir: Path) -> AbstractContextManager[None]:
    """Be the only one who writes evaluations of a run while the block runs: files of two would not belong together.

    Raises:
        StorageError: the folder cannot be written.
    """
    return alone(eval_dir / LOCK_FILE)


def newest_evaluation(eval_dir: Path, label: str) -> Path | None:
    """The folder of the newest whole evaluation of a label, `eval/<label>-step-N`; None if there is none."""
    return _newest(eval_dir, label, RESULT_FILE)


def newest_sweep(eval_dir: Path) -> Path | None:
    """The folder of the newest whole sweep, `eval/sweep-step-N`; None if there is none."""
    return _newest(eval_dir, "sweep", SWEEP_FILE)


def _newest(eval_dir: Path, label: str, file_name: str) -> Path | None:
    named = re.compile(rf"{re.escape(label)}-step-(\d+)")  # a copy beside it (`trained-step-600-old`) is no evaluation
    found = {file.parent: named.fullmatch(file.parent.name) for file in eval_dir.glob(f"*/{file_name}")}
    steps = {int(match[1]): folder for folder, match in found.items() if match is not None}
    return steps[max(steps)] if steps else None
