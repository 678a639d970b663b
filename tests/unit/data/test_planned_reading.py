"""From shards through a plan to collated batches: every sample once an epoch, whole, in its place, whatever the order."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_toys import data_set

from dflash.config import PlanConfig
from dflash.config.data import ReaderConfig
from dflash.data.plan import BatchPlan, build_plan
from dflash.data.reader import SampleStore, read_batches

PAD = 7777
EPOCHS = 2
LENGTHS = (
    [3 + number % 9 for number in range(41)],
    [12 + number % 20 for number in range(23)],
    [],
    [33 + number for number in range(9)],
)
PLANS: dict[str, dict[str, Any]] = {
    "interleave": {},
    "ladder": {"max_padded_lengths": 3},
    "ladder of one": {"max_padded_lengths": 1},
    "window": {"sort_window_samples": 4},
    "shuffle": {"order": "shuffle"},
    "sorted": {"order": "sorted", "max_padded_lengths": 4},
    "random": {"order": "random"},
    "one at a time": {"max_sequences": 1},
    "exact lengths": {"pad_multiple_tokens": 1},
}


def plan_of(store: SampleStore, changed: dict[str, Any]) -> BatchPlan:
    settings = PlanConfig(**{"tokens_per_batch": 96, "max_sequences": 6, "pad_multiple_tokens": 4, "max_bucket_run": 3, **changed})
    return build_plan(store, data_fingerprint="f" * 64, plan=settings, seed=5, epochs=EPOCHS)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("name", PLANS)
def test_every_epoch_gives_every_sample_once_and_whole(tmp_path: Path, name: str, ahead: int) -> None:
    samples = data_set(tmp_path, LENGTHS, per_shard=11, per_group=4)
    reader = ReaderConfig(cache_mib=1, prefetch_batches=ahead, threads=2, verify="full")
    with SampleStore(tmp_path, fingerprint=None, reader=reader) as store:
        plan = plan_of(store, PLANS[name])
        seen: Counter[tuple[int, int]] = Counter()
        widths = set()
        before = threading.active_count()
        for position, batch in enumerate(read_batches(plan, store, pad_id=PAD, reader=reader)):
            planned = batch.planned
            assert planned == plan[position]
            rows, width = batch.input_ids.shape
            assert rows == len(planned.rows) <= plan.manifest.settings["max_sequences"]
            assert rows * width <= plan.manifest.settings["tokens_per_batch"]
            widths.add(width)
            for place, row in enumerate(planned.rows):
                own = samples[row]
                length = len(own.input_ids)
                seen[planned.epoch, row] += 1
                assert batch.lengths[place] == length
                assert batch.input_ids[place, :length].tolist() == list(own.input_ids)
                assert (batch.loss_mask[place, :length] == own.loss_mask).all()
                assert (batch.input_ids[place, length:] == PAD).all()
                assert not batch.loss_mask[place, length:].any()
        assert threading.active_count() == before, "no thread is left"
        assert seen == {(epoch, row): 1 for epoch in range(EPOCHS) for row in range(len(samples))}
        assert widths <= set(plan.manifest.padded_lengths_tokens)
        assert len(plan.manifest.padded_lengths_tokens) <= PLANS[name].get("max_padded_lengths", 1000)
        real = EPOCHS * int(store.lengths.sum(dtype=np.int64))
        assert plan.manifest.padding_efficiency == pytest.approx(real / plan.manifest.padded_tokens)


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    data_set(tmp_path, LENGTHS)
    reader = ReaderConfig(cache_mib=1, prefetch_batches=5, threads=3, verify="sizes")
    with SampleStore(tmp_path, fingerprint=None, reader=reader) as store:
        before = threading.active_count()
        for taken in (0, 1, 4):
            batches = read_batches(plan_of(store, {}), store, pad_id=PAD, reader=reader)
            assert [next(batches).planned.position for _ in range(taken)] == list(range(taken))
            batches.close()
            assert threading.active_count() == before
