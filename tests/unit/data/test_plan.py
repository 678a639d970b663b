"""The whole plan: every sample once an epoch, budgets and runs kept, stored and verified."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import PlanConfig
from dflash.data.plan import BatchPlan, build_plan, load_plan
from dflash.data.plan_file import content_sha256, write_plan
from dflash.errors import DataError, SchemaVersionError
from dflash.records import PlanManifest, PlannedBatch

EDGES = (48, 72, 104, 144, 192, 256)
DEMO = PlanConfig(tokens_per_batch=1024, max_sequences=64, pad_multiple_tokens=8, max_bucket_run=3)


def bucketed(lengths: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.array(EDGES), lengths)


def demo_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Log-normal around 80 tokens, clipped to 24..256: short questions, some long answers."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(80), 0.7, count))
    return np.clip(drawn, 24, 256).astype(np.int32)


def plan_of(lengths: np.ndarray, *, plan: PlanConfig = DEMO, seed: int = 3, epochs: int = 2) -> list[PlannedBatch]:
    return build_plan(lengths, bucketed(lengths), plan=plan, seed=seed, epochs=epochs)


def efficiency(batches: list[PlannedBatch], lengths: np.ndarray) -> float:
    real = sum(int(lengths[list(b.rows)].sum()) for b in batches)
    return real / sum(len(b.rows) * b.padded_length_tokens for b in batches)


PLANS = st.builds(
    PlanConfig,
    tokens_per_batch=st.sampled_from([256, 300, 1024]),
    max_sequences=st.sampled_from([1, 5, 64]),
    pad_multiple_tokens=st.sampled_from([1, 4, 8]),
    max_bucket_run=st.integers(1, 3),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=150).map(np.array),
    plan=PLANS,
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2),
)
def test_any_plan_keeps_its_promises(lengths: np.ndarray, plan: PlanConfig, epochs: int, seed: int) -> None:
    batches = plan_of(lengths, plan=plan, seed=seed, epochs=epochs)
    buckets = bucketed(lengths)
    assert [batch.position for batch in batches] == list(range(len(batches)))
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)
    for epoch in range(epochs):
        rows = [row for batch in batches if batch.epoch == epoch for row in batch.rows]
        assert sorted(rows) == list(range(len(lengths))), "every sample exactly once an epoch"
    for batch in batches:
        own = [int(lengths[row]) for row in batch.rows]
        assert {int(buckets[row]) for row in batch.rows} == {batch.bucket}
        assert batch.padded_length_tokens % plan.pad_multiple_tokens == 0
        assert 0 <= batch.padded_length_tokens - max(own) < plan.pad_multiple_tokens
        assert len(own) * batch.padded_length_tokens <= plan.tokens_per_batch
        assert len(own) <= plan.max_sequences


@pytest.mark.parametrize("seed", range(4))
def test_demo_like_lengths_are_packed_at_95_percent_in_runs_of_three(seed: int) -> None:
    lengths = demo_lengths(1000, seed)
    batches = plan_of(lengths, seed=seed, epochs=4)
    assert efficiency(batches, lengths) >= 0.95
    assert max(len(list(run)) for _, run in groupby(batch.bucket for batch in batches)) <= 3


def test_epochs_differ_in_company_and_order_and_the_plan_is_repeatable() -> None:
    lengths = demo_lengths(400)
    batches = plan_of(lengths)
    assert batches == plan_of(lengths)
    assert batches != plan_of(lengths, seed=4)
    first, second = ([b for b in batches if b.epoch == epoch] for epoch in (0, 1))
    assert {frozenset(b.rows) for b in first} != {frozenset(b.rows) for b in second}
    assert [b.bucket for b in first] != [b.bucket for b in second]


def test_a_longer_run_starts_with_the_same_epochs_packed_the_same() -> None:
    lengths = demo_lengths(400)
    two, three = plan_of(lengths, epochs=2), plan_of(lengths, epochs=3)
    assert {frozenset(b.rows) for b in two} <= {frozenset(b.rows) for b in three}


def test_a_large_corpus_is_planned_in_bulk() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(90), 0.8, 200_000)), 24, 256).astype(np.int32)
    batches = plan_of(lengths, plan=DEMO.model_copy(update={"tokens_per_batch": 32_768, "max_sequences": 1024}), epochs=1)
    assert sum(len(b.rows) for b in batches) == len(lengths)
    assert efficiency(batches, lengths) > 0.95


def test_a_sample_that_fits_no_batch_is_named() -> None:
    with pytest.raises(DataError, match=r"254 tokens, padded to 256, exceeds plan\.tokens_per_batch 255"):
        plan_of(np.array([30, 254]), plan=DEMO.model_copy(update={"tokens_per_batch": 255}))


def test_nothing_to_plan_is_an_error() -> None:
    with pytest.raises(DataError, match="no sample"):
        build_plan(np.array([], np.int32), np.array([], np.int32), plan=DEMO, seed=0, epochs=1)


def stored(folder: Path) -> BatchPlan:
    batches = plan_of(demo_lengths(60))
    manifest = PlanManifest(
        plan_sha256=content_sha256(batches),
        settings=DEMO.model_dump(),
        data_fingerprint="f",
        seed=3,
        epochs=2,
        batches=len(batches),
        batches_per_epoch=(1, 1),
        samples=60,
        tokens=1,
        padded_tokens=1,
        padding_efficiency=1.0,
        longest_bucket_run=1,
        bucket_run_feasible=True,
    )
    plan = BatchPlan(manifest, tuple(batches))
    write_plan(plan, folder)
    return plan


class TestStoredPlan:
    def test_it_comes_back_as_it_was(self, tmp_path: Path) -> None:
        plan = stored(tmp_path / "plan")
        assert load_plan(tmp_path / "plan") == plan

    @pytest.mark.parametrize("field", ["position", "epoch", "bucket", "padded_length_tokens", "rows"])
    def test_the_hash_covers_every_field(self, field: str) -> None:
        batches = plan_of(demo_lengths(60))
        value = (*batches[5].rows[:-1], 59_000) if field == "rows" else getattr(batches[5], field) + 1
        changed = [*batches[:5], replace(batches[5], **{field: value}), *batches[6:]]
        assert content_sha256(changed) != content_sha256(batches)

    def test_the_hash_sees_where_batches_part(self) -> None:
        one = [PlannedBatch(0, 0, 0, 8, (1, 2)), PlannedBatch(1, 0, 0, 8, (3,))]
        other = [PlannedBatch(0, 0, 0, 8, (1,)), PlannedBatch(1, 0, 0, 8, (2, 3))]
        assert content_sha256(one) != content_sha256(other)

    def test_a_plan_that_was_swapped_is_refused(self, tmp_path: Path) -> None:
        stored(tmp_path / "plan")
        other = plan_of(demo_lengths(60), seed=99)
        manifest = (tmp_path / "plan/manifest.json").read_bytes()
        write_plan(BatchPlan(load_plan(tmp_path / "plan").manifest, tuple(other)), tmp_path / "plan")
        assert (tmp_path / "plan/manifest.json").read_bytes() == manifest
        with pytest.raises(DataError, match="has the hash"):
            load_plan(tmp_path / "plan")

    def test_a_flipped_byte_anywhere_is_refused_or_harmless(self, tmp_path: Path) -> None:
        plan = stored(tmp_path / "plan")
        file = tmp_path / "plan/plan.parquet"
        content = file.read_bytes()
        refused = 0
        for place in range(0, len(content), 23):
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
            try:
                assert load_plan(tmp_path / "plan").batches == plan.batches
            except DataError:
                refused += 1
        assert refused > 10

    def test_another_schema_version_is_refused_by_name(self, tmp_path: Path) -> None:
        stored(tmp_path / "plan")
        file = tmp_path / "plan/plan.parquet"
        table = pq.read_table(file)
        pq.write_table(table.replace_schema_metadata({"dflash_schema_version": "2"}), file)
        with pytest.raises(SchemaVersionError, match=r"plan\.parquet has schema version 2, this code reads 1"):
            load_plan(tmp_path / "plan")

    def test_another_manifest_version_is_refused_by_name(self, tmp_path: Path) -> None:
        stored(tmp_path / "plan")
        file = tmp_path / "plan/manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 7}))
        with pytest.raises(SchemaVersionError, match="schema version 7"):
            load_plan(tmp_path / "plan")

    def test_other_columns_are_refused(self, tmp_path: Path) -> None:
        stored(tmp_path / "plan")
        schema = pa.schema([("position", pa.int64())], metadata={"dflash_schema_version": "1"})
        pq.write_table(pa.table({"position": [1]}, schema=schema), tmp_path / "plan/plan.parquet")
        with pytest.raises(DataError, match="columns"):
            load_plan(tmp_path / "plan")

    @pytest.mark.parametrize("name", ["manifest.json", "plan.parquet"])
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        stored(tmp_path / "plan")
        (tmp_path / "plan" / name).unlink()
        with pytest.raises(DataError, match="plan"):
            load_plan(tmp_path / "plan")
