"""What a model card tells, read from a run's folder: nothing is measured here, and nothing is guessed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash.checkpoint import read_manifest
from dflash.compare.curves import read_curves
from dflash.config import TargetConfig
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import load_data
from dflash.errors import DataError, RunStateError
from dflash.evaluate.served_launch import READS, ServeCommands, ServedDrafter, serve_commands, shell_line
from dflash.evaluate.stored import EVIDENCE_FILE, PROMPTS_FILE, RESULT_FILE
from dflash.model.export_fields import DtypeName, LayoutName
from dflash.model.export_files import CONFIG_NAME, read_json
from dflash.model.export_layouts import LAYOUTS
from dflash.model.parameters import drafter_parameter_count
from dflash.model.target_info import read_target_info
from dflash.records import CheckResult, EvaluationResult, PromptSetEntry, RunPaths, from_json
from dflash.stages.model_card import CardFacts
from dflash.stages.register import drafter_sha256
from dflash.stages.run import Run

DISTRIBUTION = "dflash-pipeline"


def card_facts(
    run: Run, checkpoint: Path, *, layout: LayoutName, dtype: DtypeName, license_id: str, base_model: str
) -> Callable[[Path, Sequence[CheckResult]], CardFacts]:
    """Read what is known before the export; the rest comes with the exported folder and its audit.

    Raises:
        RunStateError: the checkpoint, as it is now, was never evaluated.
        DataError: the data set's manifest is gone, or the evaluation's evidence is damaged.
    """
    manifest = read_manifest(checkpoint)
    evaluation = _evaluation_of(run.paths, manifest.step)
    pointer = read_data_pointer(run.paths)
    data = load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes").manifest
    result = from_json(EvaluationResult, (evaluation / RESULT_FILE).read_bytes(), origin=str(evaluation / RESULT_FILE))
    evidence = _evidence(evaluation)
    if evidence.get("at") and datetime.fromisoformat(evidence["at"]) < datetime.fromisoformat(manifest.created_at):
        raise _not_evaluated(run.paths, manifest.step, "was evaluated before it was written again (the run went back)")
    parameters = drafter_parameter_count(run.config.drafter, read_target_info(run.config.target).hidden_size)

    def complete(folder: Path, audit: Sequence[CheckResult]) -> CardFacts:
        serving = _serving(run, folder, layout=layout, dtype=dtype, base_model=base_model)
        return CardFacts(
            name=f"{run.name}-step-{manifest.step}",
            license=license_id,
            base_model=base_model,
            layout=layout,
            dtype=dtype,
            drafter_sha256=drafter_sha256(folder),
            parameters=parameters,
            config=run.config,
            checkpoint=manifest,
            trained_tokens=_tokens_seen(run.paths, manifest.step),
            data=data,
            result=result,
            sets=result.prompt_sets or _sets_of(evaluation, result),
            machine=str(evidence.get("machine", "")),
            measured_at=str(evidence.get("at", "")),
            audit=audit,
            serving=[shell_line(commands.speculative) for commands in serving],
            serving_notes=list(dict.fromkeys(note for commands in serving for note in commands.notes)),
            code=f"{DISTRIBUTION} {version(DISTRIBUTION)}",
        )

    return complete


def _serving(run: Run, folder: Path, *, layout: LayoutName, dtype: DtypeName, base_model: str) -> list[ServeCommands]:
    """Of every engine that reads the layout; the target by its name on the hub."""
    config_file = folder / CONFIG_NAME
    description = LAYOUTS[layout].describe(read_json(config_file), origin=config_file.name)
    revision = run.config.target.revision if run.config.target.path == base_model else None
    target = TargetConfig(path=base_model, revision=revision, mask_token_id=description.mask_token_id)
    drafter = ServedDrafter("DRAFTER", layout, description)
    return [
        serve_commands(engine, drafter, target=target, block_size=None, max_positions=None, dtype=dtype)
        for engine, layouts in READS.items()
        if layout in layouts
    ]


def _evaluation_of(paths: RunPaths, step: int) -> Path:
    folder = paths.eval_dir / f"trained-step-{step}"
    if not (folder / RESULT_FILE).is_file():
        raise _not_evaluated(paths, step, "was never evaluated")
    return folder


def _not_evaluated(paths: RunPaths, step: int, why: str) -> RunStateError:
    command = f"python -m dflash evaluate {paths.root} --checkpoint {paths.checkpoint(step)}"
    return RunStateError(f"step-{step} of run {paths.root} {why}", remedy=command)


def _evidence(evaluation: Path) -> dict[str, Any]:
    file = evaluation / EVIDENCE_FILE
    if not file.is_file():
        return {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}", remedy="evaluate the checkpoint again") from error
    return known if isinstance(known, dict) else {}


def _sets_of(evaluation: Path, result: EvaluationResult) -> tuple[PromptSetEntry, ...]:
    """Of an evaluation that did not note its sets: one, by the hashes of its prompts."""
    file = evaluation / PROMPTS_FILE
    if not file.is_file():
        return ()
    hashes = sorted(json.loads(line)["prompt_hash"] for line in file.read_text(encoding="utf-8").splitlines() if line)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return (PromptSetEntry(result.dataset, "hash over its prompts", digest, len(hashes)),)


def _tokens_seen(paths: RunPaths, step: int) -> int | None:
    try:
        tokens = read_curves(paths.log).tokens
    except DataError:  # a checkpoint whose log is gone can be published; the card says that nothing is known
        return None
    return int(tokens[step - 1]) if 0 < step <= len(tokens) else None
