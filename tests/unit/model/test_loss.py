"""The chunked loss against full logits and autograd, D-PACE slot by slot, and the reference implementation's numbers."""

from __future__ import annotations

import math
from typing import Any

import model_naive as naive
import pytest
import torch
from model_fixtures import load_golden
from torch import Tensor
from torch.nn import functional

from dflash.config import LossConfig
from dflash.errors import DrafterError
from dflash.model import head as head_module
from dflash.model.acceptance import TargetStates
from dflash.model.anchors import BlockLabels
from dflash.model.head import FrozenHead
from dflash.model.logit_rule import LogitRule
from dflash.model.loss import LossSums, block_loss

VOCAB, WIDTH, BLOCKS, SLOTS = 37, 12, 7, 5
OBJECTIVES = [LossConfig(objective="decay", gamma=2.5), LossConfig(objective="dpace", alpha=0.4)]
IDS = ["decay", "dpace"]
PLAIN = LogitRule(scale=1.0, soft_cap=None)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of the tiny vocabulary, the last one narrower."""
    monkeypatch.setattr(head_module, "TILE_COLUMNS", {"cpu": 10})


class Case:
    """Random blocks with ragged supervision, some of it not a prefix, and some blocks without any."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.hidden = torch.randn(2, BLOCKS, SLOTS, WIDTH, requires_grad=True)
        self.head = torch.randn(VOCAB, WIDTH)
        labels = torch.randint(VOCAB, (2, BLOCKS, SLOTS))
        valid = torch.rand(2, BLOCKS, SLOTS) < 0.7
        valid[..., 0] = False
        valid[0, 2] = False
        with torch.no_grad():  # make a good part of the predictions right
            wins = torch.rand(2, BLOCKS, SLOTS) < 0.5
            labels = torch.where(wins, (self.hidden @ self.head.T).argmax(-1), labels)
        self.labels = BlockLabels(labels, valid)
        self.keep = torch.ones(2, BLOCKS, dtype=torch.bool)
        self.keep[1, 4] = False

    def sums(self, config: LossConfig) -> LossSums:
        return block_loss(self.hidden, self.labels, self.keep, FrozenHead(self.head, PLAIN), loss=config, target=None)

    def naive_sums(self, config: LossConfig) -> dict[str, Any]:
        """Everything from full logits, block by block; `objective` carries an autograd graph."""
        log_p = functional.log_softmax(self.hidden @ self.head.T, dim=-1)
        totals: dict[str, Any] = {"objective": torch.zeros(()), "weight": 0.0, "ce": 0.0, "accepted": 0, "tokens": 0}
        correct, seen = [0] * (SLOTS - 1), [0] * (SLOTS - 1)
        for b in range(2):
            for n in range(BLOCKS):
                valid = [bool(flag) and bool(self.keep[b, n]) for flag in self.labels.valid[b, n, 1:]]
                terms = [log_p[b, n, k, self.labels.labels[b, n, k]] for k in range(1, SLOTS)]
                weights = naive.slot_weights(
                    [float(term.detach().exp()) for term in terms],
                    valid,
                    objective=config.objective,
                    gamma=config.gamma,
                    alpha=config.alpha,
                )
                running = True
                for k, (term, ok, weight) in enumerate(zip(terms, valid, weights, strict=True)):
                    hit = ok and int(log_p[b, n, k + 1].argmax()) == int(self.labels.labels[b, n, k + 1])
                    running = running and hit
                    totals["objective"] = totals["objective"] - weight * term
                    totals["weight"] += weight
                    totals["ce"] -= float(term.detach()) * ok
                    totals["accepted"] += running
                    totals["tokens"] += ok
                    correct[k] += hit
                    seen[k] += ok
        return {**totals, "correct": correct, "valid": seen}


@pytest.mark.parametrize("config", OBJECTIVES, ids=IDS)
def test_sums_equal_full_logits(config: LossConfig) -> None:
    case = Case()
    found, wanted = case.sums(config), case.naive_sums(config)
    assert float(found.objective_sum.detach()) == pytest.approx(float(wanted["objective"].detach()), rel=1e-5)
    assert float(found.objective_weight) == pytest.approx(wanted["weight"], rel=1e-5)
    assert float(found.ce_sum) == pytest.approx(wanted["ce"], rel=1e-5)
    assert float(found.accepted_sum) == wanted["accepted"]
    assert found.correct.tolist() == wanted["correct"]
    assert found.valid.tolist() == wanted["valid"]
    assert (found.n_tokens, found.n_blocks) == (wanted["tokens"], 2 * BLOCKS - 1)


@pytest.mark.parametrize("config", OBJECTIVES, ids=IDS)
def test_gradient_equals_autograd_on_full_logits(config: LossConfig) -> None:
    case = Case(1)
    (wanted,) = torch.autograd.grad(case.naive_sums(config)["objective"] * 0.3, case.hidden)
    (found,) = torch.autograd.grad(case.sums(config).objective_sum * 0.3, case.hidden)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert torch.equal(found[0, 2], torch.zeros(SLOTS, WIDTH))
    assert torch.equal(found[1, 4], torch.zeros(SLOTS, WIDTH))
    assert torch.equal(found[:, :, 0], torch.zeros(2, BLOCKS, WIDTH))


@pytest.mark.parametrize("config", OBJECTIVES, ids=IDS)
def test_chunk_size_changes_nothing(config: LossConfig) -> None:
    case = Case(2)
    whole = case.sums(config.model_copy(update={"head_chunk_rows": 10_000}))
    (whole_gradient,) = torch.autograd.grad(whole.objective_sum, case.hidden)
    for rows in (1, 5, 13, 16):
        parts = case.sums(config.model_copy(update={"head_chunk_rows": rows}))
        (gradient,) = torch.autograd.grad(parts.objective_sum, case.hidden)
        torch.testing.assert_close(parts.objective_sum, whole.objective_sum)
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-6, rtol=1e-5)
        assert parts.correct.tolist() == whole.correct.tolist()
        assert float(parts.accepted_sum) == float(whole.accepted_sum)


def test_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3)
    logits_seen: list[tuple[int, int]] = []
    original = torch.mm

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        product = original(*args, **kwargs)
        logits_seen.append((product.shape[0], product.shape[1]))
        return product

    monkeypatch.setattr(torch, "mm", recording)
    sums = case.sums(LossConfig(objective="decay", gamma=4.0, head_chunk_rows=8))
    # Only supervised slots, each logit once: no recomputation.
    assert sum(rows * columns for rows, columns in logits_seen) == sums.n_tokens * VOCAB
    assert max(rows for rows, _ in logits_seen) == 8
    assert max(columns for _, columns in logits_seen) == 10
    sums.objective_sum.backward()
    assert sum(rows * columns for rows, columns in logits_seen) == sums.n_tokens * VOCAB


def test_dpace_weights_grow_with_certainty_and_the_mean_does_not() -> None:
    """Our scale: the mean weight runs over an order of magnitude while a drafter improves, so the sum of weights divides."""
    slots, vocab = 16, 64
    labels = BlockLabels(torch.zeros(1, 1, slots, dtype=torch.long), torch.ones(1, 1, slots, dtype=torch.bool))
    labels.valid[..., 0] = False
    head = torch.eye(vocab)
    config = LossConfig(objective="dpace", alpha=0.5)
    results = []
    for sharpness in (0.0, 20.0):
        hidden = torch.zeros(1, 1, slots, vocab)
        hidden[..., 0] = sharpness
        keep = torch.ones(1, 1, dtype=torch.bool)
        results.append(block_loss(hidden, labels, keep, FrozenHead(head, PLAIN), loss=config, target=None))
    weak, strong = (float(result.objective_weight) / (slots - 1) for result in results)
    assert weak == pytest.approx(0.14, abs=0.02)
    assert strong == pytest.approx(8.0, abs=0.01)
    means = [float(result.objective_sum) / float(result.objective_weight) for result in results]
    assert means[0] == pytest.approx(math.log(vocab), rel=1e-4)
    assert means[1] < 1e-3


def test_accepted_counts_the_longest_correct_prefix_not_the_mean_accuracy() -> None:
    head = torch.eye(4)
    hidden = torch.zeros(1, 2, 4, 4)
    hidden[..., 1] = 1.0  # every slot predicts token 1
    labels = torch.tensor([[[0, 1, 2, 1], [0, 2, 1, 1]]])
    valid = torch.tensor([[[False, True, True, True], [False, True, True, True]]])
    keep = torch.ones(1, 2, dtype=torch.bool)
    config = LossConfig(objective="decay", gamma=4.0)
    sums = block_loss(hidden, BlockLabels(labels, valid), keep, FrozenHead(head, PLAIN), loss=config, target=None)
    assert float(sums.accepted_sum) == 1.0
    assert sums.correct.tolist() == [1, 1, 2]


@pytest.mark.parametrize("config", OBJECTIVES, ids=IDS)
def test_a_batch_without_supervision_is_a_zero_with_a_zero_gradient(config: LossConfig) -> None:
    case = Case(4)
    nothing = BlockLabels(case.labels.labels, torch.zeros_like(case.labels.valid))
    sums = block_loss(case.hidden, nothing, torch.zeros_like(case.keep), FrozenHead(case.head, PLAIN), loss=config, target=None)
    sums.objective_sum.backward()
    assert float(sums.objective_sum.detach()) == float(sums.objective_weight) == 0.0
    assert (sums.n_blocks, sums.n_tokens) == (0, 0)
    assert case.hidden.grad is not None
    assert not bool(case.hidden.grad.any())


def test_extreme_logits_stay_finite_and_nan_is_not_hidden() -> None:
    case = Case(5)
    config = OBJECTIVES[0]
    head = FrozenHead(case.head, PLAIN)
    far = block_loss(case.hidden * 1e4, case.labels, case.keep, head, loss=config, target=None)
    assert bool(torch.isfinite(far.objective_sum))
    poisoned = case.hidden.detach().clone()
    poisoned[0, 0] = float("nan")
    assert bool(torch.isnan(block_loss(poisoned, case.labels, case.keep, head, loss=config, target=None).ce_sum))


def test_half_precision_stays_close() -> None:
    case = Case(6)
    wanted = case.sums(OBJECTIVES[0])
    hidden = case.hidden.detach().bfloat16().requires_grad_()
    head = FrozenHead(case.head.bfloat16(), PLAIN)
    found = block_loss(hidden, case.labels, case.keep, head, loss=OBJECTIVES[0], target=None)
    found.objective_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert float(found.ce_sum) == pytest.approx(float(wanted.ce_sum), rel=0.02)


def _golden_sums(name: str, config: LossConfig) -> tuple[LossSums, int]:
    """Sums over the reference's own hidden states and label rule (supervised wherever the label is, no running product)."""
    golden = load_golden(name)
    anchors, ids = golden.anchors, golden.input_ids
    tokens = ids.shape[1]
    block_size = golden.drafter.config.block_size
    positions = anchors.unsqueeze(-1) + torch.arange(block_size)
    index = positions.clamp(max=tokens - 1).flatten(1)
    labels = ids.gather(1, index).view_as(positions)
    valid = golden.forward["loss_mask"].bool().gather(1, index).view_as(positions) & (positions < tokens)
    valid[..., 0] = False
    hidden = golden.forward["draft_hidden"].view(*positions.shape, -1)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    head = FrozenHead(golden.target.head_weight, golden.target.logit_rule)
    return block_loss(hidden, BlockLabels(labels, valid), keep, head, loss=config, target=None), len(ids)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_losses_equal_the_reference_implementation_after_the_stated_scale(name: str) -> None:
    golden = load_golden(name)
    expected, gamma, alpha = golden.expected["expected"], golden.expected["gamma"], golden.expected["dpace_alpha"]
    decay, _ = _golden_sums(name, LossConfig(objective="decay", gamma=gamma))
    assert float(decay.objective_sum / decay.objective_weight) == pytest.approx(expected["decay"]["loss"], abs=1e-4)
    # The reference's uniform objective is our plain cross-entropy.
    assert float(decay.ce_sum) / decay.n_tokens == pytest.approx(expected["uniform"]["loss"], abs=1e-4)
    assert float(decay.correct.sum()) / decay.n_tokens == pytest.approx(expected["decay"]["accuracy"], abs=1e-4)
    # The reference divides D-PACE's sum by the batch size, we divide it by the sum of the weights.
    dpace, batch = _golden_sums(name, LossConfig(objective="dpace", alpha=alpha))
    assert float(dpace.objective_sum) / batch == pytest.approx(expected["dpace"]["loss"], abs=1e-3)


def test_the_acceptance_objective_refuses_to_guess_the_target() -> None:
    case = Case(7)
    with pytest.raises(DrafterError, match="no states of the target"):
        case.sums(LossConfig(objective="acceptance"))


@pytest.mark.parametrize("rule", [PLAIN, LogitRule(scale=0.5, soft_cap=None), LogitRule(scale=2.0, soft_cap=3.0)], ids=str)
def test_acceptance_equals_autograd_on_both_full_distributions(rule: LogitRule) -> None:
    """The target's row for slot k is its state at a + k - 1, the last token that the target has read before it."""
    case, tokens, eta = Case(8), 14, 2.0
    config = LossConfig(objective="acceptance", gamma=2.5, eta=eta, head_chunk_rows=12)
    anchors = torch.stack([torch.randperm(tokens - SLOTS)[:BLOCKS].sort().values for _ in range(2)])
    states = torch.randn(2, tokens, WIDTH)
    head = FrozenHead(case.head, rule)
    found = block_loss(case.hidden, case.labels, case.keep, head, loss=config, target=TargetStates(states, anchors))
    objective, weights, ce = torch.zeros(()), 0.0, 0.0
    for b in range(2):
        for n in range(BLOCKS):
            for k in range(1, SLOTS):
                if not (case.labels.valid[b, n, k] and case.keep[b, n]):
                    continue
                own = rule.apply(case.head @ case.hidden[b, n, k])
                theirs = rule.apply(case.head @ states[b, int(anchors[b, n]) + k - 1])
                log_q, log_p = own.log_softmax(0), theirs.log_softmax(0)
                accepted = torch.minimum(log_q.exp(), log_p.exp()).sum()
                share = torch.exp(-eta * accepted.detach())
                weight = math.exp(-(k - 1) / 2.5)
                term = share * (log_p.exp() * (log_p - log_q)).sum() + (1 - share) * (1 - accepted)
                objective, weights = objective + weight * term, weights + weight
                ce -= float(log_q.detach()[case.labels.labels[b, n, k]])
    assert float(found.objective_sum.detach()) == pytest.approx(float(objective.detach()), rel=1e-5)
    assert float(found.objective_weight) == pytest.approx(weights, rel=1e-6)
    assert float(found.ce_sum) == pytest.approx(ce, rel=1e-5)
    (wanted,) = torch.autograd.grad(objective, case.hidden)
    (gradient,) = torch.autograd.grad(found.objective_sum, case.hidden)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


def test_acceptance_is_nothing_to_learn_once_the_drafter_is_the_target() -> None:
    case, tokens = Case(9), BLOCKS * SLOTS + 1
    anchors = (torch.arange(BLOCKS) * SLOTS + 1).expand(2, -1)
    states = torch.zeros(2, tokens, WIDTH)
    states[:, : BLOCKS * SLOTS] = case.hidden.detach().flatten(1, 2)  # slot k of block n reads position a + k - 1
    config = LossConfig(objective="acceptance", gamma=4.0)
    head = FrozenHead(case.head, PLAIN)
    sums = block_loss(case.hidden, case.labels, case.keep, head, loss=config, target=TargetStates(states, anchors))
    sums.objective_sum.backward()
    assert float(sums.objective_sum.detach()) == pytest.approx(0.0, abs=1e-4)
    assert case.hidden.grad is not None
    assert float(case.hidden.grad.abs().max()) < 1e-5
