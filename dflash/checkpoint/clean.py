"""When a checkpoint is clean: a pure proposal of ledger transitions.

Invariant: too young is unknown (it stays in probation), never clean; a checkpoint is clean only if its files verify,
its weights and moments are finite, no critical training finding touches the window before it, none begins in the soak
after it, the log covers that span, and its acceptance probe (where one is due) is there and not far below the best clean one
before it. At the end of a run full verification stands in for the rest of the soak.
Step arithmetic: `step-N` is the state after records 0..N-1; its window is [N - window, N - 1], its soak
[N, N + soak - 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash.checkpoint.probes import ProbeView
from dflash.config import CheckpointConfig
from dflash.records import CheckpointState, LedgerEntry

Span = tuple[int, int]
"""First (onset) and last record step of a critical training finding."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the run's log says.

    Attributes:
        critical_spans: (onset, last step) of every critical finding of the training domain.
        judged_records: records 0..judged_records-1 have been judged by the health check.
        coverage_frac: of a half-open record range [first, end): share that has a live record.
        min_coverage_frac: share needed to call a checkpoint clean.
        ended: the run is over, no further record will come.
        probes: outcomes of the acceptance probes; nothing where there are none.

    """

    critical_spans: Sequence[Span]
    judged_records: int
    coverage_frac: Callable[[int, int], float]
    min_coverage_frac: float
    ended: bool
    probes: ProbeView = field(default_factory=ProbeView)


@dataclass(frozen=True, slots=True)
class Transition:
    """One proposed transition of the ledger."""

    step: int
    segment: int
    state: CheckpointState
    reason: str


def propose_transitions(
    current: Mapping[int, LedgerEntry],
    *,
    evidence: Evidence,
    rule: CheckpointConfig,
    problem_of: Callable[[int], str | None],
) -> list[Transition]:
    """Judge every checkpoint in probation, and the clean ones again.

    Args:
        current: last ledger entry of every step.
        evidence: what the log says.
        rule: window and soak.
        problem_of: verifies the files of a step and returns what is wrong (damaged, not finite), or None;
            called only for checkpoints that are otherwise about to become clean.

    Returns:
        Proposals in ascending order of steps; checkpoints that stay what they are do not appear.
    """
    proposals = []
    best_clean = 0.0
    for step, entry in sorted(current.items()):
        if entry.state not in ("probation", "clean"):
            continue
        verdict = _verdict(entry, evidence, rule, problem_of)
        if verdict is not None and verdict[0] == "clean":
            verdict = _with_probe(entry, evidence.probes, best_clean=best_clean, reason=verdict[1])
        if verdict is not None:
            proposals.append(Transition(step=step, segment=entry.segment, state=verdict[0], reason=verdict[1]))
        if (entry.state if verdict is None else verdict[0]) == "clean":
            best_clean = max(best_clean, evidence.probes.lengths.get((step, entry.segment), 0.0))
    return proposals


def _verdict(
    entry: LedgerEntry, evidence: Evidence, rule: CheckpointConfig, problem_of: Callable[[int], str | None]
) -> tuple[CheckpointState, str] | None:
    step = entry.step
    first, end = max(0, step - rule.window_steps), step + rule.soak_steps
    if step > 0:
        touching = [span for span in evidence.critical_spans if span[0] < end and span[1] >= first]
        if touching:
            onset, last = touching[0]
            return "suspect", f"critical training finding in records {onset}..{last}, inside [{first}, {end})"
    if entry.state == "clean":
        return None
    if step > 0:
        judged_end = min(end, evidence.judged_records)
        if judged_end < end and not evidence.ended:
            return None
        covered = evidence.coverage_frac(first, judged_end)
        if covered < evidence.min_coverage_frac or judged_end < step:
            return None
        if (step, entry.segment) in evidence.probes.awaited:
            return None
    problem = problem_of(step)
    if problem is not None:
        return "bad", problem
    if step == 0:
        return "clean", "the untrained drafter is clean by definition"
    shown = "the run ended" if end > evidence.judged_records else "soak passed"
    return "clean", f"verified; no critical training finding in records [{first}, {judged_end}); {shown}"


def _with_probe(entry: LedgerEntry, probes: ProbeView, *, best_clean: float, reason: str) -> tuple[CheckpointState, str]:
    """The verdict on a checkpoint that is clean by everything but its probe.

    Args:
        entry: its last ledger entry.
        probes: outcomes of all probes.
        best_clean: highest acceptance length of a clean checkpoint before it; 0 without any.
        reason: of the verdict so far.
    """
    key = (entry.step, entry.segment)
    length = probes.lengths.get(key)
    if length is None:
        return "clean", f"{reason}; no probe ({probes.given_up[key]})" if key in probes.given_up else reason
    if length < probes.min_frac * best_clean:
        return "suspect", f"acceptance length {length:.3f} of its probe, under {probes.min_frac:g} of {best_clean:.3f} before it"
    return "clean", f"{reason}; acceptance length {length:.3f}"
