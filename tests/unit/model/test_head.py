"""The tiled head against whole logits and autograd, for every rule that a target may have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from dflash.model import head as head_module
from dflash.model.head import FrozenHead, label_rows
from dflash.model.logit_rule import LogitRule
from dflash.train import footprint

RULES = st.builds(LogitRule, scale=st.sampled_from([1.0, 0.0625, 3.0]), soft_cap=st.sampled_from([None, 1.5, 30.0]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    vocab=st.integers(2, 70),
    width=st.integers(1, 9),
    count=st.integers(0, 12),
    chunk_rows=st.integers(1, 14),
    columns=st.integers(1, 80),
    rule=RULES,
    seed=st.integers(0, 99),
)
def test_any_tile_gives_the_cross_entropy_and_gradient_of_whole_logits(
    vocab: int, width: int, count: int, chunk_rows: int, columns: int, rule: LogitRule, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = (3 * torch.randn(15, width, generator=generator)).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator)
    rows = torch.randint(15, (count,), generator=generator)
    targets = torch.randint(vocab, (count,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "TILE_COLUMNS", {"cpu": columns})
        found = label_rows(hidden.detach(), rows, targets, FrozenHead(weight, rule), chunk_rows=chunk_rows)
    inputs = hidden[rows]
    logits = rule.apply(inputs @ weight.T)
    ce = functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found.ce, ce.detach(), atol=2e-5, rtol=2e-5)
    if count:
        (wanted,) = torch.autograd.grad(ce.sum(), inputs)
        torch.testing.assert_close(found.pull, wanted, atol=2e-5, rtol=2e-5)
        margin = (logits.detach().gather(1, targets[:, None])[:, 0] - logits.detach().amax(1)).abs()
        clear = (margin == 0) | (margin > 1e-4)
        assert torch.equal(found.correct[clear], (margin == 0)[clear])


def test_a_label_that_ties_with_the_best_counts_as_correct() -> None:
    weight = torch.tensor([[1.0], [1.0], [0.5]])
    rule = LogitRule(scale=1.0, soft_cap=None)
    found = label_rows(torch.ones(1, 1), torch.zeros(3, dtype=torch.long), torch.arange(3), FrozenHead(weight, rule), chunk_rows=2)
    assert found.correct.tolist() == [True, True, False]


def test_sums_over_tiles_stay_in_float32_when_the_head_is_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "TILE_COLUMNS", {"cpu": 16})
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 12), torch.randn(4096, 12) * 0.1, torch.randint(4096, (9,))
    rule, rows = LogitRule(scale=1.0, soft_cap=None), torch.arange(9)
    wanted = label_rows(hidden, rows, targets, FrozenHead(weight, rule), chunk_rows=4)
    found = label_rows(hidden, rows, targets, FrozenHead(weight.bfloat16(), rule), chunk_rows=4)
    assert found.ce.dtype == torch.float32
    torch.testing.assert_close(found.ce, wanted.ce, atol=0.02, rtol=0.01)
    torch.testing.assert_close(found.pull.float(), wanted.pull, atol=0.01, rtol=0.03)


def test_the_memory_plan_knows_the_tile() -> None:
    assert footprint.TILE_COLUMNS == head_module.TILE_COLUMNS
