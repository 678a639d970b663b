"""Evaluation of drafters on held-out prompts: decode in alternation, prove losslessness, measure.

Invariant: a result is only as good as its proof, so the state test (with its negative controls) and the token comparison run
in every evaluation, and `lossless` is their conjunction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError, NotLosslessError
from dflash.evaluate.bootstrap import IntArray, resample_groups
from dflash.evaluate.candidates import Candidate
from dflash.evaluate.contest import Contest, DecodeSettings, Progress, run_contests
from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace
from dflash.evaluate.lossless import NearTie, explain_difference
from dflash.evaluate.metrics import VerificationTable, acceptance_metrics, survival_untruncated, verification_table
from dflash.evaluate.prompts import EvalPrompt, drawn_together, repeated_prompts, require_room
from dflash.evaluate.result_slices import prompt_set_entries, slices_of
from dflash.evaluate.slices import alarms, bigram_accuracy
from dflash.evaluate.state_proof import StateProof, prove_state
from dflash.evaluate.timing import Timing, measure_timing
from dflash.model.sampling import Sampling
from dflash.model.target import Target
from dflash.records import EvaluationResult


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One candidate's evaluation: the record, and what it was computed from.

    Attributes:
        table: one row a verification.
        contests: what every prompt gave; `position` is the candidate's place in them.
        near_ties: by prompt index, for answers that differ from plain decoding.
        timing: None if no answer has a second token.
    """

    result: EvaluationResult
    table: VerificationTable
    contests: tuple[Contest, ...]
    position: int
    near_ties: dict[int, NearTie]
    state: StateProof
    timing: Timing | None


@dataclass(frozen=True, slots=True)
class _Session:
    """What all candidates of one call share."""

    target: Target
    evaluate: EvaluateConfig
    decoding: DecodeSettings
    state: StateProof
    contests: tuple[Contest, ...]
    counts: IntArray


def evaluate_drafter(
    target: Target,
    candidate: Candidate,
    prompts: Sequence[EvalPrompt],
    *,
    evaluate: EvaluateConfig,
    stop_ids: Collection[int],
    progress: Progress,
) -> Evaluation:
    """Evaluate one candidate against plain decoding; see `evaluate_candidates`."""
    return evaluate_candidates(target, [candidate], prompts, evaluate=evaluate, stop_ids=stop_ids, progress=progress)[0]


def evaluate_candidates(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[EvalPrompt],
    *,
    evaluate: EvaluateConfig,
    stop_ids: Collection[int],
    progress: Progress,
) -> tuple[Evaluation, ...]:
    """Evaluate several candidates and plain decoding on the same prompts in one alternating run.

    Args:
        target: frozen target.
        candidates: what is compared, at least one.
        prompts: held-out prompts of one or several sets, with ids of their own.
        evaluate: limits, batch size, temperature, near-tie factor, bootstrap.
        stop_ids: tokens that end an answer.
        progress: called with (label, done, total).

    Returns:
        One evaluation a candidate, in their order.

    Raises:
        EvaluationError: no prompts, or one that is too long for the target.
        TargetError: several prompts at once on a target whose rows cannot be rolled back on their own.
    """
    block_size = max(candidate.proposer.max_drafts for candidate in candidates) + 1
    _check_prompts(target, prompts, evaluate, block_size)
    limits = DecodeLimits(evaluate.max_new_tokens, frozenset(stop_ids))
    decoding = DecodeSettings(limits, Sampling(evaluate.temperature, evaluate.seed), evaluate.batch_size)
    state = prove_state(target, _proof_prompts(prompts, evaluate.batch_size), block_size=block_size, seed=evaluate.seed)
    contests = tuple(run_contests(target, candidates, prompts, settings=decoding, progress=progress))
    counts = resample_groups(drawn_together(prompts), samples=evaluate.bootstrap_samples, seed=evaluate.seed)
    session = _Session(target, evaluate, decoding, state, contests, counts)
    return tuple(_evaluated(session, candidate, position) for position, candidate in enumerate(candidates))


def require_lossless(result: EvaluationResult) -> None:
    """Refuse a result whose speculative decoding is not the target's own.

    Raises:
        NotLosslessError: with what was found.
    """
    if result.lossless is False:
        reasons = [warning for warning in result.warnings if warning.startswith("not lossless")]
        raise NotLosslessError(
            f"{result.drafter}: {'; '.join(reasons)}",
            remedy="do not use the figures; check that this target's cache can be rolled back with the installed transformers",
        )


def _evaluated(session: _Session, candidate: Candidate, position: int) -> Evaluation:
    traces = [contest.speculative[position] for contest in session.contests]
    table = _table(traces)
    if not len(table):
        raise EvaluationError(
            "every answer ended with its first token: nothing was verified",
            remedy="raise evaluate.max_new_tokens, or check the chat template: the target has nothing to say to these prompts",
        )
    near_ties = {
        index: explain_difference(
            session.target,
            contest.prompt.prompt_ids,
            answers=(contest.plain.tokens, trace.tokens),
            limits=session.decoding.limits,
            sampling=session.decoding.sampling,
            key=contest.prompt.id,
            block_size=candidate.proposer.max_drafts + 1,
            near_tie_factor=session.evaluate.near_tie_factor,
        )
        for index, (contest, trace) in enumerate(zip(session.contests, traces, strict=True))
        if contest.plain.tokens != trace.tokens
    }
    plain = [contest.plain for contest in session.contests]
    timing = measure_timing(plain, traces, counts=session.counts, confidence=session.evaluate.confidence)
    result = _result(session, candidate, position, table, near_ties, timing)
    return Evaluation(result, table, session.contests, position, near_ties, session.state, timing)


def _result(
    session: _Session,
    candidate: Candidate,
    position: int,
    table: VerificationTable,
    near_ties: dict[int, NearTie],
    timing: Timing | None,
) -> EvaluationResult:
    contests, counts, confidence = session.contests, session.counts, session.evaluate.confidence
    positions = candidate.proposer.max_drafts
    datasets = [contest.prompt.dataset for contest in contests]
    figures = acceptance_metrics(table, prompts=len(contests), positions=positions, counts=counts, confidence=confidence)
    bigram = bigram_accuracy([contest.plain.tokens for contest in contests])
    faults = _faults(contests, near_ties, session.state)
    found = alarms(
        table, prompts=len(contests), counts=counts, confidence=confidence, bigram_level=bigram, datasets=datasets
    )  # fmt: skip
    slices = slices_of(
        table, contests, candidate=position, positions=positions, counts=counts, confidence=confidence, differing=near_ties
    )
    return EvaluationResult(
        drafter=candidate.label,
        step=candidate.step,
        dataset="+".join(dict.fromkeys(datasets)),
        prompts=len(contests),
        block_size=positions + 1,
        temperature=session.evaluate.temperature,
        template_flags=contests[0].prompt.template_flags,
        **asdict(figures),
        confidence=confidence,
        survival_untruncated_per_position=survival_untruncated(table, positions=positions),
        slices=slices,
        plain_s_per_token=None if timing is None else timing.plain_s_per_token,
        speculative_s_per_token=None if timing is None else timing.speculative_s_per_token,
        speedup=None if timing is None else timing.speedup,
        speedup_ci=None if timing is None else timing.speedup_ci,
        target_frac=None if timing is None else timing.target_frac,
        drafter_frac=None if timing is None else timing.drafter_frac,
        other_frac=None if timing is None else timing.other_frac,
        lossless=not faults,
        differing_prompts=len(near_ties),
        near_tie_prompts=sum(near_tie.excused for near_tie in near_ties.values()),
        divergence_frac=len(near_ties) / len(contests),
        warnings=(*faults, *found, *repeated_prompts([contest.prompt for contest in contests])),
        batch_size=session.evaluate.batch_size,
        prompt_sets=prompt_set_entries([contest.prompt for contest in contests]),
    )


def _proof_prompts(prompts: Sequence[EvalPrompt], batch_size: int) -> list[tuple[int, ...]]:
    """What the state test runs on: the longest prompt, and where rows are decoded together a shorter one beside it."""
    by_length = sorted((prompt.prompt_ids for prompt in prompts), key=len)
    return [by_length[-1]] if batch_size == 1 or len(prompts) == 1 else [by_length[-1], by_length[0]]


def _table(traces: Sequence[SpeculativeTrace]) -> VerificationTable:
    return verification_table(
        (index, step.context_tokens, step.drafted, step.accepted, step.counted)
        for index, trace in enumerate(traces)
        for step in trace.verifications
    )


def _faults(contests: Sequence[Contest], near_ties: dict[int, NearTie], state: StateProof) -> list[str]:
    """What speaks against losslessness, one sentence each."""
    faults = []
    wrong = [index for index, near_tie in near_ties.items() if not near_tie.excused]
    if wrong:
        worst = near_ties[wrong[0]]
        faults.append(
            f"not lossless: {len(wrong)} of {len(contests)} answers differ from plain decoding and are no near-ties, first "
            f"{contests[wrong[0]].prompt.id!r} at token {worst.position} (margin {worst.margin:.3g}, rounding {worst.rounding:.3g})"
        )
    if not state.holds:
        blind = f"; broken rollbacks that it did not notice: {', '.join(state.blind_controls)}" if state.blind_controls else ""
        faults.append(f"not lossless: the rolled-back cache differs from a fresh one by {state.relative:.3g}{blind}")
    return faults


def _check_prompts(target: Target, prompts: Sequence[EvalPrompt], evaluate: EvaluateConfig, block_size: int) -> None:
    if not prompts:
        raise EvaluationError("there are no evaluation prompts", remedy="set evaluate.num_prompts or evaluate.files")
    twice = next((name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1), None)
    if twice is not None:
        raise EvaluationError(
            f"two evaluation prompts have the id {twice!r}: samples are keyed by it", remedy="give every prompt an id of its own"
        )
    require_room(
        prompts,
        positions=target.info.max_position_embeddings,
        new_tokens=evaluate.max_new_tokens,
        block_size=block_size,
        key="evaluate.max_new_tokens",
    )
