"""Baselines beside the drafter that is judged: prompt lookup, the untrained drafter, and drafters of other runs or published ones.

Invariant: all of them decode the same prompts in one alternating run. A drafter from elsewhere keeps its own taps, block size and
mask token; it must have been made for the same target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoint import load_drafter
from dflash.errors import EvaluationError, RunStateError
from dflash.evaluate.candidates import Candidate, drafter_candidate, lookup_candidate
from dflash.evaluate.stored import BASELINES_FILE, newest_evaluation
from dflash.evaluate.tap_choice import reading_own_taps, target_tapping
from dflash.model.drafter import Drafter
from dflash.model.export import import_drafter
from dflash.model.target import Target
from dflash.records import CheckpointManifest, RivalTable, RunPaths, from_json, to_json
from dflash.stages.export import check_same_target, config_of, newest_checkpoint, stored_in, tables_of
from dflash.stages.run import Run
from dflash.storage import atomic_write_text

LOOKUP, UNTRAINED = "prompt_lookup", "untrained"
_CHECKPOINT, _RUN, _PUBLISHED = "manifest.json", "config.yaml", "config.json"
"""The file by which each kind of folder with a drafter is known."""


@dataclass(frozen=True, slots=True)
class _Rival:
    """A drafter, in eval mode on the target's device, with what decoding needs to know of it."""

    label: str
    step: int | None
    drafter: Drafter
    mask_token_id: int


def with_baselines(run: Run, target: Target, judged: Candidate, *, names: Sequence[str]) -> tuple[Target, list[Candidate]]:
    """Everyone of an evaluation with baselines.

    Args:
        run: whose untrained drafter, and whose settings.
        target: the run's, with its taps.
        judged: the run's own drafter.
        names: `evaluate.baselines`.

    Returns:
        The target that all of them decode on, and the candidates: the judged one first, then the baselines as they are named.

    Raises:
        EvaluationError: a name that is neither a known baseline nor a folder with a drafter, or one that is named twice.
        RunStateError, CheckpointError, DrafterError: a drafter of another target, or a damaged one.
    """
    check_names(names)
    rivals = {name: _loaded(run, target, name) for name in names if name != LOOKUP}
    wide = target_tapping(target, (layer for rival in rivals.values() for layer in rival.drafter.config.target_layer_ids))
    own = reading_own_taps(judged.proposer, own=target.target_layer_ids, target=wide) if judged.proposer.needs_features else None
    candidates = [Candidate(judged.label, judged.step, own or judged.proposer)]
    for name in names:
        if name == LOOKUP:
            candidates.append(lookup_candidate(wide, block_size=judged.proposer.max_drafts + 1))
        else:
            candidates.append(_candidate(wide, rivals[name], block_size=run.config.evaluate.block_size))
    labels = [each.label for each in candidates]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise EvaluationError(f"two drafters would be called {twice!r}", remedy="give one of their folders another name")
    return wide, candidates


def check_names(names: Sequence[str]) -> None:
    """Refuse, before anything is loaded, what can be no baseline.

    Raises:
        EvaluationError: a name that is neither a known baseline nor a folder with a drafter, or one that is named twice.
    """
    if len(set(names)) < len(names):
        raise EvaluationError(f"evaluate.baselines names one twice: {', '.join(names)}", remedy="name each baseline once")
    for name in names:
        if name not in (LOOKUP, UNTRAINED) and not any((Path(name) / file).is_file() for file in (_CHECKPOINT, _RUN, _PUBLISHED)):
            raise EvaluationError(
                f"evaluate.baselines: {name!r} is neither {LOOKUP} nor {UNTRAINED}, nor a folder with a drafter",
                remedy="give a published drafter, a checkpoint (RUN/checkpoints/step-N) or a run's folder",
            )


def write_rivals(table: RivalTable | None, folder: Path) -> list[Path]:
    """Write the table into an evaluation's folder, or take an older one out; returns the files.

    Raises:
        StorageError: the folder cannot be written.
    """
    file = folder / BASELINES_FILE
    if table is None:
        file.unlink(missing_ok=True)
        return []
    atomic_write_text(file, to_json(table, indent=2) + "\n")
    return [file]


def load_rivals(paths: RunPaths) -> RivalTable | None:
    """The table of a run's newest trained evaluation; None if it had no baselines."""
    folder = newest_evaluation(paths.eval_dir, "trained")
    return None if folder is None else read_rivals(folder)


def read_rivals(folder: Path) -> RivalTable | None:
    """The table of an evaluation's folder; None if it had no baselines."""
    file = folder / BASELINES_FILE
    return from_json(RivalTable, file.read_bytes(), origin=str(file)) if file.is_file() else None


def _candidate(target: Target, rival: _Rival, *, block_size: int | None) -> Candidate:
    trained = rival.drafter.config.block_size
    made = drafter_candidate(
        target,
        rival.drafter,
        block_size=None if block_size is None else min(block_size, trained),
        mask_token_id=rival.mask_token_id,
        label=rival.label,
        step=rival.step,
    )
    proposer = reading_own_taps(made.proposer, own=rival.drafter.config.target_layer_ids, target=target)
    return Candidate(made.label, made.step, proposer)


def _loaded(run: Run, target: Target, name: str) -> _Rival:
    if name == UNTRAINED:
        return _of_checkpoint(target, run.paths.checkpoint(0), label=UNTRAINED)
    folder = Path(name)
    if (folder / _CHECKPOINT).is_file():
        return _of_checkpoint(target, folder, label=_label(folder.resolve().parents[1].name, folder.resolve().name))
    if (folder / _RUN).is_file():
        newest = newest_checkpoint(RunPaths(folder))
        return _of_checkpoint(target, newest, label=_label(folder.resolve().name, newest.name))
    return _published(target, folder)


def _of_checkpoint(target: Target, folder: Path, *, label: str) -> _Rival:
    config = config_of(folder)
    manifest, weights = load_drafter(folder)
    _check_fingerprint(manifest, target, folder)
    drafter = Drafter(config.drafter, target_hidden_size=target.info.hidden_size)
    drafter.load_state_dict(weights)
    return _Rival(label, manifest.step, drafter.to(target.device).eval(), manifest.mask_token_id)


def _published(target: Target, folder: Path) -> _Rival:
    published = import_drafter(folder, tables=tables_of(target.info, stored_in(folder)))
    check_same_target(published, target.info)
    head = target.head_weight
    drafter = published.drafter.to(device=head.device, dtype=head.dtype).eval()
    return _Rival(_label(folder.resolve().name), None, drafter, published.description.mask_token_id)


def _check_fingerprint(manifest: CheckpointManifest, target: Target, folder: Path) -> None:
    if manifest.target_fingerprint != target.info.fingerprint:
        raise RunStateError(
            f"{folder} was trained for another target than {target.info.location}",
            remedy="name a baseline that was trained for the run's own target",
        )


def _label(*names: str) -> str:
    """Folder names as a label that file names and metric names can hold."""
    return "_".join(re.sub(r"[^A-Za-z0-9._-]+", "_", name) for name in names)
