"""Evaluations of several prompts at once, greedy and sampled: the same results whatever the batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import MASK_ID, make_drafter, make_target, prompts

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError
from dflash.evaluate.candidates import Candidate, drafter_candidate, lookup_candidate
from dflash.evaluate.contest import DecodeSettings, run_contests
from dflash.evaluate.decode import DecodeLimits, plain_decode_batch
from dflash.evaluate.lossless import NearTie, explain_difference
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.proposers import OracleProposer
from dflash.evaluate.run import Evaluation, evaluate_candidates, evaluate_drafter
from dflash.model.sampling import Sampling
from dflash.model.target import Target

torch.set_num_threads(1)
TARGETS: dict[str, Target] = {}
LIMITS = DecodeLimits(16, frozenset())


def shared(family: str) -> Target:
    return TARGETS.setdefault(family, make_target(family))


def questions(count: int) -> list[EvalPrompt]:
    return [EvalPrompt(f"q{i}", "kind", "toys", tuple(ids), f"{i:064d}", {}) for i, ids in enumerate(prompts(count))]


def settings(**changes: float) -> EvaluateConfig:
    return EvaluateConfig(**{"max_new_tokens": 16, "bootstrap_samples": 100, **changes})


def quiet(_label: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def evaluated(
    family: str, *, batch_size: int, temperature: float, count: int = 9, tokens: int = 16
) -> tuple[Evaluation, ...]:  # fmt: skip
    target = shared(family)
    drafter = drafter_candidate(target, make_drafter(), block_size=None, mask_token_id=MASK_ID, label="untrained", step=0)
    config = settings(batch_size=batch_size, temperature=temperature, max_new_tokens=tokens)
    candidates = [drafter, lookup_candidate(target, block_size=6)]
    return evaluate_candidates(target, candidates, questions(count), evaluate=config, stop_ids=(5, 9), progress=quiet)


@pytest.mark.parametrize(
    ("family", "temperature", "tokens"),
    [
        ("qwen3", 0.0, 16),
        ("qwen3", 0.8, 16),
        # What is decoded together on the other families is checked trace by trace in test_decode_batch.
        pytest.param("qwen3_5_hybrid", 0.8, 8, marks=pytest.mark.full),
        pytest.param("gemma3_sliding", 0.8, 16, marks=pytest.mark.full),
    ],
)
def test_batch_eight_gives_what_batch_one_gives(family: str, temperature: float, tokens: int) -> None:
    alone, together = (evaluated(family, batch_size=size, temperature=temperature, tokens=tokens) for size in (1, 8))
    for one, many in zip(alone, together, strict=True):
        assert one.result.lossless and many.result.lossless
        assert (one.result.batch_size, many.result.batch_size) == (1, 8)
        assert one.result.temperature == many.result.temperature == temperature
        # Near-ties aside, of which these targets have none: every verification of every prompt.
        assert one.result.differing_prompts == many.result.differing_prompts == 0
        for name in ("prompt", "context_tokens", "drafted", "accepted", "counted"):
            assert np.array_equal(getattr(one.table, name), getattr(many.table, name))
        assert one.result.acceptance_ci == many.result.acceptance_ci
        answers = [[contest.plain.tokens for contest in each.contests] for each in (one, many)]
        assert answers[0] == answers[1]


def test_samples_are_others_than_the_greedy_answers_and_others_for_every_prompt_and_seed() -> None:
    target = shared("qwen3")
    (same,) = {question.prompt_ids for question in questions(1)}

    def answers(seed: int) -> list[tuple[int, ...]]:
        sampling = Sampling(temperature=1.0, seed=seed)
        traces = plain_decode_batch(target, [same, same], keys=["a", "b"], limits=LIMITS, sampling=sampling)
        return [trace.tokens for trace in traces]

    assert len({*answers(0), *answers(1)}) == 4
    assert answers(0) == answers(0)


def test_everybody_decodes_the_same_batches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[str, ...]]] = []
    for name in ("plain_decode_batch", "speculative_decode_batch"):
        real = getattr(__import__("dflash.evaluate.contest", fromlist=[name]), name)

        def noted(*args: object, name: str = name, real: object = real, **kwargs: object) -> object:
            calls.append((name.partition("_")[0], tuple(kwargs["keys"])))  # type: ignore[arg-type]
            return real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(f"dflash.evaluate.contest.{name}", noted)
    seen: list[tuple[int, int]] = []
    target = shared("qwen3")
    monkeypatch.setattr("dflash.evaluate.contest.TURN_BATCHES", 1)
    decoding = DecodeSettings(LIMITS, Sampling(0.0, 0), batch_size=2)
    contests = run_contests(
        target, [lookup_candidate(target, block_size=3)], questions(5), settings=decoding,
        progress=lambda _label, done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [contest.prompt.id for contest in contests] == ["q0", "q1", "q2", "q3", "q4"]
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert calls[2:] == [
        ("speculative", ("q0", "q1")), ("plain", ("q0", "q1")),
        ("plain", ("q2", "q3")), ("speculative", ("q2", "q3")),
        ("speculative", ("q4",)), ("plain", ("q4",)),
    ]  # fmt: skip


def test_the_seconds_of_a_batch_are_shared_out_among_its_rows() -> None:
    (evaluation, _) = evaluated("qwen3", batch_size=4, temperature=0.0, count=4)
    result = evaluation.result
    tokens = sum(len(contest.plain.tokens) - 1 for contest in evaluation.contests)
    assert result.plain_s_per_token == pytest.approx(sum(contest.plain.decode_s for contest in evaluation.contests) / tokens)
    assert result.target_frac + result.drafter_frac + result.other_frac == pytest.approx(1.0)
    assert 0 < result.drafter_frac < 1 and 0 < result.other_frac < 1
    low, high = result.speedup_ci
    assert low <= result.speedup <= high


def test_ids_that_stand_twice_are_refused_because_samples_are_keyed_by_them() -> None:
    target = shared("qwen3")
    twice = [*questions(2), *questions(1)]
    with pytest.raises(EvaluationError, match="two evaluation prompts have the id 'q0'"):
        evaluate_drafter(target, lookup_candidate(target, block_size=4), twice, evaluate=settings(), stop_ids=(), progress=quiet)


def test_a_drafter_of_known_acceptance_is_measured_as_what_it_is() -> None:
    """Every draft is right with chance 0.7, independently: blocks of 6 commit (1 - 0.7^6) / 0.3 tokens on average."""
    target, asked = shared("qwen3"), questions(16)  # 40 tokens each: some 230 verifications
    sampling = Sampling(temperature=1.0, seed=11)
    config = settings(max_new_tokens=40, batch_size=16, temperature=1.0, seed=11, bootstrap_samples=500)
    keys = [question.id for question in asked]
    traces = plain_decode_batch(
        target, [q.prompt_ids for q in asked], keys=keys, limits=DecodeLimits(48, frozenset()), sampling=sampling
    )
    oracle = OracleProposer(
        target, {key: trace.tokens for key, trace in zip(keys, traces, strict=True)},
        {question.id: len(question.prompt_ids) for question in asked}, max_drafts=5, right_frac=0.7, seed=3,
    )  # fmt: skip
    result = evaluate_drafter(target, Candidate("oracle", None, oracle), asked, evaluate=config, stop_ids=(), progress=quiet).result
    assert result.lossless
    # Untruncated, the law has no edge at the answer's end; the interval is that of the counted figure beside it.
    half_width = (result.acceptance_ci[1] - result.acceptance_ci[0]) / 2
    assert result.acceptance_length_untruncated == pytest.approx((1 - 0.7**6) / 0.3, abs=half_width)
    for taken, reached in zip(result.accepted_per_position, result.reached_per_position, strict=True):
        assert taken / reached == pytest.approx(0.7, abs=3 * (0.21 / reached) ** 0.5)


def test_a_sampled_token_is_excused_only_if_its_random_number_was_at_the_border() -> None:
    target = shared("qwen3")
    (prompt,) = prompts(1)
    sampling = Sampling(temperature=0.9, seed=2)
    (plain,) = plain_decode_batch(target, [prompt], keys=["row"], limits=LIMITS, sampling=sampling)
    tokens = (*plain.tokens[:-1], (plain.tokens[-1] + 1) % 61)

    def judged(factor: float) -> NearTie:
        return explain_difference(
            target, prompt, answers=(plain.tokens, tokens), limits=LIMITS, sampling=sampling, key="row", block_size=5,
            near_tie_factor=factor,
        )  # fmt: skip

    refused = judged(4.0)
    assert refused.position == 15 and not refused.excused
    assert 0 < refused.rounding < 1e-3 < refused.margin <= 1.0
    assert judged(1.01 * refused.margin / refused.rounding).excused
