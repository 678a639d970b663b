"""The supervisor's bookkeeping of checkpoints: ledger, verdicts, pointers, retention.

Invariant: the rename that names a folder `step-N` is the commit, and the ledger follows the folders: whatever a dead
supervisor did not note is noted by the next one. Nothing else writes the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from dflash.checkpoint import (
    BEST,
    LATEST_CLEAN,
    Evidence,
    Ledger,
    checkpoints_to_delete,
    list_checkpoints,
    newest_durable,
    point_to,
    propose_transitions,
    read_manifest,
    read_pointer,
    remove_aside,
    remove_checkpoint,
    verify_checkpoint,
)
from dflash.config import CheckpointConfig, RollbackConfig
from dflash.errors import CheckpointError
from dflash.records import CheckpointState, LedgerEntry, LedgerLine, RollbackEntry, RunPaths
from dflash.rollback import open_regions

logger = logging.getLogger(__name__)


class CheckpointBook:
    """Notes, judges and prunes the checkpoints of one run."""

    def __init__(self, paths: RunPaths, rule: CheckpointConfig, rollback: RollbackConfig) -> None:
        self._paths = paths
        self._rule = rule
        self._rollback = rollback
        self._ledger = Ledger(paths.ledger)
        self._judged: set[int] = set()

    @property
    def last_segment(self) -> int:
        """Highest segment of any noted checkpoint, -1 without any."""
        return max((entry.segment for entry in self._ledger.current.values()), default=-1)

    @property
    def current(self) -> Mapping[int, LedgerEntry]:
        """Last ledger entry of every step."""
        return self._ledger.current

    def reconsider(self) -> None:
        """Judge at the next look also what was judged already: something besides the log has become known."""
        self._judged.clear()

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """The whole ledger, in the order of writing."""
        return self._ledger.lines

    def reconcile(self) -> bool:
        """Note every complete folder that the ledger does not know yet; returns whether there was one."""
        changed = False
        for step in list_checkpoints(self._paths.checkpoints_dir):
            known = self._ledger.current.get(step)
            try:
                segment = read_manifest(self._paths.checkpoint(step)).segment
            except CheckpointError as error:
                if known is None or known.state != "bad":
                    self.note(step, self.last_segment if known is None else known.segment, "bad", error.what)
                continue
            if known is None or known.segment < segment:
                self.note(step, segment, "writing", "found on disk")
                known = self._ledger.current[step]
            if known.state == "writing":
                self.note(step, segment, "durable", "complete under its final name")
            if self._ledger.current[step].state == "durable":
                self.note(step, segment, "probation", "waits for its soak")
                self._judged.discard(step)
                changed = True
        return changed

    def newest_verified(self) -> int | None:
        """Newest checkpoint whose files all verify; damaged newer ones are marked bad with a warning."""
        self.reconcile()
        while (step := newest_durable(self._paths.checkpoints_dir, self._ledger.current)) is not None:
            problem = self.problem_of(step)
            if problem is None:
                return step
            logger.warning("checkpoint step-%d cannot be used, trying the one before it: %s", step, problem)
            self.note(step, self._ledger.current[step].segment, "bad", problem)
        return None

    def is_due(self, *, records: int) -> bool:
        """Whether a checkpoint's soak is over (with `records` logged) that was not judged since."""
        return any(
            entry.state == "probation" and step not in self._judged and self._soak_end(step) <= records
            for step, entry in self._ledger.current.items()
        )

    def judge(self, evidence: Evidence) -> None:
        """Apply the transitions that the evidence asks for, move `latest_clean`, delete what may go."""
        # Only what is noted and still there: the trainer may be adding folders at this moment.
        on_disk = list_checkpoints(self._paths.checkpoints_dir)
        current = {step: entry for step, entry in self._ledger.current.items() if step in on_disk}
        self._judged |= {step for step in current if self._soak_end(step) <= evidence.judged_records}
        for proposal in propose_transitions(current, evidence=evidence, rule=self._rule, problem_of=self.problem_of):
            self.note(proposal.step, proposal.segment, proposal.state, proposal.reason)
        clean = [step for step in current if self._ledger.current[step].state == "clean"]
        if clean:
            point_to(self._paths.checkpoints_dir, LATEST_CLEAN, max(clean))

    def prune(self, *, spare: Collection[int]) -> None:
        """Delete the checkpoints that retention lets go, all but those that somebody needs just now."""
        states = {step: entry.state for step, entry in self._ledger.current.items()}
        steps = list_checkpoints(self._paths.checkpoints_dir)
        best = read_pointer(self._paths.checkpoints_dir, BEST)
        doomed = checkpoints_to_delete(
            steps,
            states,
            keep_clean=self._rule.keep_clean,
            keep_other=self._rule.keep_other,
            pinned=() if best is None else (best,),
        )
        for step in doomed:
            if step not in spare:
                remove_checkpoint(self._paths.checkpoints_dir, step)

        if not open_regions(self._ledger.lines, region_steps=self._rollback.region_steps):
            remove_aside(self._paths.checkpoints_dir)

    def note_rollback(self, entry: RollbackEntry) -> None:
        """Append a line about a rollback to the ledger."""
        self._ledger.append_rollback(entry)

    def _soak_end(self, step: int) -> int:
        return step + self._rule.soak_steps if step > 0 else 0

    def problem_of(self, step: int) -> str | None:
        """What is wrong with the files or the numbers of a checkpoint; None if nothing is."""
        try:
            manifest = verify_checkpoint(self._paths.checkpoint(step))
        except CheckpointError as error:
            return error.what
        return None if manifest.finite else "weights or moments are not finite"

    def note(self, step: int, segment: int, state: CheckpointState, reason: str) -> None:
        """Append a transition to the ledger, with the time."""
        at = datetime.now(UTC).isoformat()
        self._ledger.append(LedgerEntry(step=step, segment=segment, state=state, at=at, reason=reason))
