"""Anchors and labels against the rules written slowly."""

from __future__ import annotations

from collections import Counter

import model_naive as naive
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.config import AnchorConfig
from dflash.model.anchors import AnchorSet, block_labels, block_token_ids, covered_tokens, sample_anchors

MANY = AnchorConfig(per_supervised_token=1.0, max_per_sequence=100, max_per_batch=1000)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Loss masks [B, S] (true also behind some lengths, as padding might be) and lengths [B]."""
    tokens = draw(st.integers(2, 24))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=1, max_size=5))
    lengths = [draw(st.integers(1, tokens)) for _ in rows]
    return torch.tensor(rows), torch.tensor(lengths)


def _candidates(mask: list[bool], length: int) -> list[int]:
    return [a for a in range(length - 1) if mask[a] and mask[a + 1]]


@QUICK
@given(batches(), st.integers(0, 5), st.floats(0.05, 1.0), st.integers(1, 6), st.integers(1, 12))
def test_draws_keep_every_rule(batch: tuple[Tensor, Tensor], seed: int, share: float, by_row: int, by_batch: int) -> None:
    mask, lengths = batch
    config = AnchorConfig(per_supervised_token=share, max_per_sequence=by_row, max_per_batch=by_batch)
    positions, keep = sample_anchors(mask, lengths, anchors=config, seed=seed, epoch=1, batch_id=2)
    assert positions.shape == keep.shape
    assert positions.shape[1] == max(1, int(keep.sum(1).max()))
    assert int(keep.sum()) <= by_batch
    for row, flags, chosen, length in zip(mask.tolist(), keep.tolist(), positions.tolist(), lengths.tolist(), strict=True):
        count = sum(flags)
        kept = chosen[:count]
        assert flags == [True] * count + [False] * (len(flags) - count)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(_candidates(row, length))
        assert count <= by_row
        assert chosen[count:] == [kept[-1] if kept else 0] * (len(flags) - count)


@QUICK
@given(batches())
def test_without_caps_every_candidate_is_drawn(batch: tuple[Tensor, Tensor]) -> None:
    mask, lengths = batch
    positions, keep = sample_anchors(mask, lengths, anchors=MANY, seed=0, epoch=0, batch_id=0)
    for row, flags, chosen, length in zip(mask.tolist(), keep, positions, lengths.tolist(), strict=True):
        assert chosen[flags].tolist() == _candidates(row, length)


def test_draw_depends_on_its_key_alone() -> None:
    mask, lengths = torch.ones(3, 64, dtype=torch.bool), torch.tensor([64, 60, 9])
    config = AnchorConfig(per_supervised_token=0.3, max_per_sequence=8, max_per_batch=99)

    def draw(**key: int) -> Tensor:
        torch.rand(5)  # a stateful generator must not matter
        return sample_anchors(mask, lengths, anchors=config, **{"seed": 1, "epoch": 2, "batch_id": 3, **key}).positions

    assert torch.equal(draw(), draw())
    assert not any(torch.equal(draw(), draw(**{name: 9})) for name in ("seed", "epoch", "batch_id"))


def test_number_of_anchors_is_proportional_to_supervised_tokens() -> None:
    mask = torch.zeros(3, 200, dtype=torch.bool)
    mask[0, :100], mask[1, :50], mask[2, :3] = True, True, True
    config = AnchorConfig(per_supervised_token=0.2, max_per_sequence=64, max_per_batch=999)
    lengths = torch.full((3,), 200)
    assert sample_anchors(mask, lengths, anchors=config, seed=0, epoch=0, batch_id=0).keep.sum(1).tolist() == [20, 10, 1]
    capped = config.model_copy(update={"max_per_batch": 16})
    assert sample_anchors(mask, lengths, anchors=capped, seed=0, epoch=0, batch_id=0).keep.sum(1).tolist() == [10, 5, 1]


def test_every_candidate_is_equally_likely() -> None:
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 2:12] = True
    config = AnchorConfig(per_supervised_token=0.2, max_per_sequence=9, max_per_batch=9)
    draws = 3000
    counts: Counter[int] = Counter()
    for batch_id in range(draws):
        anchors = sample_anchors(mask, torch.tensor([12]), anchors=config, seed=0, epoch=0, batch_id=batch_id)
        counts.update(anchors.positions[anchors.keep].tolist())
    assert sorted(counts) == list(range(2, 11))
    expected = draws * 2 / 9
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_a_sequence_without_two_supervised_tokens_in_a_row_has_no_anchor() -> None:
    mask = torch.tensor([[True, False, True, False], [False, True, True, False]])
    positions, keep = sample_anchors(mask, torch.tensor([4, 4]), anchors=MANY, seed=0, epoch=0, batch_id=0)
    assert keep.tolist() == [[False], [True]]
    assert positions.tolist() == [[0], [1]]


@QUICK
@given(batches(), st.integers(2, 6), st.data())
def test_labels_equal_the_rule_written_slowly(batch: tuple[Tensor, Tensor], block_size: int, data: st.DataObject) -> None:
    mask, lengths = batch
    rows, tokens = mask.shape
    ids = torch.arange(100, 100 + rows * tokens).view(rows, tokens)
    anchor = st.integers(0, tokens - 1)
    positions = torch.tensor(data.draw(st.lists(st.tuples(anchor, anchor), min_size=rows, max_size=rows)))
    keep = torch.tensor(data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=rows, max_size=rows)))
    labels, valid = block_labels(ids, mask, lengths, AnchorSet(positions, keep), block_size=block_size)
    for b in range(rows):
        for n in range(2):
            wanted = naive.labels(ids[b].tolist(), mask[b].tolist(), int(lengths[b]), int(positions[b, n]), block_size)
            if not keep[b, n]:
                wanted = ([0] * block_size, [False] * block_size)
            assert (labels[b, n].tolist(), valid[b, n].tolist()) == wanted


def test_blocks_may_overhang_the_end_and_stop_at_the_first_unsupervised_token() -> None:
    ids = torch.arange(10, 20).unsqueeze(0)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
    anchors = AnchorSet(torch.tensor([[2, 5, 8]]), torch.ones(1, 3, dtype=torch.bool))
    labels, valid = block_labels(ids, mask, torch.tensor([10]), anchors, block_size=4)
    assert labels.tolist() == [[[0, 13, 0, 0], [0, 16, 17, 18], [0, 19, 0, 0]]]
    assert valid.tolist() == [[[False, True, False, False], [False, True, True, True], [False, True, False, False]]]
    assert bool(mask[0, 2])  # the caller's mask is left as it was


def test_block_tokens_are_the_anchor_and_masks() -> None:
    ids = torch.arange(10, 20).unsqueeze(0)
    anchors = AnchorSet(torch.tensor([[2, 9]]), torch.tensor([[True, True]]))
    assert block_token_ids(ids, anchors, block_size=3, mask_token_id=99).tolist() == [[[12, 99, 99], [19, 99, 99]]]


@QUICK
@given(batches(), st.integers(2, 6), st.floats(0.05, 1.0))
def test_coverage_counts_every_predicted_token_once(batch: tuple[Tensor, Tensor], block_size: int, share: float) -> None:
    mask, lengths = batch
    config = AnchorConfig(per_supervised_token=share, max_per_sequence=5, max_per_batch=9)
    anchors = sample_anchors(mask, lengths, anchors=config, seed=3, epoch=0, batch_id=1)
    ids = torch.arange(mask.numel()).view_as(mask) + 1  # every token its own id, so labels name positions
    labels = block_labels(ids, mask, lengths, anchors, block_size=block_size)
    found = covered_tokens(labels, anchors, tokens=mask.shape[1])
    assert found == len(set(labels.labels[labels.valid].tolist()))
    assert found <= int(mask.sum())


def test_enough_anchors_cover_every_token_that_can_be_predicted() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1]]).bool()
    lengths = torch.tensor([12])
    anchors = sample_anchors(mask, lengths, anchors=MANY, seed=0, epoch=0, batch_id=0)
    labels = block_labels(torch.ones_like(mask, dtype=torch.long), mask, lengths, anchors, block_size=4)
    # All but the first token of each run: 4 of 5, 0 of 1, 2 of 3.
    assert covered_tokens(labels, anchors, tokens=12) == 6


def test_every_set_of_candidates_is_equally_likely() -> None:
    """Chi-square over whole sets, not only over single places: neighbours neither attract nor repel each other."""
    mask = torch.ones(1, 7, dtype=torch.bool)
    config = AnchorConfig(per_supervised_token=0.4, max_per_sequence=9, max_per_batch=9)
    draws, counts = 3000, Counter[tuple[int, ...]]()
    for batch_id in range(draws):
        anchors = sample_anchors(mask, torch.tensor([7]), anchors=config, seed=11, epoch=0, batch_id=batch_id)
        counts[tuple(anchors.positions[anchors.keep].tolist())] += 1
    assert len(counts) == 20  # 3 of 6
    expected = draws / 20
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 43.8  # 0.1 % at 19 degrees of freedom


def test_batches_of_one_epoch_and_epochs_of_one_batch_are_independent() -> None:
    """Keys that differ in one number give unrelated draws: two of them agree as often as chance has it."""
    mask, length = torch.ones(1, 41, dtype=torch.bool), torch.tensor([41])
    config = AnchorConfig(per_supervised_token=0.24, max_per_sequence=10, max_per_batch=10)

    def drawn(seed: int, epoch: int, batch_id: int) -> set[int]:
        return set(sample_anchors(mask, length, anchors=config, seed=seed, epoch=epoch, batch_id=batch_id).positions[0].tolist())

    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1)):
        shared = []
        for number in range(150):
            key = (number % 7 + 1, number % 5 + 1, number + 1)
            one, two = drawn(*key), drawn(*(part + move for part, move in zip(key, step, strict=True)))
            shared.append(len(one & two))
        assert abs(sum(shared) / len(shared) - 2.5) < 0.5, f"10 of 40 twice share 2.5 on average; keys apart by {step} do not"


@QUICK
@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.integers(1, 40), st.floats(0.05, 1.0))
def test_the_batch_cap_is_met_exactly_and_shares_stay_within_one_of_proportional(
    lengths: list[int], cap: int, share: float
) -> None:
    mask = torch.arange(30) < torch.tensor(lengths).unsqueeze(1)
    free = AnchorConfig(per_supervised_token=share, max_per_sequence=30, max_per_batch=10_000)
    wanted = sample_anchors(mask, torch.tensor(lengths), anchors=free, seed=0, epoch=0, batch_id=0).keep.sum(1)
    capped = free.model_copy(update={"max_per_batch": cap})
    found = sample_anchors(mask, torch.tensor(lengths), anchors=capped, seed=0, epoch=0, batch_id=0).keep.sum(1)
    assert int(found.sum()) == min(cap, int(wanted.sum()))
    if cap < int(wanted.sum()):
        exact = wanted.double() * cap / wanted.sum()
        assert float((found - exact).abs().max()) < 1.0
    assert bool((found <= wanted).all())
