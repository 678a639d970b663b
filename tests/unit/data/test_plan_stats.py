"""Numbers and picture of a plan, against counting batch by batch."""

from __future__ import annotations

import io
from itertools import groupby

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import DEMO, EDGES, demo_lengths, plan_of, samples_of

from dflash.config import Config
from dflash.data.plan import BatchPlan, survey_plan
from dflash.data.plan_picture import draw_plan
from dflash.data.plan_stats import MIX_WINDOWS, NAIVE_SEQUENCES, PlanStats, naive_efficiency, plan_stats, tokens_per_batch
from dflash.records import PlannedBatch
from tests.support.plans import positions_of_epoch


def stats_of(plan: BatchPlan, lengths: np.ndarray) -> PlanStats:
    return plan_stats(lengths, plan.epochs[0], edges=EDGES)


def first_epoch(plan: BatchPlan) -> list[PlannedBatch]:
    return [plan[position] for position in positions_of_epoch(plan, 0)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=120).map(lambda values: np.array(values, np.int32)),
    order=st.sampled_from(["interleave", "shuffle", "sorted", "random"]),
)
def test_the_numbers_are_those_of_the_batches(lengths: np.ndarray, order: str) -> None:
    plan = plan_of(lengths, plan=DEMO.model_copy(update={"order": order}))
    batches, stats = first_epoch(plan), stats_of(plan, lengths)
    assert tokens_per_batch(lengths, plan.epochs[0]).tolist() == [int(lengths[list(batch.rows)].sum()) for batch in batches]
    runs = [(bucket, len(list(run))) for bucket, run in groupby(batch.bucket for batch in batches)]
    for bucket in stats.buckets:
        own = [batch for batch in batches if batch.bucket == bucket.bucket]
        assert bucket.batches == len(own)
        assert bucket.samples == sum(len(batch.rows) for batch in own)
        assert bucket.tokens == sum(int(lengths[list(batch.rows)].sum()) for batch in own)
        assert bucket.padded_tokens == sum(len(batch.rows) * batch.padded_length_tokens for batch in own)
        assert bucket.efficiency == (bucket.tokens / bucket.padded_tokens if own else 1.0)
        assert bucket.longest_run == max((length for number, length in runs if number == bucket.bucket), default=0)
        if own:
            after = len(batches) - 1 - own[-1].position
            assert bucket.last_strides == pytest.approx(after / (len(batches) / len(own)))
    assert sum(bucket.batch_share for bucket in stats.buckets) == pytest.approx(1)
    assert sum(bucket.samples for bucket in stats.buckets) == stats.samples == sum(stats.length_counts) == len(lengths)
    assert stats.longest_run == max(length for _, length in runs)
    assert sum(length * count for length, count in stats.run_counts) == len(batches)
    assert stats.padded_lengths_tokens == tuple(sorted({batch.padded_length_tokens for batch in batches}))
    to_edges = sum(min(edge for edge in EDGES if edge >= length) for length in lengths.tolist())
    assert stats.edges_efficiency == int(lengths.sum()) / to_edges


def test_the_mix_is_that_of_every_stretch() -> None:
    lengths = demo_lengths(3000)
    plan = plan_of(lengths)
    batches, mix = first_epoch(plan), np.array(stats_of(plan, lengths).mix)
    assert mix.shape == (MIX_WINDOWS, len(EDGES))
    for window in range(MIX_WINDOWS):
        own = [batch.bucket for batch in batches if batch.position * MIX_WINDOWS // len(batches) == window]
        assert mix[window].tolist() == [own.count(bucket) / len(own) for bucket in range(len(EDGES))]


def test_random_batches_are_padded_to_their_longest() -> None:
    assert naive_efficiency(np.full(NAIVE_SEQUENCES * 3, 7), seed=0) == 1
    one_long = np.array([10] + [1] * (NAIVE_SEQUENCES - 1))
    assert naive_efficiency(one_long, seed=0) == one_long.sum() / (10 * NAIVE_SEQUENCES)
    assert naive_efficiency(np.array([5, 10]), seed=0) == 0.75


def config(order: str) -> Config:
    return Config.model_validate(
        {
            "target": {"path": "toy", "mask_token_id": 1},
            "data": {"num_conversations": 1},
            "plan": DEMO.model_dump() | {"order": order},
            "train": {"epochs": 3},
            "run": {"seed": 3},
        }
    )


def test_a_survey_is_the_plan_without_keeping_it() -> None:
    samples = samples_of(demo_lengths(500))
    manifest, first = survey_plan(config("interleave"), samples, data_fingerprint="f" * 64)
    plan = plan_of(samples.lengths, plan=config("interleave").plan, epochs=3)
    assert manifest == plan.manifest
    for (_, mine), (_, theirs) in zip(first.named(), plan.epochs[0].named(), strict=True):
        assert np.array_equal(mine, theirs)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(matplotlib.image.imread(io.BytesIO(png), format="png"))


@pytest.mark.parametrize("order", ["interleave", "sorted"])
def test_the_picture_shows_the_plan(order: str) -> None:
    samples = samples_of(demo_lengths(2000))
    manifest, first = survey_plan(config(order), samples, data_fingerprint="f" * 64)
    stats = plan_stats(samples.lengths, first, edges=EDGES)
    png = draw_plan(stats, manifest)
    image = pixels(png)
    assert image.shape[0] > 900
    assert image.shape[1] > 1300
    orange = (np.abs(image[..., :3] - np.array([0xD9, 0x77, 0x2B]) / 255) < 0.02).all(axis=-1)
    long_runs = orange[image.shape[0] // 2 :, : image.shape[1] // 2].sum()
    assert (long_runs > 500) == (order != "interleave"), "runs beyond the limit are drawn in another colour"


@pytest.mark.parametrize("lengths", [[20], [250] * 3 + [20] * 400])
def test_a_tiny_or_lopsided_plan_is_drawn_too(lengths: list[int]) -> None:
    samples = samples_of(lengths)
    manifest, first = survey_plan(config("interleave"), samples, data_fingerprint="f" * 64)
    assert pixels(draw_plan(plan_stats(samples.lengths, first, edges=EDGES), manifest)).size
