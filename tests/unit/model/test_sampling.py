"""Greedy and keyed choices of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.model.sampling import GREEDY, Sampling, choose, greedy_choice, inverse_cdf, keyed_uniform, keyed_uniforms, probabilities

CPU = torch.device("cpu")


def test_greedy_takes_the_first_of_equal_logits_in_every_dtype() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, -1.0, 2.0, 2.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert greedy_choice(logits.to(dtype)).tolist() == [1, 0]
    assert greedy_choice(logits[:, None, :]).shape == (2, 1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 70))
def test_greedy_equals_the_librarys_argmax(seed: int, rows: int, vocab: int) -> None:
    logits = torch.randint(-3, 4, (rows, 2, vocab), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(greedy_choice(logits), logits.argmax(-1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_counts_up_to_the_uniform_number(weights: list[int], uniform: float) -> None:
    found = int(inverse_cdf(torch.tensor(weights, dtype=torch.float64), torch.tensor(uniform, dtype=torch.float64)))
    wanted = next(index for index in range(len(weights)) if sum(weights[: index + 1]) > uniform * sum(weights))
    assert found == wanted and weights[found] > 0


def test_keyed_numbers_do_not_depend_on_the_batch_or_on_how_many_are_drawn() -> None:
    together = keyed_uniforms(5, ["a", "b"], [3, 7], 4, device=CPU)
    assert together.shape == (2, 4) and together.dtype == torch.float64
    assert together[1, 2] == keyed_uniform(5, "b", 9)
    assert torch.equal(keyed_uniforms(5, ["b"], [8], 2, device=CPU)[0], together[1, 1:3])
    assert keyed_uniforms(5, ["a"], [0], 0, device=CPU).shape == (1, 0)
    assert len({keyed_uniform(seed, key, place) for seed in (1, 2) for key in ("a", "b") for place in (0, 1)}) == 8


def test_samples_of_a_block_are_those_of_its_positions_one_by_one() -> None:
    logits = torch.randn(2, 5, 17, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.7, seed=3)
    block = choose(logits, sampling, keys=["x", "y"], firsts=[2, 9])
    singly = [
        [int(choose(logits[row : row + 1, [at]], sampling, keys=[key], firsts=[first + at])) for at in range(5)]
        for row, (key, first) in enumerate([("x", 2), ("y", 9)])
    ]
    assert block.tolist() == singly
    assert torch.equal(choose(logits, GREEDY, keys=(), firsts=()), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 4000
    sampling = Sampling(temperature, seed=1)
    found = choose(logits.expand(draws, 1, -1), sampling, keys=[f"k{i}" for i in range(draws)], firsts=[0] * draws)
    counts = torch.bincount(found.flatten(), minlength=4).double()
    expected = probabilities(logits, temperature) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 0.1 % of chi-square with 3 degrees of freedom
