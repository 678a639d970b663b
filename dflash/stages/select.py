"""Checkpoint selection: every due checkpoint is probed, the best is pointed to, and challenges the champion of the registry.

Invariant: a checkpoint is probed once, whoever does it: where the run's own probing process is at work, its outcomes are waited
for. The pointer `best` of a run that is being trained is moved by its supervisor alone. Only the best checkpoint is registered:
weights of a large drafter are gigabytes, and what is not even the best of its run challenges nobody.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoint import (
    ProbesHeldError,
    outcomes,
    read_probes,
)
from dflash.errors import RunStateError
from dflash.model.export_fields import DtypeName
from dflash.records import ProbeRecord, RegisteredDrafter, RunPaths
from dflash.stages.export import write_checkpoint
from dflash.stages.probe import best_by_probes, checkpoint_key, point_to_best, probe_stage
from dflash.stages.register import register_drafter
from dflash.stages.run import Run, reopen_run
from dflash.train.probes import due_steps
from dflash.train.runs import run_is_live

logger = logging.getLogger(__name__)

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class SelectStage:
    """What a selection found: the outcomes of all due checkpoints, the best one, and what the registry made of it.

    Attributes:
        best: step; None if no due checkpoint could be measured.
        registered: None where nothing was to be registered.
    """

    probes: tuple[ProbeRecord, ...]
    best: int | None
    registered: RegisteredDrafter | None


def select_stage(run_dir: str | Path, *, register: bool) -> SelectStage:
    """Probe what is due, choose the best checkpoint, and register it.

    Args:
        run_dir: a run's folder, being trained or not.
        register: let the best checkpoint challenge the champion.

    Raises:
        RunStateError: the run has no probes (`probe.every_steps`), or its probing process gives nothing.
        DflashError: data, target, checkpoint or registry cannot be used.
    """
    run = reopen_run(run_dir)
    _probe(run)
    records = read_probes(run.paths.probes)
    best = best_by_probes(run, records) if run_is_live(run.paths) else point_to_best(run, records)
    found = tuple(sorted(outcomes(records).values(), key=lambda record: record.step))
    registered = None
    if register and best is not None and run.config.tracking.enabled:
        registered = register_checkpoint(run, best)
    return SelectStage(found, best, registered)


def register_checkpoint(run: Run, step: int) -> RegisteredDrafter:
    """Export a checkpoint's drafter and register it."""
    checkpoint = run.paths.checkpoint(step)
    dtype: DtypeName = "float32" if run.config.cluster.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="dflash-selected-") as place:
        output, name = Path(place) / "drafter", Path(run.config.target.path).name
        folder = write_checkpoint(run.config, checkpoint, output=output, layout="zlab", dtype=dtype, target_name=name)
        done = register_drafter(run, folder, checkpoint, tags={})
    logger.info("step-%d is version %s of %s: %s", step, done.version, done.model, done.ruling.reason)
    return done


def _probe(run: Run) -> None:
    """Probe what is due here, or wait for the process that does."""
    waited_for: Sequence[int] = ()
    word_at_s = time.monotonic()
    while True:
        try:
            probe_stage(run.paths.root, parent_pid=None, on_probe=lambda _record: None)
        except ProbesHeldError:
            waiting = _without_outcome(run.paths, due_steps(run.paths, run.config))
            if not waiting:
                return
            if waiting != waited_for:
                waited_for, word_at_s = waiting, time.monotonic()
            elif time.monotonic() - word_at_s > run.config.probe.timeout_s:
                raise RunStateError(
                    f"the probing process of run {run.paths.root} has given nothing for {run.config.probe.timeout_s:.0f} s",
                    remedy=f"see {run.paths.probe_output}",
                ) from None
            time.sleep(POLL_S)
        else:
            return


def _without_outcome(paths: RunPaths, steps: Sequence[int]) -> list[int]:
    known = outcomes(read_probes(paths.probes))
    return [step for step in steps if checkpoint_key(paths, step) not in known]
