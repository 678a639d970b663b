"""The corners of speculative decoding: where blocks, stop tokens, limits and rows end in each other's middle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from families import VOCAB, drafting, make_drafter, make_target, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace, plain_decode, speculative_decode_batch
from dflash.evaluate.proposal import Proposer
from dflash.evaluate.proposers import LookupProposer, OracleProposer
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY, Sampling
from dflash.model.target import Target
from tests.support.amount import amount

torch.set_num_threads(1)
LONGEST = 16
QUESTIONS = [[7], [7, 7, 7], *prompts(3, seed=12, longest=9)]
FAMILIES = ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[tuple[int, ...]]:
    """Free plain answers, one forward a token: what everything below is cut from."""
    limits = DecodeLimits(LONGEST, frozenset())
    return [plain_decode(target, question, limits=limits).tokens for question in QUESTIONS]


def oracle(target: Target, answers: Sequence[Sequence[int]], *, drafts: int, right_frac: float, seed: int = 0) -> OracleProposer:
    named = {str(row): [*answer, *[0] * drafts] for row, answer in enumerate(answers)}
    lengths = {str(row): len(question) for row, question in enumerate(QUESTIONS)}
    return OracleProposer(target, named, lengths, max_drafts=drafts, right_frac=right_frac, seed=seed)


def decoded(
    target: Target, proposer: Proposer, rows: Sequence[int], limits: DecodeLimits, sampling: Sampling = GREEDY
) -> list[SpeculativeTrace]:
    return speculative_decode_batch(
        target, proposer, [QUESTIONS[row] for row in rows], keys=[str(row) for row in rows], limits=limits, sampling=sampling,
        rollback=target.keep,
    )  # fmt: skip


def cut(answer: Sequence[int], limits: DecodeLimits) -> list[int]:
    """An answer ends with its first stop token or at the limit."""
    for place, token in enumerate(answer[: limits.max_new_tokens]):
        if token in limits.stop_ids:
            return list(answer[: place + 1])
    return list(answer[: limits.max_new_tokens])


@settings(max_examples=amount(6, full=9), deadline=None, derandomize=True)
@given(
    drafts=st.integers(1, 15),
    right_frac=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    limit=st.integers(1, LONGEST),
    stop_row=st.integers(0, 4),
    stop_place=st.integers(0, LONGEST - 1),
    order=st.permutations(range(5)),
    seed=st.integers(0, 99),
)
def test_any_stop_token_limit_and_company_gives_the_cut_plain_answer(
    target: Target, answers: list[tuple[int, ...]], drafts: int, right_frac: float, limit: int, stop_row: int, stop_place: int,
    order: list[int], seed: int,
) -> None:  # fmt: skip
    """Stop tokens fall on anchors, inside accepted drafts and behind them; rows end in one forward or far apart."""
    limits = DecodeLimits(limit, frozenset({answers[stop_row][stop_place]}))
    proposer = oracle(target, answers, drafts=drafts, right_frac=right_frac, seed=seed)
    traces = decoded(target, proposer, order, limits)
    for row, trace in zip(order, traces, strict=True):
        assert list(trace.tokens) == cut(answers[row], limits)
        assert sum(step.counted for step in trace.verifications) == len(trace.tokens) - 1
        assert all(1 <= step.counted <= step.committed <= step.drafted + 1 for step in trace.verifications)
        assert [step.committed for step in trace.verifications[:-1]] == [step.counted for step in trace.verifications[:-1]]
        contexts = [step.context_tokens for step in trace.verifications]
        assert contexts == [len(QUESTIONS[row]) + sum(s.counted for s in trace.verifications[:n]) for n in range(len(contexts))]


@pytest.mark.parametrize("place", [1, 3, 4, 5])
def test_a_stop_token_at_each_place_of_a_block(target: Target, answers: list[tuple[int, ...]], place: int) -> None:
    """A block of four drafts behind the first token: a draft, the last draft, the target's own token, the next block."""
    answer = list(answers[0])
    fresh = next(token for token in range(VOCAB) if token not in answer)
    answer_row = next(row for row in range(5) if answers[row].index(answers[row][place]) == place or row == 4)
    answer = list(answers[answer_row])
    first = answer.index(answer[place])
    limits = DecodeLimits(LONGEST, frozenset({answer[place], fresh}))
    (trace,) = decoded(target, oracle(target, answers, drafts=4, right_frac=1.0), [answer_row], limits)
    assert list(trace.tokens) == answer[: first + 1]
    assert len(trace.verifications) == -(-first // 5)
    if first:
        assert trace.verifications[-1].counted == first - 5 * (len(trace.verifications) - 1)


@pytest.mark.parametrize("block_size", [2, 6])
def test_every_block_size_up_to_the_trained_one(target: Target, answers: list[tuple[int, ...]], block_size: int) -> None:
    limits = DecodeLimits(LONGEST, frozenset())
    proposer = drafting(target, make_drafter(block_size=6), block_size=block_size)
    traces = decoded(target, proposer, range(5), limits)
    assert [trace.tokens for trace in traces] == answers
    for row in (0, 3):
        (alone,) = decoded(target, proposer, [row], limits)
        assert alone.verifications == traces[row].verifications
    assert all(step.drafted == block_size - 1 for trace in traces for step in trace.verifications)


def test_a_prompt_of_one_token_with_blocks_of_two(target: Target) -> None:
    """The drafter's context is a single position, and there is nothing to look up yet."""
    limits = DecodeLimits(9, frozenset())
    (wanted,) = (plain_decode(target, QUESTIONS[0], limits=limits),)
    for proposer in (drafting(target, make_drafter(), block_size=2), LookupProposer(target, block_size=2)):
        (trace,) = decoded(target, proposer, [0], limits)
        assert trace.tokens == wanted.tokens


@pytest.mark.parametrize("drawn", [False, True], ids=["most probable drafts", "drawn drafts"])
def test_sampling_near_zero_temperature_is_greedy(target: Target, answers: list[tuple[int, ...]], drawn: bool) -> None:
    cold = Sampling(temperature=1e-6, seed=3)
    proposer = drafting(target, make_drafter(), block_size=5, drawing=Sampling(1e-6, seed=4) if drawn else GREEDY)
    traces = decoded(target, proposer, range(5), DecodeLimits(LONGEST, frozenset()), cold)
    greedy = decoded(target, drafting(target, make_drafter(), block_size=5), range(5), DecodeLimits(LONGEST, frozenset()))
    assert [trace.tokens for trace in traces] == answers
    assert [trace.verifications for trace in traces] == [trace.verifications for trace in greedy]


def test_samples_do_not_depend_on_order_company_or_block_size(target: Target) -> None:
    warm, limits = Sampling(temperature=1.1, seed=8), DecodeLimits(12, frozenset())
    wanted = generate_batch(
        target, QUESTIONS, keys=[str(row) for row in range(5)], max_new_tokens=12, temperature=1.1, seed=8, stop_ids=()
    )
    for rows, block_size in (([0, 1, 2, 3, 4], 6), ([4, 2, 0], 3), ([3], 2)):
        traces = decoded(target, drafting(target, make_drafter(), block_size=block_size), rows, limits, warm)
        assert [list(trace.tokens) for trace in traces] == [wanted[row] for row in rows]
    other = decoded(target, drafting(target, make_drafter(), block_size=6), range(5), limits, Sampling(1.1, seed=9))
    assert [list(trace.tokens) for trace in other] != wanted
