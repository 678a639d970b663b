"""Runs: which folder a configuration trains in, and whether that continues an unfinished one.

A run is `<run.root>/<run.name>-NNN`. A configuration continues its newest run while that run has no
`summary.json`, nobody trains it and it decides the same numbers; otherwise it gets the next number. Data sets are shared by runs.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.config import Config, dump_config, load_config
from dflash.errors import ConfigError, RunStateError
from dflash.records import RunPaths
from dflash.storage import atomic_write_text
from dflash.train.requests import halted_by
from dflash.train.runs import run_is_live, training_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """An opened run.

    Attributes:
        resumed: the folder existed already and is continued.

    """

    paths: RunPaths
    config: Config
    resumed: bool

    @property
    def name(self) -> str:
        """Folder name, `<run.name>-NNN`."""
        return self.paths.root.name


def open_run(config: Config) -> Run:
    """Continue the configuration's unfinished run, or begin the next one.

    The pre-flight checks come first, so a configuration that cannot work leaves no folder behind.

    Raises:
        RunStateError: the unfinished run is being trained by a live supervisor, or it was halted.
        DflashError: a pre-flight check failed: devices, target, inputs, memory or disk.
    """
    from dflash.train.doctor import require_ready  # the checks import torch, which no other use of a run's folder needs

    require_ready(config)
    root = Path(config.run.root)
    numbered = _numbered_runs(root, config.run.name)
    text = dump_config(config)
    if numbered:
        newest = RunPaths(numbered[max(numbered)])
        if not newest.summary.exists() and _trains_the_same(newest, config):
            if run_is_live(newest):
                raise RunStateError(
                    f"run {newest.root} is being trained right now",
                    remedy="wait for it, stop it, or use another run.name",
                )
            _refuse_halted(newest)
            return Run(paths=newest, config=config, resumed=newest.log.exists())
    paths = RunPaths(root / f"{config.run.name}-{max(numbered, default=0) + 1:03d}")
    paths.root.mkdir(parents=True)
    atomic_write_text(paths.config, text)
    return Run(paths=paths, config=config, resumed=False)


def reopen_run(run_dir: str | Path, *, overrides: Sequence[str] = ()) -> Run:
    """Open an existing run's folder with the configuration it was made from, and dotted overrides for this call alone.

    Raises:
        RunStateError: the folder is not a run.
    """
    paths = RunPaths(Path(run_dir))
    if not paths.config.is_file():
        raise RunStateError(f"{paths.root} is not a run: it has no config.yaml", remedy="give a folder such as runs/demo-001")
    return Run(paths=paths, config=load_config(paths.config, overrides=overrides), resumed=True)


def newest_run(config: Config) -> str | None:
    """Folder name of the configuration's newest run, which a new start would continue; None before the first."""
    numbered = _numbered_runs(Path(config.run.root), config.run.name)
    return numbered[max(numbered)].name if numbered else None


def list_runs(root: str | Path) -> list[Path]:
    """Folders of all runs under `root`, by name."""
    return sorted(path.parent for path in Path(root).glob("*/config.yaml"))


def _trains_the_same(paths: RunPaths, config: Config) -> bool:
    """Whether a run's configuration decides the same numbers; what only observes (health, evaluation) may differ."""
    try:
        return training_hash(load_config(paths.config)) == training_hash(config)
    except ConfigError as error:
        logger.warning("%s is left alone: %s", paths.root, error.what)
        return False


def _refuse_halted(paths: RunPaths) -> None:
    request = halted_by(paths)
    if request is not None:
        # A decision stands in the ledger as well, so without its request the run would be halted all the same.
        removal = f", or remove {paths.requests_dir / request.key}.json to continue this run all the same"
        raise RunStateError(
            f"run {paths.root} was halted by {request.requested_by}: {request.reason}",
            remedy=f"read {paths.health_dir / 'report.html'}; begin anew under another run.name"
            f"{removal if request.plan is None else ''}",
        )


def note_reused(paths: RunPaths, what: str) -> None:
    """Remember that a stage found its result unchanged; the closing table says so."""
    known = read_reused(paths)
    if what not in known:
        atomic_write_text(paths.reused, json.dumps([*known, what]) + "\n")


def read_reused(paths: RunPaths) -> list[str]:
    """What stages of this run found unchanged."""
    return [str(what) for what in json.loads(paths.reused.read_text(encoding="utf-8"))] if paths.reused.is_file() else []


def _numbered_runs(root: Path, name: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(name)}-(\d{{3,}})$")
    matches = ((pattern.fullmatch(path.name), path) for path in root.glob(f"{name}-*") if path.is_dir())
    return {int(match.group(1)): path for match, path in matches if match}
