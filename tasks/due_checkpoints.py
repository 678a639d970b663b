"""Events for durable checkpoints that wait for their probe: an automation on the server starts the flow `select` for each."""

from __future__ import annotations

import logging

from dflash.checkpoint import list_checkpoints, outcomes, read_probes
from dflash.errors import DflashError
from dflash.stages import Run
from dflash.stages.probe import checkpoint_key
from dflash.train.probes import due_steps
from tasks.events import due_event

logger = logging.getLogger(__name__)


class DueCheckpoints:
    """Called while a run is trained; each due checkpoint without an outcome is told once.

    Args:
        run: nothing is told where its configuration has no probes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: list[int] = []
        self._told: set[tuple[int, int]] = set()
        self._trouble = ""

    def tell(self) -> None:
        """Look at the folder of the checkpoints, and send what is new; what goes wrong here does not touch the training."""
        try:
            self._tell()
        except (OSError, DflashError) as error:
            if str(error) != self._trouble:
                logger.error("due checkpoints are not told, training goes on: %s", error)
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _tell(self) -> None:
        paths, config = self._run.paths, self._run.config
        steps = list_checkpoints(paths.checkpoints_dir) if config.probe.every_steps else []
        if steps == self._seen:
            return
        known = outcomes(read_probes(paths.probes))
        for step in due_steps(paths, config):
            key = checkpoint_key(paths, step)
            if key not in known and key not in self._told:
                due_event(paths, *key)
                self._told.add(key)
        self._seen = steps
