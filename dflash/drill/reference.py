"""The run without a fault: trained once for each configuration and code, kept beside the drills."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash.config import Config, section_hash
from dflash.drill.facts import COMPLETED, DrillFacts
from dflash.errors import DataError
from dflash.records import from_json, to_json
from dflash.storage import atomic_write_text
from dflash.train.runs import training_hash

REFERENCE_SCHEMA_VERSION = 1
_PACKAGE = Path(__file__).parents[1]
_DECIDING_ROOMS = ("config", "data", "model", "train", "evaluate")
"""Rooms whose code decides the numbers of a run."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run without a fault came to.

    Attributes:
        run: its folder's name.
        losses: of every step, None where it was not finite.
    """

    key: str
    run: str
    weights_sha256: str
    acceptance_length: float
    acceptance_ci: tuple[float, float]
    losses: tuple[float | None, ...]
    schema_version: int = REFERENCE_SCHEMA_VERSION


def reference_key(config: Config) -> str:
    """Identity of what decides the reference's numbers: the training, the evaluation, and the code of both."""
    code = hashlib.sha256()
    for file in deciding_files():
        code.update(file.read_bytes())
    parts = (training_hash(config), section_hash(config.evaluate), code.hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def deciding_files() -> Iterable[Path]:
    """Source files that decide the numbers of a run without a fault, in a fixed order."""
    files = (file for room in _DECIDING_ROOMS for file in (_PACKAGE / room).rglob("*.py"))
    return sorted(file for file in files if not file.name.startswith("planted"))


def load_reference(root: Path, config: Config) -> Reference | None:
    """The kept reference of a configuration, None if there is none that fits."""
    file = _file(root, reference_key(config))
    return from_json(Reference, file.read_bytes(), origin=str(file)) if file.is_file() else None


def keep_reference(root: Path, config: Config, facts: DrillFacts, *, run: str) -> Reference:
    """Keep a fault-free run as the reference of its configuration.

    Raises:
        DataError: the run did not end well, or was not free of rollbacks.
    """
    outcome = facts.outcome
    good = facts.ended == COMPLETED and not facts.rollbacks and not facts.planted
    if not good or outcome.weights_sha256 is None or outcome.acceptance_length is None or outcome.acceptance_ci is None:
        raise DataError(
            f"the fault-free run {run} ended as {facts.ended} with {len(facts.rollbacks)} rollback lines: it is no reference",
            remedy=f"look into {root / run}; the drill needs a machine on which the run without a fault is healthy",
        )
    reference = Reference(
        key=reference_key(config),
        run=run,
        weights_sha256=outcome.weights_sha256,
        acceptance_length=outcome.acceptance_length,
        acceptance_ci=outcome.acceptance_ci,
        losses=tuple(facts.log.loss[step] for step in sorted(facts.log.loss)),
    )
    atomic_write_text(_file(root, reference.key), to_json(reference) + "\n")
    return reference


def _file(root: Path, key: str) -> Path:
    return root / f"reference-{key}.json"
