"""Columns and shards: round trips, and bytes that depend on nothing but the samples in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import shards as shards_module
from dflash.data.columns import SampleColumns, TokenizedSample
from dflash.data.shards import SAMPLE_SCHEMA, ShardWriter, columns_of_table, samples_table
from dflash.records import ShardEntry
from dflash.storage import open_store, sha256_file

UNIT = "ab" * 32


def sample(number: int, length: int) -> TokenizedSample:
    cuts = sorted({(number * 7 + step * 5) % (length + 1) for step in range(4)})
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    return TokenizedSample(f"s{number}", f"kind{number % 3}", np.arange(number, number + length, dtype=np.int32), spans, number % 9)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TokenizedSample]:
    lengths = draw(st.lists(st.integers(1, 30), max_size=30))
    return [sample(number, length) for number, length in enumerate(lengths)]


def equal(a: TokenizedSample, b: TokenizedSample) -> bool:
    same = (a.sample_id, a.source, a.loss_spans, a.turns) == (b.sample_id, b.source, b.loss_spans, b.turns)
    return same and np.array_equal(a.input_ids, b.input_ids)


@given(sample_lists(), st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_columns_hold_the_samples(samples: list[TokenizedSample], data: st.DataObject) -> None:
    columns = SampleColumns.of(samples)
    assert len(columns) == len(samples)
    assert all(equal(columns.sample(row), each) for row, each in enumerate(samples))
    assert columns.supervised.tolist() == [int(each.loss_mask.sum()) for each in samples]
    rows = data.draw(st.lists(st.integers(0, max(0, len(samples) - 1)), max_size=20 if samples else 0))
    taken = columns.take(np.array(rows, np.int64))
    assert all(equal(taken.sample(place), samples[row]) for place, row in enumerate(rows))
    start = data.draw(st.integers(0, len(samples)))
    halves = [columns.cut(0, start), columns.cut(start, len(samples))]
    again = SampleColumns.joined(halves)
    assert all(equal(again.sample(row), each) for row, each in enumerate(samples))
    stored = columns_of_table(samples_table(columns))
    assert all(equal(stored.sample(row), each) for row, each in enumerate(samples))


def write(
    folder: Path, samples: list[TokenizedSample], *, batch: int, per_shard: int, per_group: int, buckets: int = 3
) -> tuple[ShardEntry, ...]:
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    writer = ShardWriter(open_store(folder), scratch, unit=UNIT, rows_per_shard=per_shard, rows_per_group=per_group)
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        writer.add(SampleColumns.of(part), buckets=np.array([len(each.input_ids) % buckets for each in part], np.int64))
    entries = writer.close()
    assert list(scratch.iterdir()) == []
    return entries


@given(sample_lists(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_bytes_do_not_depend_on_the_batches(
    tmp_path_factory: pytest.TempPathFactory, samples: list[TokenizedSample], per_group: int, batch: int, per_shard: int
) -> None:
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    entries = write(one, samples, batch=batch, per_shard=per_shard, per_group=per_group)
    assert write(other, samples, batch=max(1, len(samples)), per_shard=per_shard, per_group=per_group) == entries
    for entry in entries:
        file = pq.ParquetFile(one / entry.path)
        assert file.schema_arrow.equals(SAMPLE_SCHEMA)
        assert (file.metadata.num_rows, (one / entry.path).stat().st_size) == (entry.rows, entry.size_bytes)
        assert entry.rows <= per_shard
        assert sha256_file(one / entry.path) == entry.sha256
        groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        assert all(group <= per_group for group in groups)
    for bucket in range(3):
        stored = [
            columns_of_table(pq.read_table(one / entry.path, partitioning=None)) for entry in entries if entry.bucket == bucket
        ]
        mine = [each for each in samples if len(each.input_ids) % 3 == bucket]
        found = SampleColumns.joined(stored)
        assert len(found) == len(mine)
        assert all(equal(found.sample(row), each) for row, each in enumerate(mine)), "in the order they came"


def test_row_groups_are_bounded_in_tokens_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "GROUP_TOKENS", 50)
    samples = [sample(number, 20 + number % 3) for number in range(11)]
    for name, batch in (("a", 1), ("b", 4), ("c", 11)):
        (entry,) = write(tmp_path / name, samples, batch=batch, per_shard=100, per_group=100, buckets=1)
        file = pq.ParquetFile(tmp_path / name / entry.path)
        assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [3, 3, 3, 2]


def test_names_hold_the_content_and_an_equal_file_is_left_alone(tmp_path: Path) -> None:
    samples = [sample(number, 9) for number in range(4)]
    (entry,) = write(tmp_path / "x", samples, batch=4, per_shard=9, per_group=9, buckets=1)
    assert entry.path == f"bucket=0/part-{UNIT[:12]}-00000-{entry.sha256[:8]}.parquet"
    stamp = (tmp_path / "x" / entry.path).stat().st_mtime_ns
    (tmp_path / "x" / "scratch").rmdir()
    assert write(tmp_path / "x", samples, batch=1, per_shard=9, per_group=9, buckets=1) == (entry,)
    assert (tmp_path / "x" / entry.path).stat().st_mtime_ns == stamp
    (tmp_path / "x" / "scratch").rmdir()
    (tmp_path / "x" / entry.path).write_bytes(b"damaged")
    assert write(tmp_path / "x", samples, batch=1, per_shard=9, per_group=9, buckets=1) == (entry,)
    assert sha256_file(tmp_path / "x" / entry.path) == entry.sha256
