"""Shares and advice are arithmetic; the measurement goes through the production path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DeviceError
from dflash.train.balance import ReplicaTimes, StageTime, advice, measured_times, splits, stage_shares
from dflash.train.footprint import batch_shapes
from dflash.train.measure import measure, random_batch
from tests.support.tiny_run import build_tiny_run

PURE = settings(max_examples=80, deadline=None, derandomize=True)


def times(*, targets: int, target_s: float, drafter_s: float, batches: int = 10, wall_s: float = 100.0) -> ReplicaTimes:
    return ReplicaTimes(
        wall_s=wall_s,
        batches=batches,
        reader=StageTime(1, busy_s=5.0, starved_s=0.0, blocked_s=90.0),
        targets=StageTime(targets, busy_s=target_s * batches, starved_s=1.0, blocked_s=2.0),
        drafter=StageTime(1, busy_s=drafter_s * batches, starved_s=30.0, blocked_s=0.0),
    )


@PURE
@given(st.integers(2, 16), st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_first_split_is_the_best_of_all_by_brute_force(devices: int, target_s: float, drafter_s: float) -> None:
    ways = splits(devices, target_s=target_s, drafter_s=drafter_s)
    best = max(
        replicas * min(targets / target_s, 1 / drafter_s)
        for replicas in range(1, devices + 1)
        for targets in range(1, devices + 1)
        if replicas * (targets + 1) <= devices
    )
    assert ways[0].batches_per_s == pytest.approx(best)
    assert [way.batches_per_s for way in ways] == sorted((way.batches_per_s for way in ways), reverse=True)
    assert sorted(way.replicas for way in ways) == list(range(1, devices // 2 + 1))
    assert all(way.devices == way.replicas * (way.targets + 1) <= devices for way in ways)


def test_eight_devices_with_a_target_six_times_as_slow_make_one_replica_of_seven() -> None:
    way = splits(8, target_s=6.0, drafter_s=1.0)[0]
    assert (way.replicas, way.targets, way.devices, way.bound_by) == (1, 6, 7, "drafter")


def test_shares_are_of_all_workers_time_over_all_replicas() -> None:
    shares = stage_shares([times(targets=2, target_s=10.0, drafter_s=5.0), times(targets=2, target_s=5.0, drafter_s=5.0)])
    assert shares["targets"] == {"busy_frac": 150 / 400, "starved_frac": 2 / 400, "blocked_frac": 4 / 400}
    assert shares["drafter"] == {"busy_frac": 0.5, "starved_frac": 0.3, "blocked_frac": 0.0}


def test_advice_names_the_side_that_sets_the_pace_and_a_better_split_only_where_there_is_one() -> None:
    slow_target = [times(targets=1, target_s=3.0, drafter_s=1.0)] * 2
    assert measured_times(slow_target) == (3.0, 1.0)
    assert "targets set the pace" in advice(slow_target, devices=4)
    assert "1 x (3 + 1) would be 1.50 times as fast on 4 devices" in advice(slow_target, devices=4)
    assert "1 x (3 + 1) is the best split" in advice([times(targets=3, target_s=3.0, drafter_s=1.0)], devices=4)
    assert "the drafter sets the pace on" not in advice(slow_target, devices=0)
    assert "share the CPU" in advice(slow_target, devices=0)
    assert "share a GPU (3.000 s and 1.000 s a micro-batch): most of it is the target's" in advice(slow_target, devices=2)
    assert advice([times(targets=1, target_s=1.0, drafter_s=1.0, batches=0)], devices=2) == "nothing was measured"


def test_the_measurement_times_both_sides_on_full_batches(tmp_path: Path) -> None:
    run = build_tiny_run(tmp_path)
    found = measure(run.config, lengths=2, repeats=2)
    shapes = batch_shapes(run.config)
    assert found.tokens == (shapes[0].tokens + shapes[-1].tokens) / 2
    assert 0 < found.target_s < 60 and 0 < found.drafter_s < 60
    batch = random_batch(shapes[-1], vocab_size=7, seed=1)
    assert batch.input_ids.shape == (shapes[-1].sequences, shapes[-1].length_tokens)
    assert batch.input_ids.max() < 7 and batch.loss_mask.all()


def test_gpus_are_not_measured_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = build_tiny_run(tmp_path).config
    on_gpus = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cuda"})})
    with pytest.raises(DeviceError, match="no CUDA device"):
        measure(on_gpus, lengths=2, repeats=2)
