"""Shards and their reader: what was written comes back, whatever the sizes; damage is never read as data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_toys import PROMPT_HASHES, data_set, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import reader
from dflash.data.manifest import read_manifest
from dflash.data.reader import SampleStore, collate, read_prompt_hashes
from dflash.data.shards import TokenizedSample
from dflash.errors import DataError, SchemaVersionError
from dflash.records import PlannedBatch


def assert_same(found: reader.Sample, wanted: TokenizedSample) -> None:
    assert found.input_ids.dtype == np.int32
    assert found.loss_mask.dtype == np.bool_
    assert found.input_ids.tolist() == list(wanted.input_ids)
    assert found.loss_mask.tolist() == list(wanted.loss_mask)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


LENGTHS = ([5, 6, 7, 8, 2, 3, 4, 5, 6, 8, 7, 5, 4, 3, 2, 8, 7], [20, 30, 25], [], [40] * 8)


def test_rows_count_through_the_buckets_in_order(folder: Path) -> None:
    samples = data_set(folder, LENGTHS)
    with SampleStore(folder) as store:
        assert store.rows == len(samples) == 28
        assert store.lengths.tolist() == [length for own in LENGTHS for length in own]
        assert store.buckets.tolist() == [0] * 17 + [1] * 3 + [3] * 8
        for row, item in enumerate(samples):
            [found] = store.read([row])
            assert_same(found, item)


def test_files_and_row_groups_have_the_configured_sizes(folder: Path) -> None:
    data_set(folder, LENGTHS, per_shard=7, per_group=3)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))
    assert files == [
        "bucket=0/part-00000.parquet",
        "bucket=0/part-00001.parquet",
        "bucket=0/part-00002.parquet",
        "bucket=1/part-00000.parquet",
        "bucket=3/part-00000.parquet",
        "bucket=3/part-00001.parquet",
    ]
    metadata = pq.ParquetFile(folder / files[0]).metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [3, 3, 1]
    table = pq.read_table(folder / files[0])
    assert table["sample_id"].to_pylist() == [f"s{number}" for number in range(7)]
    assert table["kind"].to_pylist() == [f"kind{number % 3}" for number in range(7)]
    assert table["supervised"].to_pylist() == [sum(sample(n, LENGTHS[0][n]).loss_mask) for n in range(7)]
    assert table.schema.metadata[b"dflash_schema_version"] == b"1"


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        data_set(tmp_path / name, LENGTHS)
    assert read_manifest(tmp_path / "a", verify=True).shards == read_manifest(tmp_path / "b", verify=True).shards


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(sum),
    per_shard=st.integers(1, 9),
    per_group=st.integers(1, 9),
    data=st.data(),
)
def test_any_sizes_give_every_row_back_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], per_shard: int, per_group: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("set")
    lengths = [[1 + (7 * i + bucket) % 9 for i in range(count)] for bucket, count in enumerate(counts)]
    samples = data_set(folder, lengths, per_shard=per_shard, per_group=per_group)
    rows = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=20))
    with SampleStore(folder) as store:
        for row, found in zip(rows, store.read(rows), strict=True):
            assert_same(found, samples[row])


def test_a_small_cache_changes_nothing_but_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CACHE_BYTES", 200)
    samples = data_set(folder, LENGTHS)
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    with SampleStore(folder) as store:
        for _ in range(2):
            for row, found in zip(order, store.read(order), strict=True):
                assert_same(found, samples[row])


def test_samples_are_read_only_because_they_share_a_cache(folder: Path) -> None:
    data_set(folder, LENGTHS)
    with SampleStore(folder) as store, pytest.raises(ValueError, match="read-only"):
        store.read([0])[0].input_ids[0] = 1


class TestCollate:
    def test_rows_are_padded_on_the_right_to_the_planned_length(self, folder: Path) -> None:
        samples = data_set(folder, LENGTHS)
        planned = PlannedBatch(position=4, epoch=0, bucket=0, padded_length_tokens=16, rows=(3, 0, 4))
        with SampleStore(folder) as store:
            batch = collate(planned, store, pad_id=999)
        assert batch.planned is planned
        assert batch.input_ids.shape == batch.loss_mask.shape == (3, 16)
        assert batch.input_ids.dtype == batch.lengths.dtype == np.int64
        assert batch.loss_mask.dtype == np.bool_
        assert batch.lengths.tolist() == [8, 5, 2]
        for place, row in enumerate(planned.rows):
            length = len(samples[row].input_ids)
            assert batch.input_ids[place].tolist() == [*samples[row].input_ids, *[999] * (16 - length)]
            assert batch.loss_mask[place].tolist() == [*samples[row].loss_mask, *[False] * (16 - length)]
        assert batch.nbytes == 3 * 16 * 9 + 3 * 8

    def test_a_full_row_needs_no_padding(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        with SampleStore(folder) as store:
            batch = collate(PlannedBatch(0, 0, 0, 8, (3, 9)), store, pad_id=999)
        assert 999 not in batch.input_ids

    def test_a_plan_of_other_data_is_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        with SampleStore(folder) as store:
            with pytest.raises(DataError, match="batch 7 is planned for 4 tokens, a sample of it has 8"):
                collate(PlannedBatch(7, 0, 0, 4, (4, 3)), store, pad_id=0)
            with pytest.raises(DataError, match=r"row 28 is asked for, the data set has the rows 0\.\.27"):
                collate(PlannedBatch(0, 0, 0, 8, (3, 28)), store, pad_id=0)
            with pytest.raises(DataError, match="row -1 "):
                store.read([-1])


class TestDamage:
    def test_a_file_of_another_size_is_refused_on_opening(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = folder / "bucket=1/part-00000.parquet"
        file.write_bytes(file.read_bytes() + b"x")
        with pytest.raises(DataError, match=r"bucket=1/part-00000\.parquet has \d+ bytes, the manifest says \d+"):
            SampleStore(folder)

    def test_a_missing_file_is_refused_on_opening(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        (folder / "bucket=1/part-00000.parquet").unlink()
        with pytest.raises(DataError, match="is missing"):
            SampleStore(folder)

    def test_a_flipped_byte_is_found_by_hash_and_never_read_as_other_tokens(self, folder: Path) -> None:
        samples = data_set(folder, [[30, 31, 32]])
        file = folder / "bucket=0/part-00000.parquet"
        content = file.read_bytes()
        refused = 0
        for place in range(0, len(content), 29):
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
            with pytest.raises(DataError, match="differs from the hash"):
                read_manifest(folder, verify=True)
            try:
                with SampleStore(folder) as store:
                    found = store.read([0, 1, 2])
            except DataError:
                refused += 1
                continue
            for got, wanted in zip(found, samples, strict=True):
                assert_same(got, wanted)
        assert refused > 10

    def test_another_schema_version_is_refused_by_name(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = folder / "bucket=1/part-00000.parquet"
        table = pq.read_table(file).replace_schema_metadata({"dflash_schema_version": "9"})
        pq.write_table(table, file)
        manifest = json.loads((folder / "manifest.json").read_text())
        for shard in manifest["shards"]:
            shard["size_bytes"] = (folder / shard["path"]).stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(SchemaVersionError, match=r"part-00000\.parquet has schema version 9, this code reads 1"):
            SampleStore(folder)

    def test_a_row_count_that_contradicts_the_manifest_is_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["shards"][0]["rows"] += 1
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match="has 7 rows, the manifest says 8"):
            SampleStore(folder)

    def test_a_folder_without_a_manifest_is_no_data_set(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        (folder / "manifest.json").unlink()
        with pytest.raises(DataError, match="no complete data set"):
            SampleStore(folder)


def test_prompt_hashes_are_read_and_verified(folder: Path) -> None:
    data_set(folder, LENGTHS)
    assert read_prompt_hashes(folder) == frozenset(PROMPT_HASHES)
    (folder / "prompt_hashes.txt").write_text("0" * 64 + "\n")
    with pytest.raises(DataError, match="differs from the hash"):
        read_prompt_hashes(folder)
    (folder / "prompt_hashes.txt").unlink()
    with pytest.raises(DataError, match="is missing"):
        read_prompt_hashes(folder)
