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
    settings = load_config(config, overrides=overrides).run
    if run is not None:
        return [str(Path(settings.root) / run)]
    live = (folder for folder in list_runs(settings.root) if run_is_live(RunPaths(folder)))  # most are not, and it is cheap to see
    return [str(folder) for folder in live if _is_own(folder, settings.name, config, overrides)]


def _is_own(folder: Path, name: str, config: str, overrides: Sequence[str]) -> bool:
    """Whether a run has the configured name, or was started from the same file under another one (`run_name`)."""
    return folder.name.rpartition("-")[0] == name or was_started_from(RunPaths(folder), config=config, overrides=overrides)


@task(name="revive-runs", timeout_seconds=SHORT_TIMEOUT_S, **NEVER_CACHED)
def revive_runs(config: str, *, overrides: list[str], run: str | None) -> list[Revival]:
    """Bring back the configuration's runs whose flow has died without a word, each death once.

    One that cannot be brought back is told, and keeps nobody from looking after the others.
    """
    settings = load_config(config, overrides=overrides).run
    named = [] if run is None else [Path(settings.root) / run]
    folders = named or [each for each in list_runs(settings.root) if _is_own(each, settings.name, config, overrides)]
    revivals: list[Revival] = []
    for folder in folders:
        try:
            found = revive_stage(folder, server=PrefectFlowRuns()) if any_unsettled(RunPaths(folder)) else []
        except (DflashError, OSError) as error:
            logger.error("%s cannot be brought back: %s", folder, error)
            revivals.append(Revival(folder.name, "", None, f"cannot be brought back: {error}", loud=True))
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
