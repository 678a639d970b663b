"""Why a checkpoint is, or is not, clean: the ledger and the log's evidence in sentences. Pure.

Invariant: nothing is judged anew here; the sentences say what the ledger's last transition rests on, and what is still
missing for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.config import CheckpointConfig
from dflash.records import CheckpointState, LedgerEntry, LedgerLine, RollbackEntry

MEANS: dict[CheckpointState, str] = {
    "writing": "its files are being written, or a crash stopped that",
    "durable": "its files are complete on disk, and nothing is known of the weights yet",
    "probation": "complete; too young to be called clean, which is not the same as suspect",
    "clean": "a run may return to it",
    "suspect": "the log shows damage around it: a run never returns to it",
    "bad": "its files do not verify or its weights are not finite: it is never read again",
}


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What the last health check knows.

    Attributes:
        last_record: newest judged record, -1 if there was no check.
        critical: (onset, last step, sentence) of every critical training finding.
        awaited_probes: (step, segment) of the checkpoints whose acceptance probe is due and has no outcome.
    """

    last_record: int
    critical: Sequence[tuple[int, int, str]]
    awaited_probes: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Explanation:
    """One checkpoint, its state, and sentences on it."""

    step: int
    state: CheckpointState
    lines: tuple[str, ...]


def why_states(
    ledger: Sequence[LedgerLine], *, evidence: LogEvidence, rule: CheckpointConfig, in_place: Sequence[int]
) -> list[Explanation]:
    """An explanation for every checkpoint of the ledger, and of those in place that it does not know, oldest first.

    Args:
        ledger: all its lines.
        evidence: of the last health check.
        rule: window and soak.
        in_place: steps whose folders are complete.
    """
    known: dict[int, list[LedgerEntry]] = {}
    for line in ledger:
        if isinstance(line, LedgerEntry):
            known.setdefault(line.step, []).append(line)
    explained = [_explained(step, entries, evidence, rule, in_place, ledger) for step, entries in known.items()]
    unknown = [
        Explanation(step, "durable", ("complete on disk, but the ledger does not know it: its supervisor died before noting it",))
        for step in in_place
        if step not in known
    ]
    return sorted([*explained, *unknown], key=lambda explanation: explanation.step)


def _explained(
    step: int,
    entries: Sequence[LedgerEntry],
    evidence: LogEvidence,
    rule: CheckpointConfig,
    in_place: Sequence[int],
    ledger: Sequence[LedgerLine],
) -> Explanation:
    state = entries[-1].state
    gone = step not in in_place
    lines = [f"{state}: {'it was found good' if gone and state == 'clean' else MEANS[state]}"]
    lines += [f"{entry.at} segment {entry.segment} {entry.state}: {entry.reason}" for entry in entries]
    if state in ("durable", "probation"):
        lines += _missing(step, entries[-1].segment, evidence, rule)
    lines += _touching(step, evidence, rule)
    if gone:
        lines.append("its folder is gone: removed by retention, or set aside by a rollback")
    lines += [text for line in ledger if isinstance(line, RollbackEntry) if (text := _rollback(step, line)) is not None]
    return Explanation(step, state, tuple(lines))


def _missing(step: int, segment: int, evidence: LogEvidence, rule: CheckpointConfig) -> list[str]:
    end = step + rule.soak_steps
    left = end - (evidence.last_record + 1)
    if left > 0:
        return [f"{left} more records must be judged (up to {end - 1}) before its soak of {rule.soak_steps} steps is over"]
    if (step, segment) in evidence.awaited_probes:
        return ["its soak is over, but its acceptance probe has no outcome yet: python -m dflash probe RUN, if no supervisor lives"]
    return ["its soak is over: the supervisor verifies its files and judges it at its next look"]


def _touching(step: int, evidence: LogEvidence, rule: CheckpointConfig) -> list[str]:
    first, end = max(0, step - rule.window_steps), step + rule.soak_steps
    touching = [found for found in evidence.critical if found[0] < end and found[1] >= first] if step else []
    if not touching:
        return []
    return [f"records {first} to {end - 1} decide; in them: {text} (since step {onset})" for onset, _, text in touching]


def _rollback(step: int, line: RollbackEntry) -> str | None:
    plan = line.plan
    skipped = sum(end - first for first, end in plan.skip)
    if line.phase == "begin" and plan.target_step == step:
        return f"a rollback (rung {plan.rung}) chose it, leaving out {skipped} batches: {plan.reason}"
    if line.phase == "end" and line.target_step == step:
        return f"segment {line.next_segment} went on from it"
    if line.phase == "end" and line.target_step is not None and line.target_step < step <= plan.alarm_step:
        return f"abandoned by the rollback to step-{line.target_step}: {plan.reason}"
    return None
