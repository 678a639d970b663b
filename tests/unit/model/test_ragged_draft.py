"""Drafting several rows at once equals drafting each alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import WIDTH, drafter_config, sliding_config, tiny_drafter

from dflash.model.ragged_draft import RaggedContext, draft_ragged, refill_ragged

CONFIGS = {
    "full": drafter_config(),
    "sliding": sliding_config(),
    "sliding, not causal": sliding_config(sliding_causal=False),
    "grouped": drafter_config(num_attention_heads=4, num_key_value_heads=1),
}


def compare(name: str, steps: list[list[int]], *, block: int = 6) -> None:
    """Feed every row its own numbers of positions, step by step; each row's block equals `Drafter.draft` of the row alone."""
    drafter = tiny_drafter(CONFIGS[name]).eval()
    generator = torch.Generator().manual_seed(7)
    rows = len(steps[0])
    context = RaggedContext(rows)
    alone = [drafter.new_cache() for _ in range(rows)]
    starts = [0] * rows
    for kept in steps:
        features = torch.randn(rows, max(kept) + 1, 2 * WIDTH, generator=generator)
        embeds = torch.randn(rows, block, WIDTH, generator=generator)
        found = draft_ragged(drafter, embeds, features, context, kept)
        for row, tokens in enumerate(kept):
            starts[row] += tokens
            wanted = drafter.draft(embeds[row : row + 1], features[row : row + 1, :tokens], alone[row], starts[row])
            torch.testing.assert_close(found[row], wanted[0], atol=2e-5, rtol=2e-5)
    assert context.lengths == starts


@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_drafts_as_if_it_were_alone(name: str) -> None:
    compare(name, [[5, 12, 1], [1, 1, 1], [6, 2, 3], [1, 6, 6], [4, 4, 4]])
    compare(name, [[3, 3], [2, 2]], block=2)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_any_numbers_of_accepted_positions(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 4))
    step = st.lists(st.integers(1, 7), min_size=rows, max_size=rows)
    compare("sliding", data.draw(st.lists(step, min_size=1, max_size=4)))


def test_buffers_grow_past_their_first_capacity() -> None:
    compare("full", [[60, 3], [7, 7], [70, 1], [1, 140]])


def test_dropped_rows_leave_the_others_as_they_were() -> None:
    drafter = tiny_drafter(CONFIGS["full"]).eval()
    generator = torch.Generator().manual_seed(8)
    features = torch.randn(3, 9, 2 * WIDTH, generator=generator)
    embeds = torch.randn(3, 6, WIDTH, generator=generator)
    context = RaggedContext(3)
    draft_ragged(drafter, embeds, features, context, [9, 4, 6])
    context.select_rows([2, 0])
    more = torch.randn(2, 2, 2 * WIDTH, generator=generator)
    found = draft_ragged(drafter, embeds[:2], more, context, [1, 2])
    alone = drafter.new_cache()
    drafter.draft(embeds[:1], features[2:, :6], alone, 6)
    wanted = drafter.draft(embeds[:1], more[:1, :1], alone, 7)
    torch.testing.assert_close(found[:1], wanted, atol=2e-5, rtol=2e-5)
    assert context.lengths == [7, 11]


@pytest.mark.parametrize("name", ["full", "sliding"])
@pytest.mark.parametrize("tokens", [3, 90])
def test_a_new_row_in_an_old_ones_place_drafts_as_if_it_were_alone(name: str, tokens: int) -> None:
    """Shorter than what stood there, and longer than the buffers."""
    drafter = tiny_drafter(CONFIGS[name]).eval()
    generator = torch.Generator().manual_seed(9)
    features = torch.randn(2, 9, 2 * WIDTH, generator=generator)
    embeds = torch.randn(2, 6, WIDTH, generator=generator)
    prompt = torch.randn(1, tokens, 2 * WIDTH, generator=generator)
    more = torch.randn(2, 4, 2 * WIDTH, generator=generator)
    context = RaggedContext(2)
    draft_ragged(drafter, embeds, features, context, [9, 7])
    refill_ragged(drafter, prompt, context, row=0)
    first = draft_ragged(drafter, embeds, more, context, [0, 2])
    second = draft_ragged(drafter, embeds, more, context, [4, 1])
    assert context.lengths == [tokens + 4, 10]
    alone = [drafter.new_cache(), drafter.new_cache()]
    drafter.draft(embeds[1:], features[1:, :7], alone[1], 7)
    wanted = (
        (drafter.draft(embeds[:1], prompt, alone[0], tokens), drafter.draft(embeds[1:], more[1:, :2], alone[1], 9)),
        (drafter.draft(embeds[:1], more[:1], alone[0], tokens + 4), drafter.draft(embeds[1:], more[1:, :1], alone[1], 10)),
    )
    for found, rows in zip((first, second), wanted, strict=True):
        torch.testing.assert_close(found, torch.cat(rows), atol=2e-5, rtol=2e-5)
