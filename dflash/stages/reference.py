"""Runs beside the published results of others: reads their newest evaluations, decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.compare.reference_text import OwnResult, reference_data, reference_page, reference_table
from dflash.errors import RunStateError
from dflash.evaluate.stored import RESULT_FILE, newest_evaluation
from dflash.records import EvaluationResult, RunPaths, from_json
from dflash.stages.run import reopen_run


@dataclass(frozen=True, slots=True)
class ReferenceStage:
    """The table as text and as JSON-able values, and the documentation's page of the others."""

    text: str
    page: str
    payload: dict[str, Any]


def reference_stage(run_dirs: Sequence[str | Path]) -> ReferenceStage:
    """Put trained runs beside what others have published; no run at all gives the others alone.

    Raises:
        RunStateError: a folder is no run, or has no evaluation.
    """
    own = []
    for run_dir in run_dirs:
        run = reopen_run(run_dir)
        target = Path(run.config.publish.base_model or run.config.target.path).name
        own.append(OwnResult(run.name, target, _newest(run.paths)))
    return ReferenceStage(reference_table(own), reference_page(), reference_data(own))


def _newest(paths: RunPaths) -> EvaluationResult:
    folder = newest_evaluation(paths.eval_dir, "trained")
    if folder is None:
        raise RunStateError(f"run {paths.root} has no trained evaluation", remedy=f"python -m dflash evaluate {paths.root}")
    return from_json(EvaluationResult, (folder / RESULT_FILE).read_bytes(), origin=str(folder / RESULT_FILE))
