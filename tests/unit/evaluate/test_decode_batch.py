"""Several prompts at once, greedy and sampled, with acceptances of their own: the same tokens as plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BUILDERS, MASK_ID, RECURRENT, drafting, make_drafter, make_target, prompts

from dflash.errors import TargetError
from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace, speculative_decode_batch
from dflash.evaluate.proposal import Proposer
from dflash.evaluate.proposers import LookupProposer, OracleProposer
from dflash.evaluate.state_proof import broken_rollbacks
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY, Sampling
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

torch.set_num_threads(1)
TOKENS = 24
SAMPLED = Sampling(temperature=0.9, seed=5)
TARGETS: dict[str, Target] = {}
ANSWERS: dict[tuple[Any, ...], list[list[int]]] = {}
"""Plain answers of the shared targets: most tests want the same ones."""
REPRESENTATIVE = ("qwen3", "gemma3_sliding", "qwen3_5_hybrid")
"""One family a kind of cache; sampling sees nothing of a target but its logits, so the others sample in `make test-full`."""


def shared(family: str) -> Target:
    return TARGETS.setdefault(family, make_target(family))


def keys_of(questions: list[list[int]]) -> list[str]:
    return [f"row {row}" for row in range(len(questions))]


def plain(target: Target, questions: list[list[int]], sampling: Sampling, *, stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
    """Plain decoding: one token a forward, an independent loop."""
    wanted = (id(target), str(questions), sampling, stop_ids)
    if wanted not in ANSWERS or target not in TARGETS.values():
        ANSWERS[wanted] = generate_batch(
            target, questions, keys=keys_of(questions), max_new_tokens=TOKENS, temperature=sampling.temperature,
            seed=sampling.seed, stop_ids=stop_ids,
        )  # fmt: skip
    return ANSWERS[wanted]


def speculative(
    target: Target, proposer: Proposer, questions: list[list[int]], sampling: Sampling, **changes: Any
) -> list[SpeculativeTrace]:
    arguments: dict[str, Any] = {"limits": DecodeLimits(TOKENS, frozenset()), "rollback": target.keep, **changes}
    return speculative_decode_batch(target, proposer, questions, keys=keys_of(questions), sampling=sampling, **arguments)


def oracle(target: Target, questions: list[list[int]], answers: list[list[int]], *, right_frac: float) -> OracleProposer:
    keys = keys_of(questions)
    return OracleProposer(
        target, dict(zip(keys, answers, strict=True)), {key: len(q) for key, q in zip(keys, questions, strict=True)},
        max_drafts=5, right_frac=right_frac, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        *(pytest.param(family, GREEDY, id=f"{family}-greedy") for family in BUILDERS),
        *(
            pytest.param(family, SAMPLED, id=f"{family}-sampled", marks=() if family in REPRESENTATIVE else pytest.mark.full)
            for family in BUILDERS
        ),
    ],
)
def test_ragged_rows_give_the_tokens_of_plain_decoding(family: str, sampling: Sampling) -> None:
    target = shared(family)
    questions = prompts(4)
    answers = plain(target, questions, sampling)
    traces = speculative(target, oracle(target, questions, answers, right_frac=0.8), questions, sampling)
    assert [list(trace.tokens) for trace in traces] == answers
    patterns = {tuple(step.accepted for step in trace.verifications) for trace in traces}
    assert len(patterns) == 4, "the rows were meant to accept different numbers"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_drafter_and_lookup_decode_each_row_as_if_it_were_alone(family: str, sampling: Sampling) -> None:
    target, questions = shared(family), prompts(3, seed=8)
    answers = plain(target, questions, sampling)
    for proposer, rows in ((drafting(target, make_drafter(), block_size=6), (0, 2)), (LookupProposer(target, block_size=5), (1,))):
        together = speculative(target, proposer, questions, sampling)
        assert [list(trace.tokens) for trace in together] == answers
        for row in rows:
            (alone,) = speculative_decode_batch(
                target, proposer, [questions[row]], keys=[f"row {row}"], limits=DecodeLimits(TOKENS, frozenset()),
                sampling=sampling, rollback=target.keep,
            )  # fmt: skip
            assert alone.verifications == together[row].verifications


@pytest.mark.parametrize("control", ["no_crop", "crop_off_by_one", "crop_only", "no_restore", "shift_without_keys"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "lfm2_conv", "qwen3_5_hybrid"])
def test_a_broken_rollback_changes_the_tokens_of_a_batch(family: str, control: str) -> None:
    target, questions = shared(family), prompts(3)
    rollbacks = broken_rollbacks(target, ragged=True)
    if control not in rollbacks:
        assert (control, family in RECURRENT) in {("crop_only", False), ("no_restore", False)}
        return
    answers = plain(target, questions, GREEDY)
    proposer = oracle(target, questions, answers, right_frac=0.6)
    traces = speculative(target, proposer, questions, GREEDY, rollback=rollbacks[control])
    assert [list(trace.tokens) for trace in traces] != answers


@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "lfm2_conv", "qwen3_5_hybrid"])
def test_a_wrong_mask_changes_the_tokens_of_a_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the empty columns in front of shorter rows are seen."""
    target, questions = shared(family), [[7], *prompts(2)]
    answers = plain(target, questions, GREEDY)
    monkeypatch.setattr(TargetCache, "mask", lambda *_: None)
    traces = speculative(target, oracle(target, questions, answers, right_frac=0.6), questions, GREEDY)
    assert [list(trace.tokens) for trace in traces] != answers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_hybrid"])
def test_rows_that_stop_are_dropped_and_nothing_behind_their_stop_id_is_returned(family: str) -> None:
    target, questions = shared(family), prompts(5, seed=4)
    stops = tuple({answer[place] for answer, place in zip(plain(target, questions, GREEDY), (0, 3, 9, 14), strict=False)})
    answers = plain(target, questions, GREEDY, stop_ids=stops)
    assert len({len(answer) for answer in answers}) >= 3 and len(answers[0]) == 1
    proposer = oracle(target, questions, answers, right_frac=0.9)
    traces = speculative(target, proposer, questions, GREEDY, limits=DecodeLimits(TOKENS, frozenset(stops)))
    assert [list(trace.tokens) for trace in traces] == answers
    for trace in traces:
        assert sum(step.counted for step in trace.verifications) == len(trace.tokens) - 1
    assert traces[0].verifications == ()


def test_without_proven_mixers_a_ragged_batch_is_lossless_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.model.target_probe.find_mixers", lambda *_: None)
    target, questions = make_target("qwen3_5_hybrid"), prompts(3)
    assert not target.replays_mixers
    answers = plain(target, questions, GREEDY)
    traces = speculative(target, oracle(target, questions, answers, right_frac=0.7), questions, GREEDY)
    assert [list(trace.tokens) for trace in traces] == answers


def test_the_oracle_is_right_as_often_as_it_was_asked_to_be() -> None:
    target, questions = shared("qwen3"), prompts(6)
    answers = plain(target, questions, GREEDY)
    for right_frac, lowest, highest in ((0.0, 0.0, 0.2), (0.7, 1.3, 2.6), (1.0, 4.0, 5.0)):
        traces = speculative(target, oracle(target, questions, answers, right_frac=right_frac), questions, GREEDY)
        steps = [step for trace in traces for step in trace.verifications]
        assert lowest <= sum(step.counted - 1 for step in steps) / len(steps) <= highest


def test_the_time_split_is_part_of_the_decoding_time() -> None:
    target, questions = shared("qwen3"), prompts(2)
    for trace in speculative(target, drafting(target, make_drafter(), block_size=6), questions, GREEDY):
        assert trace.drafter_s > 0 and trace.target_s > 0
        assert trace.drafter_s + trace.target_s < trace.decode_s
    assert MASK_ID not in {token for question in questions for token in question}


def test_no_prompts_give_no_traces_and_an_empty_one_is_refused() -> None:
    target = shared("qwen3")
    assert speculative(target, LookupProposer(target, block_size=4), [], GREEDY) == []
    with pytest.raises(TargetError, match="prompt 1 is empty"):
        speculative(target, LookupProposer(target, block_size=4), [[3], []], GREEDY)
