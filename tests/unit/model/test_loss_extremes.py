"""The objectives in float64 straight from their formulas, finite differences, and the ends of the number range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.config import LossConfig
from dflash.model import head as head_module
from dflash.model.acceptance import TargetStates
from dflash.model.anchors import BlockLabels
from dflash.model.head import FrozenHead, label_rows
from dflash.model.logit_rule import LogitRule
from dflash.model.loss import LossSums, block_loss

RULES = [LogitRule(1.0, None), LogitRule(0.25, None), LogitRule(2.0, 5.0)]
OBJECTIVES = ["decay", "dpace", "acceptance"]
PLAIN = RULES[0]


def logits64(rule: LogitRule, weight: Tensor, hidden: Tensor) -> Tensor:
    raw = rule.scale * (hidden.double() @ weight.double().T)
    return raw if rule.soft_cap is None else rule.soft_cap * torch.tanh(raw / rule.soft_cap)


class Problem:
    """Blocks of random states with a ragged supervision, a head, and the target's own states."""

    def __init__(self, *, blocks: int, slots: int, vocab: int, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(1, blocks, slots, width, generator=generator)
        self.weight = torch.randn(vocab, width, generator=generator)
        lengths = torch.randint(0, slots, (blocks,), generator=generator)
        lengths[0] = slots - 1
        valid = (torch.arange(slots) > 0) & (torch.arange(slots) <= lengths[:, None])
        labels = torch.randint(vocab, (blocks, slots), generator=generator)
        labels[0, 1], labels[-1, -1] = 0, vocab - 1
        self.labels = BlockLabels(labels[None], valid[None])
        self.keep = torch.ones(1, blocks, dtype=torch.bool)
        self.anchors = torch.randint(4, (1, blocks), generator=generator)
        self.states = torch.randn(1, slots + 4, width, generator=generator)

    def ours(self, config: LossConfig, rule: LogitRule, hidden: Tensor) -> LossSums:
        target = TargetStates(self.states, self.anchors)
        return block_loss(hidden, self.labels, self.keep, FrozenHead(self.weight, rule), loss=config, target=target)

    def formula(self, config: LossConfig, rule: LogitRule, hidden: Tensor, *, fixed: Tensor) -> tuple[Tensor, float]:
        """Objective and weight; what is detached (weights, lam) is computed from `fixed`."""
        objective, total = torch.zeros((), dtype=torch.float64), 0.0
        for n in range(hidden.shape[1]):
            slots = [k for k in range(1, hidden.shape[2]) if self.labels.valid[0, n, k]]
            chosen = self.labels.labels[0, n]
            held = [float(logits64(rule, self.weight, fixed[0, n, k]).softmax(0)[chosen[k]]) for k in slots]
            survival = [math.prod((1 - config.alpha) * q + config.alpha for q in held[: m + 1]) for m in range(len(slots))]
            for place, k in enumerate(slots):
                log_q = logits64(rule, self.weight, hidden[0, n, k]).log_softmax(0)
                weight = math.exp(-(k - 1) / config.gamma) if config.objective != "dpace" else sum(survival[place:])
                term = -log_q[chosen[k]]
                if config.objective == "acceptance":
                    p = logits64(rule, self.weight, self.states[0, int(self.anchors[0, n]) + k - 1]).softmax(0)
                    frozen = logits64(rule, self.weight, fixed[0, n, k]).softmax(0)
                    lam = math.exp(-config.eta * float(torch.minimum(p, frozen).sum()))
                    accepted = torch.minimum(p, log_q.exp()).sum()
                    term = lam * (p * (p.log() - log_q)).sum() + (1 - lam) * (1 - accepted)
                objective, total = objective + weight * term, total + weight
        return objective, total


@pytest.fixture(autouse=True)
def _narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "TILE_COLUMNS", {"cpu": 7})


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("blocks", "slots", "vocab", "rows"), [(3, 5, 13, 4), (1, 2, 2, 1), (5, 17, 29, 11)])
def test_value_and_slope_follow_the_formula(
    objective: str, rule: LogitRule, blocks: int, slots: int, vocab: int, rows: int
) -> None:
    problem = Problem(blocks=blocks, slots=slots, vocab=vocab, width=6, seed=slots)
    config = LossConfig(objective=objective, gamma=3.0, alpha=0.3, eta=2.0, head_chunk_rows=rows)
    hidden = problem.hidden.clone().requires_grad_()
    sums = problem.ours(config, rule, hidden)
    sums.objective_sum.backward()
    wanted, weight = problem.formula(config, rule, problem.hidden, fixed=problem.hidden)
    assert float(sums.objective_sum.detach()) == pytest.approx(float(wanted), rel=2e-5)
    assert float(sums.objective_weight) == pytest.approx(weight, rel=2e-5)
    generator, step = torch.Generator().manual_seed(0), 1e-5
    assert hidden.grad is not None
    for _ in range(3):
        direction = torch.randn(hidden.shape, generator=generator).double()
        ends = [
            problem.formula(config, rule, problem.hidden.double() + sign * step * direction, fixed=problem.hidden)[0]
            for sign in (1, -1)
        ]
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert float((hidden.grad.double() * direction).sum()) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e7]),
    vocab=st.sampled_from([2, 6, 7, 8, 15]),
    rule=st.sampled_from(RULES),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_logits_of_any_size_give_the_exact_loss(size: float, vocab: int, rule: LogitRule, rows: int, seed: int) -> None:
    """At 1e4 every softmax is a one-hot: the loss is a difference of logits and must not be infinite or rounded to zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = size * torch.randn(8, 5, generator=generator), torch.randn(vocab, 5, generator=generator)
    targets = torch.cat((torch.tensor([0, vocab - 1]), torch.randint(vocab, (6,), generator=generator)))
    found = label_rows(hidden, torch.arange(8), targets, FrozenHead(weight, rule), chunk_rows=rows)
    exact = logits64(rule, weight, hidden)
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    torch.testing.assert_close(found.ce.double(), wanted, atol=2e-5 * max(1.0, float(exact.abs().max())), rtol=1e-4)
    assert bool(found.pull.isfinite().all())
    assert bool((found.ce >= -1e-4 * max(1.0, size)).all())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_supervised_slot_alone_has_its_own_gradient(objective: str) -> None:
    problem = Problem(blocks=4, slots=5, vocab=9, width=4, seed=2)
    problem.labels.valid.fill_(False)
    problem.labels.valid[0, 2, 1] = True
    hidden = problem.hidden.clone().requires_grad_()
    config = LossConfig(objective=objective)
    sums = problem.ours(config, PLAIN, hidden)
    sums.objective_sum.backward()
    assert hidden.grad is not None
    touched = hidden.grad.abs().sum(-1) > 0
    assert touched.nonzero().tolist() == [[0, 2, 1]]
    assert sums.valid.tolist() == [1, 0, 0, 0]
    assert (sums.n_tokens, sums.n_blocks) == (1, 4)
    weight = 1.0
    if objective == "dpace":
        weight = 0.5 * math.exp(-float(sums.ce_sum)) + 0.5
    assert float(sums.objective_weight) == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_supervised_is_a_zero_that_can_be_differentiated(objective: str) -> None:
    problem = Problem(blocks=2, slots=4, vocab=9, width=4, seed=3)
    problem.labels.valid.fill_(False)
    hidden = problem.hidden.clone().requires_grad_()
    sums = problem.ours(LossConfig(objective=objective), PLAIN, hidden)
    sums.objective_sum.backward()
    assert float(sums.objective_sum.detach()) == float(sums.objective_weight) == float(sums.ce_sum) == 0.0
    assert hidden.grad is not None and not bool(hidden.grad.any())


def test_the_split_into_micro_batches_changes_no_sum() -> None:
    problem = Problem(blocks=6, slots=5, vocab=11, width=4, seed=4)
    config = LossConfig(objective="dpace", alpha=0.5)
    whole = problem.ours(config, PLAIN, problem.hidden)
    parts = []
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        labels = BlockLabels(problem.labels.labels[:, part], problem.labels.valid[:, part])
        head = FrozenHead(problem.weight, PLAIN)
        parts.append(block_loss(problem.hidden[:, part], labels, problem.keep[:, part], head, loss=config, target=None))
    for name in ("objective_sum", "objective_weight", "ce_sum", "accepted_sum"):
        assert float(sum(getattr(part, name) for part in parts)) == pytest.approx(float(getattr(whole, name)), rel=1e-5)
    assert [sum(column) for column in zip(*(part.correct.tolist() for part in parts), strict=True)] == whole.correct.tolist()


def test_a_soft_cap_that_saturates_sends_no_gradient_instead_of_nan() -> None:
    hidden = torch.full((1, 3), 1e6)
    found = label_rows(hidden, torch.tensor([0]), torch.tensor([1]), FrozenHead(torch.eye(3), LogitRule(1.0, 30.0)), chunk_rows=1)
    assert float(found.ce) == pytest.approx(math.log(3), rel=1e-5)
    assert found.pull.tolist() == [[0.0, 0.0, 0.0]]
