"""Accepted changes: an unfinished run that goes on with another training configuration, because a person said so.

Invariant: a run's numbers never change by accident. A changed configuration is refused with the differences shown;
`train --accept-changes` notes them in the run's folder first and only then replaces its configuration, so every checkpoint's origin
can be told. What says which samples meet in which batch of the plan, and what weights and moments mean, cannot change at all: plan
positions and tensors would lose their meaning. So after a change of `cluster.replicas` or `train.accumulation_steps` every batch of
the plan is still consumed once: what is left of it is dealt to the new ranks, from the position that the checkpoint has reached.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from dflash.config import Config, dump_config, load_config
from dflash.errors import DataError, RunStateError
from dflash.records import RunPaths, from_json, to_json
from dflash.storage import append_line, atomic_write_text
from dflash.train.runs import differing_keys, run_is_live, show_differences, training_hash, training_identity

logger = logging.getLogger(__name__)

FIXED_KEYS = ("data.", "plan.", "drafter.", "run.seed", "train.epochs", "train.optimizer.kind", "target.mask_token")
"""Keys (or prefixes of keys) that no flag changes in a run: a new run may begin with its weights (`train.init_from`)."""

CHANGES_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class AcceptedChange:
    """One change.

    Attributes:
        from_sha256, to_sha256: hashes of the training identity before and after.
        differences: one line a key, `key: old -> new`.
        at: UTC time.
    """

    from_sha256: str
    to_sha256: str
    differences: tuple[str, ...]
    at: str
    schema_version: int = CHANGES_SCHEMA_VERSION


def accept_changes(config: Config, paths: RunPaths) -> tuple[str, ...]:
    """Let an unfinished run go on with a changed configuration, and note what changed.

    Returns:
        The differences, `key: old -> new`; nothing if there are none.

    Raises:
        RunStateError: the run is being trained, is finished, or a key differs that can never change.
    """
    known = load_config(paths.config)
    before, after = training_identity(known), training_identity(config)
    differences = show_differences(before, after)
    if not differences:
        return ()
    fixed = [line for key, line in zip(differing_keys(before, after), differences, strict=True) if key.startswith(FIXED_KEYS)]
    if fixed:
        raise RunStateError(
            f"run {paths.root} cannot go on with these changes:\n  " + "\n  ".join(fixed),
            remedy="begin a new run (another run.name); train.init_from lets it start with an exported drafter of this one",
        )
    if run_is_live(paths) or paths.summary.exists():
        state = "finished" if paths.summary.exists() else "being trained right now"
        raise RunStateError(f"run {paths.root} is {state}", remedy="only a run that was stopped or has crashed can be changed")
    change = AcceptedChange(
        from_sha256=training_hash(known),
        to_sha256=training_hash(config),
        differences=tuple(differences),
        at=datetime.now(UTC).isoformat(),
    )
    paths.control_dir.mkdir(parents=True, exist_ok=True)
    append_line(paths.changes, to_json(change))
    atomic_write_text(paths.config, dump_config(config))
    for line in differences:
        logger.warning("run %s goes on with an accepted change: %s", paths.root, line)
    return change.differences


def accepted_since(paths: RunPaths, *, saved_sha256: str, now_sha256: str) -> tuple[AcceptedChange, ...] | None:
    """The accepted changes that lead from a checkpoint's training identity to the run's, in order; None if they do not."""
    at, passed = saved_sha256, []
    for change in read_changes(paths):
        if change.from_sha256 == at:
            at = change.to_sha256
            passed.append(change)
    return tuple(passed) if at == now_sha256 else None


def read_changes(paths: RunPaths) -> list[AcceptedChange]:
    """All accepted changes of a run; a line torn by a kill is skipped: its change did not happen."""
    changes = []
    for line in paths.changes.read_bytes().splitlines() if paths.changes.is_file() else ():
        try:
            changes.append(from_json(AcceptedChange, line, origin=str(paths.changes)))
        except DataError as error:
            logger.warning("skipped a torn line: %s", error.what)
    return changes
