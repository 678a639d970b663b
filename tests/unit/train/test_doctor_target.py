"""Checks of target and drafter: taps, mask token, vocabulary, RoPE, leaks, attention; each broken on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.config import DrafterConfig, TargetConfig
from dflash.model.attention import BlockLayout, Visibility
from dflash.model.backends import Choice, ChunkedAttention
from dflash.model.drafter import Drafter
from dflash.model.target import Target, load_target
from dflash.model.target_info import TargetInfo
from dflash.train.doctor import backends, leak
from dflash.train.doctor.backends import attention_check
from dflash.train.doctor.leak import judge_leak, leak_check, measure_leak, narrow_twin
from dflash.train.doctor.target_checks import (
    judge_mask_token,
    judge_rope,
    judge_taps,
    judge_vocabulary,
    taps_check,
    vocabulary_check,
)
from tests.support.tiny_run import VOCAB_SIZE, tiny_target

CPU = torch.device("cpu")
CHUNKED = Choice(ChunkedAttention(), "asked for")
FULL = DrafterConfig(
    num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    block_size=4, target_layer_ids=(0, 1), rope_theta=10000.0, initializer_range=0.2,
)  # fmt: skip
SLIDING = FULL.model_copy(update={"layer_types": ("sliding_attention",) * 2, "sliding_window": 5})
MIXED = FULL.model_copy(update={"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny_target(tmp_path_factory.mktemp("doctor") / "target")
    return load_target(TargetConfig(path=str(folder), mask_token_id=47), target_layer_ids=(0, 1), device=CPU)


def states_of(target: Target, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return target.model.get_decoder()(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states


def test_taps_follow_the_convention(target: Target) -> None:
    result = taps_check(target, layer_ids=(0, 1), seed=1)
    assert result.status == "ok"
    assert "[0, 1]" in result.message


def test_ids_that_count_hidden_states_are_found_with_both_numbers(target: Target) -> None:
    result = taps_check(target, layer_ids=(1, 2), seed=1)
    assert result.status == "fail"
    assert "tap 1 should be hidden_states[2] and is nearest to hidden_states[1]" in result.message
    assert "one higher" in result.remedy
    assert taps_check(target, layer_ids=(0,), seed=1).status == "fail"


def test_a_tap_that_is_no_hidden_state_at_all_is_found(target: Target) -> None:
    states = states_of(target, torch.arange(8)[None])
    assert judge_taps([states[1], states[2]], states, layer_ids=(0, 1)).status == "ok"
    assert judge_taps([states[1], states[2] * 1.1], states, layer_ids=(0, 1)).status == "fail"
    assert judge_taps([states[1], states[2] * float("nan")], states, layer_ids=(0, 1)).status == "fail"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"row": None}, "is no row"),
        ({"special": {"pad": (), "eos": (3, 47)}}, "47 is the target's eos token"),
        ({"row": torch.zeros(4)}, "has norm 0"),
        ({"row": torch.full((4,), float("nan"))}, "has norm nan"),
        ({"uses_in_data": 2}, "stands 2 times in the data set"),
    ],
)
def test_mask_tokens_that_cannot_be_one_are_found(changes: dict[str, Any], named: str) -> None:
    fine: dict[str, Any] = {"special": {"pad": (0,), "eos": (1,)}, "row": torch.ones(4), "uses_in_data": 0}
    assert judge_mask_token(47, **fine).status == "ok"
    result = judge_mask_token(47, **{**fine, **changes})
    assert (result.status, named in result.message) == ("fail", True)
    assert result.remedy


def test_the_vocabulary_of_a_loaded_target_is_measured(target: Target) -> None:
    result = vocabulary_check(target, tokenizer_size=40, manifest_vocab_size=VOCAB_SIZE)
    assert result.status == "ok"
    assert result.message == "48 rows, 8 of them padding; head tied"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": (48, 40)}, "48 and 40 rows"),
        ({"tokenizer_size": 49}, "knows 49 tokens"),
        ({"manifest_vocab_size": 64}, "made for 64 rows"),
    ],
)
def test_wrong_vocabularies_are_found(changes: dict[str, Any], named: str, target: Target) -> None:
    fine: dict[str, Any] = {"rows": (48, 48), "tied": False, "tokenizer_size": 48, "manifest_vocab_size": None}
    assert judge_vocabulary(target.info, **fine).status == "ok"
    result = judge_vocabulary(target.info, **{**fine, **changes})
    assert (result.status, named in result.message) == ("fail", True)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"rope_theta": 500.0}, "warn"),
        ({"rope_theta": None}, "warn"),
        ({"target_positions": 200}, "fail"),
        ({"longest_tokens": 1025}, "warn"),
    ],
)
def test_rope_and_positions_are_compared(changes: dict[str, Any], status: str) -> None:
    found: dict[str, Any] = {"rope_theta": 10000.0, "target_positions": None, "longest_tokens": 300, **changes}
    assert judge_rope(FULL, **found).status == status


@pytest.mark.parametrize("config", [FULL, SLIDING, MIXED], ids=["full", "sliding", "mixed"])
def test_the_drafter_does_not_leak(config: DrafterConfig) -> None:
    result = leak_check(config, target_hidden_size=16, attention=ChunkedAttention(), device=CPU, seed=1)
    assert (result.status, result.remedy) == ("ok", "")


class SeesItsAnchor(Drafter):
    """Attention with `<=` where `<` belongs."""

    def forward(self, features: torch.Tensor, block_embeds: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor) -> Any:
        return super().forward(features, block_embeds, anchors + 1, keep)


class SeesOtherBlocks(Drafter):
    """Blocks that are not kept apart."""

    def forward(self, features: torch.Tensor, block_embeds: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor) -> Any:
        return super().forward(features, block_embeds + 0.01 * block_embeds.mean(1, keepdim=True), anchors, keep)


class SeesNothing(Drafter):
    """A drafter that ignores its context."""

    def forward(self, features: torch.Tensor, block_embeds: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor) -> Any:
        return super().forward(torch.zeros_like(features), block_embeds, anchors, keep)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (SeesItsAnchor, "at or behind its anchor"),
        (SeesOtherBlocks, "or another block"),
        (SeesNothing, "when the token before its anchor changes"),
    ],
)
def test_a_broken_attention_is_found(kind: type[Drafter], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak, "Drafter", kind)
    result = leak_check(FULL, target_hidden_size=16, attention=ChunkedAttention(), device=CPU, seed=1)
    assert result.status == "fail"
    assert named in result.message


def test_values_that_are_no_numbers_never_pass() -> None:
    nan = float("nan")
    assert judge_leak(nan, 1.0, context_is_visible=True, note="").status == "fail"
    assert judge_leak(0.0, nan, context_is_visible=True, note="").status == "fail"
    assert judge_leak(0.0, 0.0, context_is_visible=False, note="").status == "ok"


def test_a_large_drafter_is_stood_in_for_by_a_twin_with_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak, "MAX_CPU_PARAMETERS", 10)
    result = leak_check(MIXED, target_hidden_size=16, attention=ChunkedAttention(), device=CPU, seed=1)
    assert result.status == "ok"
    assert "narrow twin" in result.message
    twin = narrow_twin(MIXED)
    kept = ("num_hidden_layers", "layer_types", "sliding_window", "sliding_causal", "block_size", "target_layer_ids")
    assert all(getattr(twin, key) == getattr(MIXED, key) for key in kept)
    DrafterConfig.model_validate(twin.model_dump())


def test_the_leak_is_measured_per_block() -> None:
    drafter = Drafter(FULL, target_hidden_size=16)
    drafter.init_weights(0)
    forbidden, needed = measure_leak(drafter.eval(), seed=0)
    assert forbidden < 1e-6
    assert needed > 1e-3


@pytest.mark.parametrize("config", [FULL, MIXED], ids=["full", "mixed"])
def test_a_block_alone_equals_the_block_among_others(config: DrafterConfig) -> None:
    result = attention_check(config, choice=CHUNKED, device=CPU, seed=1)
    assert result.status == "ok"
    assert "chunked on cpu (asked for)" in result.message


def test_a_backend_that_mixes_blocks_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "Drafter", SeesOtherBlocks)
    result = attention_check(FULL, choice=CHUNKED, device=CPU, seed=1)
    assert result.status == "fail"
    assert "mixes blocks up" in result.remedy


class LooksAhead(ChunkedAttention):
    """A backend whose chunks see one context token too many."""

    def context_tokens(self, anchors: torch.Tensor, *, available: int) -> int:
        return available

    def plan(self, layout: BlockLayout, *, visibility: Visibility, dtype: torch.dtype) -> Any:
        return super().plan(layout._replace(anchors=layout.anchors + 1), visibility=visibility, dtype=dtype)


def test_a_leaking_backend_is_found() -> None:
    result = leak_check(FULL, target_hidden_size=16, attention=LooksAhead(), device=CPU, seed=1)
    assert result.status == "fail"
    assert "at or behind its anchor" in result.message


def test_a_backend_that_compiles_is_reported_with_its_reason() -> None:
    class Compiled:
        name = "flex"

    result = attention_check(FULL, choice=Choice(Compiled(), "agrees with chunked"), device=CPU, seed=1)  # type: ignore[arg-type]
    assert (result.status, result.message) == ("ok", "flex: agrees with chunked")


def test_the_info_of_the_tiny_target_is_what_the_checks_compare_with(target: Target, tmp_path: Path) -> None:
    assert isinstance(target.info, TargetInfo)
    assert target.info.vocab_size == VOCAB_SIZE
