"""Acceptance keeps the target's distribution: exact rules on small numbers, chi-square on a tiny vocabulary."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from families import VOCAB, drafting, make_drafter, make_target

from dflash.errors import EvaluationError
from dflash.evaluate.decode import DecodeLimits, speculative_decode_batch
from dflash.evaluate.judge import judge
from dflash.evaluate.proposal import Proposal
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY, Sampling, inverse_cdf, keyed_uniforms
from dflash.model.target import Target

torch.set_num_threads(1)
PROMPT = [3, 9, 27, 14]
DRAWS = 2000
SAMPLING = Sampling(temperature=4.0, seed=11)


def test_a_deterministic_draft_is_accepted_up_to_its_first_difference_and_never_behind_its_count() -> None:
    logits = torch.full((2, 4, 6), -1.0)
    for row, tokens in enumerate(([1, 2, 3, 4], [0, 5, 1, 2])):
        logits[row, range(4), tokens] = 1.0
    proposal = Proposal(torch.tensor([[1, 2, 0], [0, 5, 1]]), [3, 1], None)
    accepted, chosen = judge(proposal, logits, GREEDY, keys=["a", "b"], firsts=[0, 0])
    assert accepted == [2, 1]
    assert chosen == [[1, 2, 3, 4], [0, 5, 1, 2]]


def test_a_draft_drawn_from_the_targets_own_distribution_is_always_accepted() -> None:
    logits = torch.randn(50, 4, 9, generator=torch.Generator().manual_seed(0))
    own = torch.softmax(logits[:, :3].double() / SAMPLING.temperature, -1)
    keys = [f"r{row}" for row in range(50)]
    drawn = inverse_cdf(own, keyed_uniforms(0, keys, [0] * 50, 3, device=logits.device))
    accepted, chosen = judge(Proposal(drawn, None, own), logits, SAMPLING, keys=keys, firsts=[0] * 50)
    assert accepted == [3] * 50
    assert [row[:3] for row in chosen] == drawn.tolist() and all(len(row) == 4 for row in chosen)


def test_a_draft_that_the_target_never_says_is_refused_and_replaced() -> None:
    logits = torch.tensor([[[0.0, 0.0, -1e9], [5.0, 0.0, 0.0]]])
    drawn = torch.tensor([[[0.0, 0.0, 1.0]]], dtype=torch.float64)
    accepted, chosen = judge(Proposal(torch.tensor([[2]]), None, drawn), logits, SAMPLING, keys=["x"], firsts=[0])
    assert accepted == [0] and chosen[0][0] in (0, 1) and len(chosen[0]) == 1


def test_drawn_drafts_need_a_target_that_samples() -> None:
    proposal = Proposal(torch.tensor([[2]]), None, torch.ones(1, 1, 3, dtype=torch.float64) / 3)
    with pytest.raises(EvaluationError, match="temperature 0"):
        judge(proposal, torch.zeros(1, 2, 3), GREEDY, keys=["x"], firsts=[0])


def test_the_rule_gives_the_target_distribution_whatever_the_drafts_are_drawn_from() -> None:
    """One draft, then the target's own token: both positions follow p, for a q that is far from it."""
    rows = 6000
    wanted = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    q = torch.tensor([0.05, 0.15, 0.3, 0.5], dtype=torch.float64)
    logits = (wanted.log() * SAMPLING.temperature).expand(rows, -1, -1)
    keys = [f"r{row}" for row in range(rows)]
    drawn = inverse_cdf(q.expand(rows, 1, -1), keyed_uniforms(3, keys, [0] * rows, 1, device=q.device))
    accepted, chosen = judge(Proposal(drawn, None, q.expand(rows, 1, -1)), logits, SAMPLING, keys=keys, firsts=[0] * rows)
    assert sum(accepted) / rows == pytest.approx(float(torch.minimum(wanted[0], q).sum()), abs=0.02)
    assert chi_square(Counter(row[0] for row in chosen), wanted[0], rows) < 16.3  # 0.1 % at 3 degrees of freedom
    behind = Counter(row[1] for row, count in zip(chosen, accepted, strict=True) if count)
    assert chi_square(behind, wanted[1], sum(accepted)) < 16.3


def chi_square(counts: Counter[int], expected: torch.Tensor, draws: int) -> float:
    return sum((counts[token] - draws * float(share)) ** 2 / (draws * float(share)) for token, share in enumerate(expected))


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def marginals(target: Target) -> list[torch.Tensor]:
    """Exact distribution of the second and third token of an answer, summed over everything in front of it."""
    with torch.no_grad():

        def following(texts: torch.Tensor) -> torch.Tensor:
            logits = torch.cat([target.model(input_ids=part, use_cache=False).logits[:, -1] for part in texts.split(2000)])
            return torch.softmax(logits.double() / SAMPLING.temperature, -1)

        prompt = torch.tensor([PROMPT])
        first = following(prompt)[0]
        tokens = torch.arange(VOCAB)
        once = torch.cat((prompt.expand(VOCAB, -1), tokens[:, None]), 1)
        second = following(once)
        twice = torch.cat((once.repeat_interleave(VOCAB, 0), tokens.repeat(VOCAB)[:, None]), 1)
        joint = (first[:, None] * second).flatten()
        return [first @ second, joint @ following(twice)]


@pytest.mark.parametrize("drawn", [False, True], ids=["most probable drafts", "drawn drafts"])
def test_sampled_decoding_follows_the_targets_distribution(target: Target, marginals: list[torch.Tensor], drawn: bool) -> None:
    drawing = Sampling(SAMPLING.temperature, seed=23) if drawn else GREEDY
    keys = [f"draw {number}" for number in range(DRAWS)]
    traces = speculative_decode_batch(
        target, drafting(target, make_drafter(), block_size=4, drawing=drawing), [PROMPT] * DRAWS, keys=keys,
        limits=DecodeLimits(3, frozenset()), sampling=SAMPLING, rollback=target.keep,
    )  # fmt: skip
    steps = [step for trace in traces for step in trace.verifications]
    share = sum(step.accepted > 0 for step in steps) / len(steps)
    assert 0.005 < share < 0.95, "the rule was meant to accept and to refuse"
    for place, expected in enumerate(marginals, start=1):
        counts = Counter(trace.tokens[place] for trace in traces)
        common = [token for token in range(VOCAB) if float(expected[token]) * DRAWS >= 5]
        assert len(common) > 20
        distance = sum((counts[t] - DRAWS * float(expected[t])) ** 2 / (DRAWS * float(expected[t])) for t in common)
        freedom = len(common) - 1
        assert distance < freedom + 3.1 * (2 * freedom) ** 0.5 + 3  # about 0.1 %
    plain = generate_batch(
        target, [PROMPT] * 200, keys=keys[:200], max_new_tokens=3, temperature=SAMPLING.temperature, seed=SAMPLING.seed, stop_ids=()
    )
    same = [list(trace.tokens) == answer for trace, answer in zip(traces, plain, strict=False)]
    assert all(same) or drawn, "a deterministic draft changes no sample"
    assert not all(same) or not drawn
