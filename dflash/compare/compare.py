"""The comparison itself: pure, from views of runs to everything that is shown. The first run is the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash.compare.contest import MIN_PAIRS, Difference, by_kind, differences, interval, pooled
from dflash.compare.curves import loss_in
from dflash.compare.view import WEIGHTS, RunView
from dflash.errors import EvaluationError

END_FRAC = 0.1
"""Share of the common tokens, at their end, over which losses are averaged."""
SEED = 20_260
# Settings that name a run or only watch it: never a reason for a difference. The seed is one, so it is shown.
_UNINTERESTING = (
    "run.name", "run.root", "tracking.", "health.", "rollback.", "checkpoint.", "probe.", "drill.", "evaluate.num_prompts",
)  # fmt: skip
# Facts of an evaluation that must agree for acceptance lengths to mean the same.
_CONDITIONS = ("dataset", "block_size", "temperature", "template_flags")


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """Acceptance lengths of one kind of prompts: by run (length, low, high), None where there is none; one prompt has no ends."""

    kind: str
    cells: tuple[tuple[float, float | None, float | None] | None, ...]


@dataclass(frozen=True, slots=True)
class LossRow:
    """Mean cross-entropy at the end of the common tokens, by run; NaN where a run has none."""

    bucket: str
    cells: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more runs, the first being the reference.

    Attributes:
        verdicts: one sentence for each other run.
        contests: for each other run, its differences in acceptance (`all` first; empty without evaluations).
        acceptance, losses: tables.
        common_tokens: tokens that every run has seen: losses are compared up to there.
        settings, data: what differs, name -> value of each run.
        history: for each run, what happened to it, a line each.
        warnings: why a figure may not mean what it seems to.
    """

    runs: tuple[RunView, ...]
    verdicts: tuple[str, ...]
    contests: tuple[tuple[Difference, ...], ...]
    acceptance: tuple[AcceptanceRow, ...]
    losses: tuple[LossRow, ...]
    common_tokens: int
    settings: Mapping[str, tuple[str, ...]]
    data: Mapping[str, tuple[str, ...]]
    history: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]


def compare_runs(runs: Sequence[RunView]) -> Comparison:
    """Compare runs with the first of them.

    Raises:
        EvaluationError: fewer than two runs, or one of them twice.
    """
    names = [run.name for run in runs]
    if len(runs) < 2:
        raise EvaluationError("a comparison needs two runs", remedy="python -m dflash compare RUN_A RUN_B")
    if len(set(names)) < len(names):
        raise EvaluationError(f"a run is named twice: {', '.join(names)}", remedy="give folders of different runs")
    contests = tuple(_contest(runs[0], other) for other in runs[1:])
    common = min(float(run.curves.tokens[-1]) for run in runs)
    return Comparison(
        runs=tuple(runs),
        verdicts=tuple(_verdict(runs[0], other, contest) for other, contest in zip(runs[1:], contests, strict=True)),
        contests=contests,
        acceptance=_acceptance(runs),
        losses=_losses(runs, common),
        common_tokens=int(common),
        settings=_differing([run.settings for run in runs], skip=_UNINTERESTING),
        data=_differing([run.data for run in runs], skip=()),
        history=tuple(_history(run) for run in runs),
        warnings=tuple(_warnings(runs)),
    )


def _contest(reference: RunView, other: RunView) -> tuple[Difference, ...]:
    a, b = reference.evaluation, other.evaluation
    if a is None or b is None:
        return ()
    return differences(a.scores, b.scores, confidence=a.result.confidence, seed=SEED)


def _verdict(reference: RunView, other: RunView, contest: Sequence[Difference]) -> str:
    if not contest:
        return f"{other.name} cannot be judged against {reference.name}: acceptance was not evaluated for both."
    whole = contest[0]
    prompts = (
        f"the same {whole.prompts} prompts" if whole.paired else f"prompts that are not the same ({whole.prompts} or more each)"
    )
    figures = (
        f"acceptance length {whole.other:.2f} against {whole.reference:.2f}, difference {whole.difference:+.2f} "
        f"{whole.interval_words} at {whole.confidence:.0%} over {prompts}"
    )
    match whole.word:
        case "no difference":
            turns = "" if whole.apart == whole.prompts else f"{whole.apart} of them independent; "
            few = f" ({turns}fewer than {MIN_PAIRS} decide nothing)" if whole.apart < MIN_PAIRS else ""
            return f"No difference shown between {other.name} and {reference.name}: {figures}{few}."
        case word:
            return f"{other.name} is {word} than {reference.name}: {figures}."


def _acceptance(runs: Sequence[RunView]) -> tuple[AcceptanceRow, ...]:
    grouped = [{} if run.evaluation is None else by_kind(run.evaluation.scores) for run in runs]
    kinds = sorted({kind for groups in grouped for kind in groups})
    rows = [AcceptanceRow("all", tuple(_cell(run, None) for run in runs))] if kinds else []
    if len(kinds) > 1:
        rows += [AcceptanceRow(kind, tuple(_cell(run, kind) for run in runs)) for kind in kinds]
    return tuple(rows)


def _cell(run: RunView, kind: str | None) -> tuple[float, float | None, float | None] | None:
    scores = [] if run.evaluation is None else [s for s in run.evaluation.scores if kind in (None, s.kind) and s.verifications]
    if run.evaluation is None or not scores:
        return None
    low, high = interval(scores, confidence=run.evaluation.result.confidence, seed=SEED) or (None, None)
    return pooled(scores), low, high


def _losses(runs: Sequence[RunView], common: float) -> tuple[LossRow, ...]:
    buckets = sorted({bucket for run in runs for bucket in run.curves.bucket_sum})
    window = {"from_tokens": (1 - END_FRAC) * common, "to_tokens": common}
    rows = [LossRow("all", tuple(loss_in(run.curves, bucket=None, **window) for run in runs))]
    return (*rows, *(LossRow(str(b), tuple(loss_in(run.curves, bucket=b, **window) for run in runs)) for b in buckets))


def _differing(facts: Sequence[Mapping[str, str]], *, skip: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for each in facts for name in each)
    rows = {name: tuple(each.get(name, "-") for each in facts) for name in names if not (skip and name.startswith(skip))}
    return {name: cells for name, cells in rows.items() if len(set(cells)) > 1}


def _history(run: RunView) -> tuple[str, ...]:
    lines = [
        f"segment {part.segment}: steps {part.first_step} to {part.last_step}"
        + ("" if part.live == part.last_step - part.first_step + 1 else f", of which {part.live} still count")
        for part in run.curves.segments
    ]
    for entry in run.rollbacks:
        plan = entry.plan
        if entry.phase == "end":
            skipped = f", without batches {', '.join(f'{a}-{b - 1}' for a, b in plan.skip)}" if plan.skip else ""
            lines.append(
                f"rolled back from step {plan.alarm_step} to step {entry.target_step} (rung {plan.rung}){skipped}: {plan.reason}"
            )
        elif entry.phase == "halt":
            lines.append(f"halted at step {plan.alarm_step}: {plan.reason}")
    return tuple(lines)


def _warnings(runs: Sequence[RunView]) -> list[str]:
    found = [f"{run.name}: {note}" for run in runs for note in run.notes]
    evaluated = [run for run in runs if run.evaluation is not None]
    for condition in _CONDITIONS:
        values = {run.name: getattr(run.evaluation.result, condition) for run in evaluated if run.evaluation is not None}
        if len({str(value) for value in values.values()}) > 1:
            each = ", ".join(f"{name}: {value}" for name, value in values.items())
            found.append(f"acceptance was measured under different conditions: {condition.replace('_', ' ')} ({each})")
    known = [run for run in evaluated if WEIGHTS in run.data]
    if len({run.data[WEIGHTS] for run in known}) > 1:
        each = ", ".join(f"{run.name}: {run.data['target']} {run.data[WEIGHTS]}" for run in known)
        found.append(f"the runs have different targets ({each}): acceptance lengths do not say whose drafter is better")
    lossy = [run.name for run in evaluated if run.evaluation is not None and run.evaluation.result.lossless is False]
    found += [f"{name}: decoding was not lossless, its acceptance means nothing" for name in lossy]
    steps = [len(run.curves.loss) for run in runs]
    if np.ptp([run.curves.tokens[-1] for run in runs]) > 0.05 * max(run.curves.tokens[-1] for run in runs):
        seen = ", ".join(f"{run.name} {run.curves.tokens[-1]:,.0f} in {n:,} steps" for run, n in zip(runs, steps, strict=True))
        found.append(f"the runs have seen different numbers of tokens: {seen}")
    return found
