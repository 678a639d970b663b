"""Evaluations as they lie in a run's `eval/` folder: their files' names, and which one is the newest."""

from __future__ import annotations

from pathlib import Path

RESULT_FILE = "result.json"
VERIFICATIONS_FILE = "verifications.parquet"
PROMPTS_FILE = "prompts.jsonl"
EVIDENCE_FILE = "evidence.json"


def newest_evaluation(eval_dir: Path, label: str) -> Path | None:
    """The folder of the newest whole evaluation of a label, `eval/<label>-step-N`; None if there is none."""
    steps = {int(file.parent.name.rpartition("-")[2]): file.parent for file in eval_dir.glob(f"{label}-step-*/{RESULT_FILE}")}
    return steps[max(steps)] if steps else None
