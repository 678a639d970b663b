"""Runs side by side: the page, the numbers, and a copy of both with the newest run's MLflow run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.compare.compare import Comparison, compare_runs
from dflash.compare.page import render_comparison
from dflash.compare.text import comparison_data, comparison_text
from dflash.compare.view import view_run
from dflash.stages.run import reopen_run
from dflash.stages.tracking import close_again, tracker_of
from dflash.storage import atomic_write_text

FOLDER = "comparisons"
PAGE_FILE = "comparison.html"
DATA_FILE = "comparison.json"


@dataclass(frozen=True, slots=True)
class CompareStage:
    """A comparison and where it was written: `page` and `data` are files."""

    comparison: Comparison
    page: Path
    data: Path

    @property
    def text(self) -> str:
        """For a terminal."""
        return comparison_text(self.comparison)

    @property
    def payload(self) -> dict[str, Any]:
        """For programs: JSON-able values."""
        return comparison_data(self.comparison)


def compare_stage(run_dirs: Sequence[str | Path], *, output: Path | None, track: bool) -> CompareStage:
    """Compare runs with the first of them; write the page and the numbers.

    Args:
        run_dirs: two or more run folders; the first is the reference.
        output: folder to write to; `comparisons/<names>` beside the first run if None.
        track: copy both files into the artifacts of the last run's MLflow run, and its difference into the metrics.

    Raises:
        RunStateError: a folder is not a run.
        DataError: a run was never trained.
        EvaluationError: fewer than two different runs, or an evaluation is damaged.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    comparison = compare_runs([view_run(folder) for folder in folders])
    names = "-vs-".join(run.name for run in comparison.runs)
    folder = output or folders[0].resolve().parent / FOLDER / names
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / PAGE_FILE, folder / DATA_FILE
    atomic_write_text(page, render_comparison(comparison))
    atomic_write_text(data, json.dumps(comparison_data(comparison), indent=2, ensure_ascii=False) + "\n")
    if track:
        _track(folders[-1], comparison, [page, data], names)
    return CompareStage(comparison, page, data)


def _track(run_dir: Path, comparison: Comparison, files: Sequence[Path], names: str) -> None:
    run = reopen_run(run_dir)
    tracker = tracker_of(run)
    tracker.connect()
    for file in files:
        tracker.log_artifact(file, f"compare/{names}")
    if comparison.contests[-1]:
        against = comparison.contests[-1][0]
        step = len(comparison.runs[-1].curves.loss)
        tracker.log_metrics({"compare/acceptance_difference": against.difference}, step=step)
        tracker.set_tags({"compared_with": comparison.runs[0].name, "compare_verdict": against.word})
    close_again(run, tracker, otherwise="KILLED")  # opened for this page alone, or left open by a training that was killed
