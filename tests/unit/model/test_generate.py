"""Batched generation equals one prompt at a time, on every family, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import FAMILIES, VOCAB, count_calls, tiny_target

from dflash.errors import TargetError
from dflash.model.generate import generate_batch, keyed_uniform
from dflash.model.target import Target

STOP = (7, 8)


def _prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def _generate(target: Target, prompts: list[list[int]], **changes: Any) -> list[list[int]]:
    keys = changes.pop("keys", [f"prompt-{number}" for number in range(len(prompts))])
    arguments = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0, "stop_ids": STOP, **changes}
    return generate_batch(target, prompts, keys=keys, **arguments)


def _recomputed(target: Target, prompt: list[int], limit: int) -> list[int]:
    """Greedy decoding that feeds everything again at every step."""
    known: list[int] = list(prompt)
    while len(known) < len(prompt) + limit and not (len(known) > len(prompt) and known[-1] in STOP):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([known]), use_cache=False).logits
        known.append(int(logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_equals_greedy_decoding_without_cache(family: str) -> None:
    target = tiny_target(family)
    prompts = _prompts([9, 3, 14, 3, 5, 1])
    answers = _generate(target, prompts)
    assert answers == [_recomputed(target, prompt, 12) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) > 2  # a model that ignores its prompt would prove nothing


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([0.0, 0.8]))
def test_batch_equals_one_by_one(lengths: list[int], limit: int, temperature: float) -> None:
    target = TARGETS["qwen3"]
    prompts = _prompts(lengths, seed=len(lengths))
    keys = [f"key-{number}" for number in range(len(prompts))]
    together = _generate(target, prompts, keys=keys, max_new_tokens=limit, temperature=temperature)
    alone = [
        _generate(target, [prompt], keys=[key], max_new_tokens=limit, temperature=temperature)[0]
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    assert together == alone


TARGETS = {"qwen3": tiny_target("qwen3")}


def test_answers_end_with_the_first_stop_token_or_at_the_limit() -> None:
    target = TARGETS["qwen3"]
    prompts = _prompts([4] * 24, seed=5)
    answers = _generate(target, prompts, temperature=1.5, max_new_tokens=20)
    ended = [answer for answer in answers if answer[-1] in STOP]
    assert ended
    assert all(not set(answer[:-1]) & set(STOP) for answer in answers)
    assert all(len(answer) == 20 for answer in answers if answer[-1] not in STOP)


def test_samples_are_keyed_by_seed_and_prompt_key() -> None:
    target = TARGETS["qwen3"]
    prompts = _prompts([4, 4], seed=6)
    first = _generate(target, prompts, temperature=1.0)
    assert _generate(target, prompts, temperature=1.0) == first
    assert _generate(target, prompts[::-1], keys=["prompt-1", "prompt-0"], temperature=1.0) == first[::-1]
    assert _generate(target, prompts, temperature=1.0, seed=1) != first
    assert _generate(target, prompts, keys=["a", "b"], temperature=1.0) != first


def test_samples_follow_the_target_distribution() -> None:
    target = TARGETS["qwen3"]
    prompt, draws = [3, 9, 27], 1500
    answers = _generate(target, [prompt] * draws, temperature=1.3, max_new_tokens=1)
    counts = Counter(answer[0] for answer in answers)
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    expected = torch.softmax(logits.double() / 1.3, -1) * draws
    common = [token for token in range(VOCAB) if expected[token] >= 5]
    assert len(common) > 3
    chi_square = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in common)
    assert chi_square < len(common) + 5 * (2 * len(common)) ** 0.5


def test_finished_rows_are_dropped_and_shared_prefixes_are_fed_at_once() -> None:
    target = tiny_target("llama")
    calls = count_calls(target.model.get_decoder().layers)
    _generate(target, _prompts([10, 10]), max_new_tokens=4, stop_ids=())
    assert calls[0] == 4  # one prefill, then one step for each further token


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(TargetError, match="prompt 'prompt-1' is empty"):
        _generate(TARGETS["qwen3"], [[3], []])


def test_no_prompts_give_no_answers() -> None:
    assert _generate(TARGETS["qwen3"], []) == []


def test_keyed_numbers_are_uniform() -> None:
    numbers = torch.tensor([keyed_uniform(1, f"k{i}", j) for i in range(200) for j in range(20)])
    assert 0 <= float(numbers.min()) < 0.01
    assert 0.99 < float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
