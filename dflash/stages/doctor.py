"""The doctor's stage: examine a run before it trains, keep what was found, refuse to go on after a failure."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dflash.config import Config
from dflash.records import RunPaths
from dflash.stages.run import Run
from dflash.storage import atomic_write_text
from dflash.train.doctor import DoctorReport, Part, examine, require_passed

FLOW_OVERFIT_S = 3.0
"""In a flow one batch is learnt at most this long; a person who asks gets more."""


def doctor_stage(run: Run, *, part: Part) -> DoctorReport:
    """Examine a run and write `doctor-<part>.json` into its folder.

    Args:
        run: an opened run.
        part: `start` before anything is prepared, `data` right before training.

    Returns:
        The report, which may hold warnings and skipped checks.

    Raises:
        PreflightError: a check failed; the report is written all the same.
    """
    torch.set_num_threads(run.config.cluster.torch_threads)
    report = examine(run.config, parts=(part,), paths=run.paths, overfit_limit_s=FLOW_OVERFIT_S)
    atomic_write_text(run.paths.root / f"doctor-{part}.json", json.dumps(report.payload, indent=2) + "\n")
    require_passed(report)
    return report


def newest_prepared_run(config: Config) -> RunPaths | None:
    """The newest run of a configuration that has a data set; None where there is none."""
    found = sorted(Path(config.run.root).glob(f"{config.run.name}-*/data.json"))
    return RunPaths(found[-1].parent) if found else None
