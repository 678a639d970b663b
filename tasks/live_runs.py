"""Tasks: which runs of a configuration are being trained, and which of them have to be brought back first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task

from dflash.config import load_config
from dflash.errors import DflashError
from dflash.records import RunPaths
from dflash.stages import Revival, list_runs, revive_stage
from dflash.train.attempts import any_unsettled, was_started_from
from dflash.train.runs import run_is_live
from tasks.events import died_event
from tasks.flow_runs import PrefectFlowRuns
from tasks.policies import NEVER_CACHED, SHORT_TIMEOUT_S
from tasks.reporting import table

logger = logging.getLogger(__name__)


@task(name="find-live-runs", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def find_live_runs(config: str, *, overrides: list[str], run: str | None) -> list[str]:
    """Folders of the configuration's runs that a supervisor trains right now, or the one that is named."""
    if run is not None:
        return [str(Path(load_config(config, overrides=overrides).run.root) / run)]
    return [folder for folder in _own_runs(config, overrides) if run_is_live(RunPaths(Path(folder)))]


def _own_runs(config: str, overrides: Sequence[str]) -> list[str]:
    """Runs of the configured name, and those that were started from the same file under another one (`run_name`)."""
    settings = load_config(config, overrides=overrides).run

    def is_own(folder: Path) -> bool:
        named = folder.name.rpartition("-")[0] == settings.name
        return named or was_started_from(RunPaths(folder), config=config, overrides=overrides)

    return [str(folder) for folder in list_runs(settings.root) if is_own(folder)]


@task(name="revive-runs", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def revive_runs(config: str, *, overrides: list[str], run: str | None) -> list[Revival]:
    """Bring back the configuration's runs whose flow has died without a word, each death once.

    One that cannot be brought back is told, and keeps nobody from looking after the others.
    """
    root = Path(load_config(config, overrides=overrides).run.root)
    folders = _own_runs(config, overrides) if run is None else [str(root / run)]
    revivals: list[Revival] = []
    for folder in folders:
        try:
            found = revive_stage(folder, server=PrefectFlowRuns()) if any_unsettled(RunPaths(Path(folder))) else []
        except DflashError as error:
            logger.error("%s cannot be brought back: %s", folder, error)
            revivals.append(Revival(Path(folder).name, "", None, f"cannot be brought back: {error.what}", loud=True))
            continue
        for revival in found:
            died_event(revival)
        revivals += found
    if revivals:
        rows = [
            {"run": item.run, "dead flow run": item.flow_run, "continued by": item.continued_by, "why": item.reason}
            for item in revivals
        ]
        table("revived", rows, description=f"runs whose flow had died: {len(rows)}")
    return revivals
