"""What a comparison needs of one run, read from its folder: nothing is loaded, trained or decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash.checkpoint import read_ledger
from dflash.compare.contest import PromptScore
from dflash.compare.curves import RunCurves, read_curves
from dflash.config import flat_params, load_config
from dflash.data.manifest import read_manifest
from dflash.data.plan_file import read_plan_manifest
from dflash.data.pointer import read_data_pointer
from dflash.errors import DflashError, EvaluationError, RunStateError
from dflash.evaluate.stored import PROMPTS_FILE, RESULT_FILE, VERIFICATIONS_FILE, newest_evaluation
from dflash.records import DataManifest, EvaluationResult, RollbackEntry, RunPaths, RunSummary, from_json
from dflash.storage import open_store

TRAINED = "trained"
WEIGHTS = "target's weights"
"""Name of the target's fingerprint among a run's facts about its data."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The newest evaluation of a run's trained drafter, with every prompt's share of it."""

    result: EvaluationResult
    scores: tuple[PromptScore, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run.

    Attributes:
        name: of its folder.
        settings: flat configuration.
        data: facts about the data set and the batch plan, by name; empty if they cannot be read.
        curves: of the live part of the log.
        rollbacks: lines of the ledger about rollbacks and halts, oldest first.
        evaluation: None while the run has none; summary: None while the run is not finished.
        notes: what could not be read, for people.
    """

    name: str
    settings: Mapping[str, str]
    data: Mapping[str, str]
    curves: RunCurves
    rollbacks: tuple[RollbackEntry, ...]
    evaluation: Evaluation | None
    summary: RunSummary | None
    notes: tuple[str, ...]


def view_run(run_dir: Path) -> RunView:
    """Read a run's folder.

    Raises:
        RunStateError: it is not a run.
        DataError: it was never trained.
    """
    paths = RunPaths(run_dir)
    if not paths.config.is_file():
        raise RunStateError(f"{run_dir} is not a run: it has no config.yaml", remedy="give a folder such as runs/demo-001")
    curves = read_curves(paths.log)
    notes = [f"{curves.torn} lines of the log could not be read"] if curves.torn else []
    try:
        data: Mapping[str, str] = _data_facts(paths)
    except DflashError as error:  # a data set may have been moved since: the run can be compared without it
        data = {}
        notes.append(f"the data set is not described: {error}".replace("\n", " "))
    evaluation = _evaluation(paths)
    if evaluation is None:
        notes.append("no evaluation of the trained drafter yet")
    return RunView(
        name=paths.root.resolve().name,
        settings=flat_params(load_config(paths.config)),
        data=data,
        curves=curves,
        rollbacks=tuple(line for line in read_ledger(paths.ledger) if isinstance(line, RollbackEntry)),
        evaluation=evaluation,
        summary=from_json(RunSummary, paths.summary.read_bytes(), origin=str(paths.summary)) if paths.summary.is_file() else None,
        notes=tuple(notes),
    )


def _data_facts(paths: RunPaths) -> dict[str, str]:
    pointer = read_data_pointer(paths)
    manifest = read_manifest(open_store(pointer.location), fingerprint=pointer.fingerprint, verify="sizes")
    plan = read_plan_manifest(paths.plan_dir)
    return {**_manifest_facts(manifest), "batch plan": plan.plan_sha256[:16], "padding": f"{1 - plan.padding_efficiency:.1%}"}


def _manifest_facts(manifest: DataManifest) -> dict[str, str]:
    return {
        "data set": manifest.fingerprint[:16],
        "sources": ", ".join(source.label for source in manifest.sources),
        "samples": f"{manifest.samples:,}",
        "tokens": f"{manifest.tokens:,}",
        "supervised tokens": f"{manifest.supervised_tokens:,}",
        "bucket edges": ", ".join(map(str, manifest.edges_tokens)),
        "target": manifest.target_id,
        WEIGHTS: manifest.target_fingerprint[:16],
        "tokenizer": manifest.tokenizer_sha256[:16],
        "chat template": manifest.template_sha256[:16],
        "template flags": json.dumps(dict(manifest.template_flags), sort_keys=True),
        "answers by the target": "yes" if manifest.on_policy else "no",
    }


def _evaluation(paths: RunPaths) -> Evaluation | None:
    folder = newest_evaluation(paths.eval_dir, TRAINED)
    if folder is None:
        return None
    result = from_json(EvaluationResult, (folder / RESULT_FILE).read_bytes(), origin=str(folder / RESULT_FILE))
    return Evaluation(result, read_scores(folder))


def read_scores(folder: Path) -> tuple[PromptScore, ...]:
    """Every prompt's score of a stored evaluation.

    Raises:
        EvaluationError: its files are missing, damaged or do not belong together.
    """
    try:
        table = pq.read_table(folder / VERIFICATIONS_FILE, columns=["prompt", "counted"]).to_pydict()
        rows = [json.loads(line) for line in (folder / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()]
        tokens, passes = [0] * len(rows), [0] * len(rows)
        for prompt, counted in zip(table["prompt"], table["counted"], strict=True):
            tokens[prompt] += counted
            passes[prompt] += 1
        return tuple(_score(row, tokens[index], passes[index]) for index, row in enumerate(rows))
    except (OSError, ValueError, KeyError, IndexError, TypeError, pa.ArrowException) as error:
        raise EvaluationError(
            f"{folder} is not a whole evaluation: {error}", remedy="evaluate the run again: python -m dflash evaluate RUN"
        ) from error


def _score(row: Mapping[str, Any], tokens: int, passes: int) -> PromptScore:
    return PromptScore(str(row["prompt_hash"]), str(row["kind"]), tokens, passes, str(row.get("drawn_as", "")))
