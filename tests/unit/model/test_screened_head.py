"""The screened argmax is the float32 argmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.model import screened_head
from dflash.model.screened_head import BLOCK_TOKENS, ScreenedHead, screening_pays


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 40), st.sampled_from([3, 32, 64]), st.floats(0.01, 30))
def test_it_finds_the_largest_float32_logit(seed: int, rows: int, blocks: int, width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(blocks * BLOCK_TOKENS, width, generator=generator)
    hidden = torch.randn(rows, width, generator=generator) * scale
    found = ScreenedHead(head).argmax(hidden)
    logits = hidden.double() @ head.double().T
    lost = logits.max(1).values - logits.gather(1, found[:, None])[:, 0]
    assert float(lost.max()) <= 1e-6 * width * float(logits.abs().max())


def test_near_ties_that_bfloat16_cannot_tell_apart_are_decided_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(32, generator=generator)
    head = base.repeat(40 * BLOCK_TOKENS, 1)
    winner = 411
    head[winner] += base * 1e-4
    assert len(head.bfloat16().unique(dim=0)) <= 2
    assert ScreenedHead(head).argmax(base[None]).tolist() == [winner]


def test_of_equal_logits_the_first_is_taken() -> None:
    head = torch.zeros(3 * BLOCK_TOKENS, 4)
    head[[7, 20, 44]] = 1.0
    assert ScreenedHead(head).argmax(torch.ones(2, 4)).tolist() == [7, 7]
    assert ScreenedHead(torch.zeros(2 * BLOCK_TOKENS, 4)).argmax(torch.ones(1, 4)).tolist() == [0]


def test_without_packed_weights_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.randn(20 * BLOCK_TOKENS, 16, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    packed = ScreenedHead(head).argmax(hidden)

    class Missing:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"no {name} here")

    monkeypatch.setattr(screened_head.torch.ops, "mkldnn", Missing())
    assert torch.equal(ScreenedHead(head).argmax(hidden), packed)


def test_small_half_precision_and_odd_heads_are_not_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    large = torch.zeros(32_000, 128)
    assert screening_pays(large)
    assert not screening_pays(large[:-1]) and not screening_pays(large[:1600]) and not screening_pays(large.bfloat16())
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not screening_pays(large)
