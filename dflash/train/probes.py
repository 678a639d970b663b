"""The supervisor's view of acceptance probes: what is due, what is known, and what the last verdicts wait for.

Invariant: everything is read from files; who writes them, and whether anyone does, cannot slow or end the training.
"""

from __future__ import annotations

from dflash.checkpoint import ProbeFile, ProbeView, list_checkpoints, probe_is_due, probe_view, read_state
from dflash.config import Config
from dflash.data.plan_file import read_plan_manifest
from dflash.errors import CheckpointError
from dflash.records import RunPaths
from dflash.train.book import CheckpointBook


class ProbeReader:
    """Reads the probes of one run as they come in.

    Args:
        paths: the run's folder.
        config: probes and save interval.
        book: the run's ledger.
    """

    def __init__(self, paths: RunPaths, config: Config, book: CheckpointBook) -> None:
        self._paths = paths
        self._probe = config.probe
        self._interval_steps = config.checkpoint.interval_steps
        self._book = book
        self._file = ProbeFile(paths.probes)

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything."""
        return bool(self._probe.every_steps) and self._file.poll()

    def view(self, *, ended: bool) -> ProbeView:
        """What the verdicts on the checkpoints in place have to know; at the end of the run the last one's probe is due too."""
        if not self._probe.every_steps:
            return ProbeView()
        steps = list_checkpoints(self._paths.checkpoints_dir)
        due = [step for step in steps if self._is_due(step) or (ended and step == steps[-1])]
        return probe_view(self._file.records, self._book.current, due=due, min_frac=self._probe.min_frac)

    def awaits(self) -> bool:
        """Whether a verdict at the end of the run still waits for a probe."""
        return bool(self.view(ended=True).awaited)

    def _is_due(self, step: int) -> bool:
        return probe_is_due(step, every_steps=self._probe.every_steps, interval_steps=self._interval_steps)


def due_steps(paths: RunPaths, config: Config) -> list[int]:
    """Checkpoints in place that are to be probed, whether or not they have been, ascending."""
    steps = list_checkpoints(paths.checkpoints_dir)
    every, interval = config.probe.every_steps, config.checkpoint.interval_steps
    due = [step for step in steps if probe_is_due(step, every_steps=every, interval_steps=interval)]
    if every and steps and steps[-1] not in due and steps[-1] > 0 and _is_last(paths, steps[-1]):
        due.append(steps[-1])
    return due


def _is_last(paths: RunPaths, step: int) -> bool:
    """Whether no step follows: the schedule or the plan is at its end."""
    try:
        state = read_state(paths.checkpoint(step))
    except CheckpointError:
        return False
    return state.step >= state.total_steps or state.plan_position >= read_plan_manifest(paths.plan_dir).batches
