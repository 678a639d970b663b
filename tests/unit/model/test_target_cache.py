"""Rolling the target's cache back: the state test on every family, with controls that must fail."""

from __future__ import annotations

import pytest
import torch
from model_fixtures import FAMILIES, VOCAB, tiny_target

from dflash.errors import TargetError
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

BLOCK = 6
TEXT = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))
TOLERANCE = 1e-3  # relative; the worst seen is 1e-4 on gated-delta layers


def _feed(target: Target, cache: TargetCache, ids: torch.Tensor) -> torch.Tensor:
    first = cache.length_tokens
    logits, _ = target.forward_cached(ids, cache, torch.arange(first, first + ids.shape[1]).unsqueeze(0))
    return logits


def _verify(target: Target, cache: TargetCache, accepted: int, *, seed: int) -> None:
    """Feed a block whose first `accepted` tokens are the text's, and reject the rest."""
    block = torch.randint(VOCAB, (1, BLOCK), generator=torch.Generator().manual_seed(seed))
    first = cache.length_tokens
    block[:, :accepted] = TEXT[:, first : first + accepted]
    _feed(target, cache, block)
    target.crop(cache, BLOCK - accepted)
    assert cache.length_tokens == first + accepted


def _distance(target: Target, cache: TargetCache) -> float:
    """How far the next two tokens' logits are from those behind a fresh cache of the committed text."""
    first = cache.length_tokens
    found = _feed(target, cache, TEXT[:, first : first + 2])
    fresh = target.new_cache()
    _feed(target, fresh, TEXT[:, :first])
    wanted = _feed(target, fresh, TEXT[:, first : first + 2])
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_after_forced_acceptances_equals_a_fresh_one(family: str) -> None:
    target = tiny_target(family)
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :5])
    for number, accepted in enumerate([3, 6, 1, 0, 4, 6, 2, 5]):
        _verify(target, cache, accepted, seed=number)
    assert _distance(target, cache) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_steps_between_verifications_are_settled(family: str) -> None:
    target = tiny_target(family)
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :9])
    for number in range(4):
        _verify(target, cache, 2, seed=number)
        _feed(target, cache, TEXT[:, cache.length_tokens : cache.length_tokens + 1])
    assert _distance(target, cache) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "lfm2"])
def test_leaving_rejected_tokens_in_place_is_seen(family: str) -> None:
    """Negative control: the state test must fail when nothing is cropped."""
    target = tiny_target(family)
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :5])
    _feed(target, cache, torch.randint(VOCAB, (1, BLOCK), generator=torch.Generator().manual_seed(0)))
    first = cache.length_tokens
    found = _feed(target, cache, TEXT[:, first : first + 2])
    fresh = target.new_cache()
    _feed(target, fresh, TEXT[:, :first])
    wanted = _feed(target, fresh, TEXT[:, first : first + 2])
    assert float((found - wanted).abs().max() / wanted.abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_cropping_without_restoring_the_linear_state_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: attention layers cropped, recurrent state left dirty."""
    target = tiny_target(family)
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :5])
    monkeypatch.setattr(cache, "_restore_linear", lambda: None)
    for number in range(3):
        _verify(target, cache, 2, seed=number)
    assert _distance(target, cache) > 10 * TOLERANCE


def test_dropping_rows_keeps_the_others() -> None:
    target = tiny_target("qwen3_5")
    ids = torch.cat((TEXT[:, :8], TEXT[:, 8:16], TEXT[:, 16:24]))
    together, alone = target.new_cache(), target.new_cache()
    target.forward_cached(ids, together, torch.arange(8).expand(3, -1))
    together.select_rows(torch.tensor([2, 0]))
    target.forward_cached(ids[2:], alone, torch.arange(8).unsqueeze(0))
    found, _ = target.forward_cached(TEXT[:, 30:31].expand(2, 1), together, torch.full((2, 1), 8))
    wanted, _ = target.forward_cached(TEXT[:, 30:31], alone, torch.full((1, 1), 8))
    torch.testing.assert_close(found[:1], wanted, atol=1e-3, rtol=1e-3)


def test_cropping_more_than_was_fed_is_refused() -> None:
    target = tiny_target("qwen3")
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :5])
    _feed(target, cache, TEXT[:, 5:8])
    for wrong in (4, -1):
        with pytest.raises(TargetError, match=f"cannot remove {wrong} tokens: the latest forward fed 3"):
            target.crop(cache, wrong)
    target.crop(cache, 2)
    with pytest.raises(TargetError, match="the latest forward fed 1"):
        target.crop(cache, 2)


def test_a_linear_target_cannot_crop_its_prefill() -> None:
    target = tiny_target("qwen3_5")
    cache = target.new_cache()
    _feed(target, cache, TEXT[:, :5])
    with pytest.raises(TargetError, match="right after a forward of several tokens"):
        target.crop(cache, 1)
