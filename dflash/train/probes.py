"""The supervisor's view of acceptance probes: what is due, what is known, and what the last verdicts wait for.

Invariant: everything is read from files; who writes them, and whether anyone does, cannot slow or end the training.
"""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoint import ProbeView, list_checkpoints, probe_is_due, probe_view, read_probes
from dflash.config import Config
from dflash.records import ProbeRecord, RunPaths
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
        self._records: list[ProbeRecord] = []
        self._size_bytes = 0

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything."""
        size_bytes = _size_of(self._paths.probes)
        if not self._probe.every_steps or size_bytes == self._size_bytes:
            return False
        self._size_bytes = size_bytes
        self._records = read_probes(self._paths.probes)
        return True

    def view(self, *, ended: bool) -> ProbeView:
        """What the verdicts on the checkpoints in place have to know; at the end of the run the last one's probe is due too."""
        if not self._probe.every_steps:
            return ProbeView()
        steps = list_checkpoints(self._paths.checkpoints_dir)
        due = [step for step in steps if self._is_due(step) or (ended and step == steps[-1])]
        return probe_view(self._records, self._book.current, due=due, min_frac=self._probe.min_frac)

    def awaits(self) -> bool:
        """Whether a verdict at the end of the run still waits for a probe."""
        return bool(self.view(ended=True).awaited)

    def _is_due(self, step: int) -> bool:
        return probe_is_due(step, every_steps=self._probe.every_steps, interval_steps=self._interval_steps)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
