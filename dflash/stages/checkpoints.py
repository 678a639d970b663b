"""Looking at checkpoints: which there are, what is stored in them, and why each one is or is not clean. Reads only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoint import (
    BEST,
    LATEST,
    LATEST_CLEAN,
    Explanation,
    LogEvidence,
    NormJump,
    TensorScan,
    current_states,
    list_checkpoints,
    norm_jumps,
    outcomes,
    probe_view,
    read_ledger,
    read_pointer,
    read_probes,
    scan_file,
    total_norm,
    verify_checkpoint,
    why_states,
)
from dflash.checkpoint.layout import DRAFTER_FILE, MANIFEST_FILE
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError, RunStateError
from dflash.health import critical_findings
from dflash.records import RunPaths
from dflash.stages.health import load_report
from dflash.stages.run import Run, reopen_run
from dflash.train.probes import due_steps

_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One row of the list.

    Attributes:
        state: by the ledger; `unknown` for a folder that it does not name.
        size_bytes: of its folder; 0 if that is gone.
        pointers: names that point to it.
        acceptance_length: of its probe; None without one.
    """

    step: int
    state: str
    segment: int
    at: str
    reason: str
    size_bytes: int
    pointers: tuple[str, ...]
    acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """What is stored in one checkpoint.

    Attributes:
        problems: what makes it unusable; empty if nothing does.
        jumps: norms that changed too much since the checkpoint before.
        compared_with: that checkpoint; empty if there is none to compare with.
    """

    name: str
    tensors: int
    values: int
    weights_norm: float
    problems: tuple[str, ...]
    jumps: tuple[str, ...]
    compared_with: str


def list_stage(run_dir: Path) -> list[ListedCheckpoint]:
    """Checkpoints of a run with their states, oldest first.

    Raises:
        RunStateError: the folder is not a run.
    """
    paths = reopen_run(run_dir).paths
    current = current_states(read_ledger(paths.ledger))
    in_place = list_checkpoints(paths.checkpoints_dir)
    pointers = {name: read_pointer(paths.checkpoints_dir, name) for name in (LATEST, LATEST_CLEAN, BEST)}
    probed = {key: record.figures for key, record in outcomes(read_probes(paths.probes)).items() if record.figures is not None}
    rows = []
    for step in sorted({*current, *in_place}):
        entry = current.get(step)
        figures = None if entry is None else probed.get((step, entry.segment))
        size_bytes = sum(file.stat().st_size for file in paths.checkpoint(step).glob("*") if file.is_file())
        rows.append(
            ListedCheckpoint(
                step=step,
                state="unknown" if entry is None else entry.state,
                segment=-1 if entry is None else entry.segment,
                at="" if entry is None else entry.at,
                reason="" if entry is None else entry.reason,
                size_bytes=size_bytes,
                pointers=tuple(name for name, target in pointers.items() if target == step),
                acceptance_length=None if figures is None else figures.acceptance_length,
            )
        )
    return rows


def why_stage(run_dir: Path) -> list[Explanation]:
    """Why each checkpoint of a run is or is not clean, from its ledger and its last health check.

    Raises:
        RunStateError: the folder is not a run.
    """
    run = reopen_run(run_dir)
    return why_states(
        read_ledger(run.paths.ledger),
        evidence=_evidence(run),
        rule=run.config.checkpoint,
        in_place=list_checkpoints(run.paths.checkpoints_dir),
    )


def verify_stage(folder: Path, *, progress: Callable[[str, int, int], None]) -> list[VerifiedCheckpoint]:
    """Rescan every stored tensor of a run, of one checkpoint, or of any folder with safetensors files.

    Args:
        folder: a run's folder, a checkpoint's, or one that holds safetensors files (or folders of them, such as
            `checkpoint-500`), which are then compared in the order of their numbers.
        progress: called with a label and how many of how many are done.

    Raises:
        CheckpointError: there are no stored tensors.
        RunStateError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunStateError(f"there is no folder {folder}", remedy="give a run's folder, a checkpoint, or a folder of safetensors")
    rule = reopen_run(folder).config.checkpoint if RunPaths(folder).config.is_file() else CheckpointConfig()
    chosen = _checkpoints_in(folder)
    if not chosen:
        raise CheckpointError(f"{folder} holds no stored tensors", remedy="give a folder with .safetensors files")
    results: list[VerifiedCheckpoint] = []
    before: tuple[str, dict[str, float]] | None = None
    for done, path in enumerate(chosen):
        progress("checkpoints", done, len(chosen))
        result, norms = _verified(path, before=before, factor=rule.norm_jump_factor)
        results.append(result)
        # An untrained drafter's norms are no measure for a trained one's.
        before = None if path.name == "step-0" or result.problems else (path.name, norms)
    progress("checkpoints", len(chosen), len(chosen))
    return results


def _verified(
    path: Path, *, before: tuple[str, dict[str, float]] | None, factor: float
) -> tuple[VerifiedCheckpoint, dict[str, float]]:
    problems: list[str] = []
    if (path / MANIFEST_FILE).is_file():
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(error.what)
    scans: list[TensorScan] = []
    weights: list[TensorScan] = []
    for file in sorted(path.glob("*.safetensors")):
        try:
            found = list(scan_file(file))
        except CheckpointError as error:
            problems.append(error.what)
            continue
        problems += [
            f"{file.name}: {s.name} has {s.nonfinite} of {s.values} values that are not finite" for s in found if s.nonfinite
        ]
        scans += found
        if file.name == DRAFTER_FILE or not (path / DRAFTER_FILE).is_file():
            weights += found
    jumps = norm_jumps({} if before is None else before[1], weights, factor=factor)
    result = VerifiedCheckpoint(
        name=path.name,
        tensors=len(scans),
        values=sum(scan.values for scan in scans),
        weights_norm=total_norm(weights),
        problems=tuple(dict.fromkeys(problems)),
        jumps=tuple(map(_jump_text, jumps)),
        compared_with="" if before is None else before[0],
    )
    return result, {scan.name: scan.norm for scan in weights}


def _jump_text(jump: NormJump) -> str:
    return f"norm of {jump.name} goes from {jump.before:.4g} to {jump.after:.4g} ({jump.factor:.3g}x)"


def _checkpoints_in(folder: Path) -> list[Path]:
    """Folders that hold stored tensors, in the order of training."""
    own = RunPaths(folder).checkpoints_dir
    if own.is_dir():
        return [own / f"step-{step}" for step in list_checkpoints(own)]
    if any(folder.glob("*.safetensors")):
        return [folder]
    return sorted({file.parent for file in folder.glob("*/*.safetensors")}, key=_by_number)


def _by_number(path: Path) -> tuple[int, str]:
    match = _NUMBER.search(path.name)
    return int(match.group(1)) if match else -1, path.name


def _evidence(run: Run) -> LogEvidence:
    awaited = _awaited_probes(run)
    try:
        report = load_report(run.paths)
    except RunStateError:
        return LogEvidence(last_record=-1, critical=(), awaited_probes=awaited)
    found: Sequence[tuple[int, int, str]] = [(f.onset_step, f.last_step, f.message) for f in critical_findings(report)]
    last_record = -1 if report.last_step is None else report.last_step
    return LogEvidence(last_record=last_record, critical=found, awaited_probes=awaited)


def _awaited_probes(run: Run) -> frozenset[tuple[int, int]]:
    paths, current = run.paths, current_states(read_ledger(run.paths.ledger))
    due = due_steps(paths, run.config)
    return probe_view(read_probes(paths.probes), current, due=due, min_frac=run.config.probe.min_frac).awaited
