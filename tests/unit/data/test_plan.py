"""The whole plan: every sample once an epoch, budgets and runs kept, the same for the same seed, whatever the order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import DEMO, EDGES, demo_lengths, longest_run_of, plan_of, samples_of

from dflash.config import PlanConfig
from dflash.data.plan import BatchPlan, build_plan
from dflash.data.plan_build import Planner
from dflash.errors import DataError
from tests.support.plans import positions_of_epoch

PLANS = st.builds(
    PlanConfig,
    tokens_per_batch=st.sampled_from([256, 300, 1024]),
    max_sequences=st.sampled_from([1, 5, 64]),
    pad_multiple_tokens=st.sampled_from([1, 4, 8]),
    max_padded_lengths=st.sampled_from([None, 1, 4]),
    sort_window_samples=st.sampled_from([None, 7, 50]),
    max_bucket_run=st.integers(1, 3),
    order=st.sampled_from(["interleave", "shuffle", "sorted", "random"]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=150),
    plan=PLANS,
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2),
)
def test_any_plan_keeps_its_promises(lengths: list[int], plan: PlanConfig, epochs: int, seed: int) -> None:
    batches = plan_of(lengths, plan=plan, seed=seed, epochs=epochs)
    buckets = samples_of(lengths).buckets
    assert [batch.position for batch in batches] == list(range(len(batches)))
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)
    for epoch in range(epochs):
        rows = [row for position in positions_of_epoch(batches, epoch) for row in batches[position].rows]
        assert sorted(rows) == list(range(len(lengths))), "every sample exactly once an epoch"
    for batch in batches:
        own = [lengths[row] for row in batch.rows]
        mine = {int(buckets[row]) for row in batch.rows}
        assert batch.bucket == max(mine)
        assert plan.order == "random" or len(mine) == 1
        assert batch.padded_length_tokens % plan.pad_multiple_tokens == 0
        assert batch.padded_length_tokens >= max(own)
        if plan.max_padded_lengths is None:
            assert batch.padded_length_tokens - max(own) < plan.pad_multiple_tokens
        assert len(own) * batch.padded_length_tokens <= plan.tokens_per_batch
        assert len(own) <= plan.max_sequences
        assert batches.epoch_of(batch.position) == batch.epoch
        assert batches.padded_tokens_of(batch.position) == len(batch.rows) * batch.padded_length_tokens
        assert batches.bucket_of(batch.position) == batch.bucket
    check_manifest(batches, lengths, plan)


def check_manifest(batches: BatchPlan, lengths: list[int], plan: PlanConfig) -> None:
    manifest, epochs = batches.manifest, batches.manifest.epochs
    widths = {batch.padded_length_tokens for batch in batches}
    assert manifest.batches == len(batches) == sum(manifest.batches_per_epoch)
    assert manifest.tokens == epochs * sum(lengths)
    assert manifest.padded_tokens == sum(len(batch.rows) * batch.padded_length_tokens for batch in batches)
    assert manifest.padding_efficiency == manifest.tokens / manifest.padded_tokens
    assert widths <= set(manifest.padded_lengths_tokens)
    assert plan.max_padded_lengths is None or len(manifest.padded_lengths_tokens) <= plan.max_padded_lengths
    assert manifest.longest_bucket_run == longest_run_of(list(batches))
    if plan.order == "interleave" and plan.sort_window_samples is None:
        assert manifest.longest_bucket_run <= manifest.bucket_run_limit
        assert manifest.bucket_run_feasible == (manifest.bucket_run_limit == plan.max_bucket_run)


@pytest.mark.parametrize("seed", range(4))
def test_demo_like_lengths_are_packed_at_95_percent_in_runs_of_three(seed: int) -> None:
    plan = plan_of(demo_lengths(1000, seed), seed=seed, epochs=4)
    assert plan.manifest.padding_efficiency >= 0.95
    assert longest_run_of(list(plan)) <= 3
    assert plan.manifest.bucket_run_feasible
    assert "runs of at most 3 are feasible" in plan.manifest.bucket_run_note


def companies(plan: BatchPlan, epoch: int) -> set[frozenset[int]]:
    return {frozenset(plan[position].rows) for position in positions_of_epoch(plan, epoch)}


@pytest.mark.parametrize(
    "changed", [{}, {"sort_window_samples": 40}, {"order": "random"}, {"order": "shuffle"}, {"order": "sorted"}]
)
def test_epochs_differ_in_company_and_order_and_the_plan_is_repeatable(changed: dict[str, object]) -> None:
    lengths, settings_ = demo_lengths(400), DEMO.model_copy(update=changed)
    plan = plan_of(lengths, plan=settings_)
    assert list(plan) == list(plan_of(lengths, plan=settings_))
    assert plan.manifest == plan_of(lengths, plan=settings_).manifest
    other = plan_of(lengths, plan=settings_, seed=4)
    assert plan.manifest.plan_sha256 != other.manifest.plan_sha256
    assert companies(plan, 0) != companies(plan, 1)
    assert companies(plan, 0) != companies(other, 0)


def test_a_longer_run_starts_with_the_same_epochs() -> None:
    lengths = demo_lengths(400)
    two, three = plan_of(lengths, epochs=2), plan_of(lengths, epochs=3)
    assert list(two) == list(three)[: len(two)]


def test_orders_are_what_they_say() -> None:
    lengths = demo_lengths(600)
    by_order = {
        order: list(plan_of(lengths, plan=DEMO.model_copy(update={"order": order}), epochs=1))
        for order in ("interleave", "shuffle", "sorted")
    }
    widths = [batch.padded_length_tokens for batch in by_order["sorted"]]
    assert widths == sorted(widths)
    sizes = [Counter((b.bucket, b.padded_length_tokens, len(b.rows)) for b in batches) for batches in by_order.values()]
    assert sizes[0] == sizes[1] == sizes[2], "the same packing in another order"
    assert [b.bucket for b in by_order["shuffle"]] != [b.bucket for b in by_order["interleave"]]


def test_ignoring_lengths_costs_padding_and_a_window_costs_little() -> None:
    lengths = demo_lengths(4000)

    def efficiency(**changed: object) -> float:
        return plan_of(lengths, plan=DEMO.model_copy(update=changed), epochs=1).manifest.padding_efficiency

    assert efficiency(order="random") < 0.7
    assert efficiency() - 0.05 < efficiency(sort_window_samples=200) < efficiency()
    assert 0.85 < efficiency(max_padded_lengths=6) < efficiency()


def test_epochs_are_made_one_at_a_time() -> None:
    samples = samples_of(demo_lengths(50))
    epochs = Planner(samples.lengths, samples.buckets, plan=DEMO, seed=0, epochs=10**9).epochs()
    assert len(next(epochs).rows) == len(next(epochs).rows) == 50


def test_a_large_corpus_is_planned_in_bulk() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(90), 0.8, 300_000)), 24, 256).astype(np.int32)
    plan = plan_of(lengths, plan=DEMO.model_copy(update={"tokens_per_batch": 32_768, "max_sequences": 1024}), epochs=1)
    assert np.array_equal(np.sort(plan.epochs[0].rows), np.arange(len(lengths)))
    assert plan.epochs[0].rows.dtype == np.uint32
    assert plan.manifest.padding_efficiency > 0.95
    assert plan.manifest.longest_bucket_run <= 3


def test_an_infeasible_limit_is_declared_with_its_reason() -> None:
    plan = plan_of([16] * 64 + [60], plan=DEMO.model_copy(update={"max_sequences": 8, "max_bucket_run": 2}), epochs=1)
    manifest = plan.manifest
    assert (manifest.bucket_run_feasible, manifest.bucket_run_limit, manifest.longest_bucket_run) == (False, 4, 4)
    assert manifest.bucket_run_note == (
        "runs of at most 2 are not feasible: bucket 0 has 8 of 9 batches an epoch, 1 of others; 4 is the shortest"
    )
    alone = plan_of([16] * 64, epochs=1).manifest
    assert alone.longest_bucket_run == alone.batches
    assert not plan_of([16] * 640, epochs=1).manifest.bucket_run_feasible
    shuffled = plan_of([16] * 64, plan=DEMO.model_copy(update={"order": "shuffle"})).manifest
    assert shuffled.bucket_run_limit == 0
    assert "keeps no limit" in shuffled.bucket_run_note


def test_a_position_outside_is_an_error() -> None:
    plan = plan_of(demo_lengths(30))
    for position in (-1, len(plan)):
        with pytest.raises(IndexError, match="the plan has the positions"):
            plan[position]


def test_a_sample_that_fits_no_batch_is_named() -> None:
    with pytest.raises(DataError, match=r"254 tokens, padded to 256, exceeds plan\.tokens_per_batch 255"):
        plan_of([30, 254], plan=DEMO.model_copy(update={"tokens_per_batch": 255}))


def test_nothing_to_plan_is_an_error() -> None:
    with pytest.raises(DataError, match="no sample"):
        build_plan(samples_of([]), data_fingerprint="f", plan=DEMO, seed=0, epochs=1)


def test_an_empty_bucket_between_full_ones_is_no_obstacle() -> None:
    plan = plan_of([20] * 30 + [250] * 30, epochs=1)
    assert {batch.bucket for batch in plan} == {0, len(EDGES) - 1}
