"""Shards and their reader: what was written comes back, whatever the sizes; damage is never read as data."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_toys import data_set, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config.data import ReaderConfig
from dflash.data import reader, reader_files
from dflash.data.columns import TokenizedSample
from dflash.data.manifest import read_manifest
from dflash.data.reader import SampleStore, collate, read_batches
from dflash.data.reader_access import RawReader
from dflash.data.reader_cache import ByteCache
from dflash.data.reader_pages import PAGE_LAYOUT
from dflash.errors import DataError, SchemaVersionError
from dflash.records import PlannedBatch
from dflash.storage import open_store
from tests.support.sealing import rewrite, values_of

READER = ReaderConfig(cache_mib=1, prefetch_batches=2, threads=2, verify="sizes")


def opened(folder: Path, config: ReaderConfig = READER) -> SampleStore:
    return SampleStore(folder, fingerprint=None, reader=config)


def assert_same(found: reader.Sample, wanted: TokenizedSample) -> None:
    assert found.input_ids.dtype == np.int32
    assert found.loss_mask.dtype == np.bool_
    assert found.input_ids.tolist() == list(wanted.input_ids)
    assert found.loss_mask.tolist() == wanted.loss_mask.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


LENGTHS = ([5, 6, 7, 8, 2, 3, 4, 5, 6, 8, 7, 5, 4, 3, 2, 8, 7], [20, 30, 25], [], [40] * 8)


def shards_of(folder: Path) -> list[Path]:
    return [folder / shard.path for shard in read_manifest(open_store(folder), fingerprint=None, verify="sizes").shards]


def rewrite_manifest(folder: Path) -> None:
    """Believe the files as they are now."""
    file = folder / "manifest.json"
    shards = values_of(file)["shards"]
    for shard in shards:
        shard["size_bytes"] = (folder / shard["path"]).stat().st_size
    rewrite(file, shards=shards)


def test_rows_count_through_the_buckets_in_order(folder: Path) -> None:
    samples = data_set(folder, LENGTHS)
    with opened(folder) as store:
        assert store.rows == len(samples) == 28
        assert store.lengths.dtype == np.int32
        assert store.lengths.tolist() == [length for own in LENGTHS for length in own]
        assert store.buckets.dtype == np.int8
        assert store.buckets.tolist() == [0] * 17 + [1] * 3 + [3] * 8
        for row, item in enumerate(samples):
            [found] = store.read([row])
            assert_same(found, item)


def test_the_files_are_ordinary_parquet_of_the_configured_sizes(folder: Path) -> None:
    data_set(folder, LENGTHS, per_shard=7, per_group=3)
    files = shards_of(folder)
    assert [file.parent.name for file in files] == ["bucket=0"] * 3 + ["bucket=1"] + ["bucket=3"] * 2
    metadata = pq.ParquetFile(files[0]).metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [3, 3, 1]
    table = pq.read_table(files[0])
    wanted = [sample(number, LENGTHS[0][number]) for number in range(7)]
    assert table["sample_id"].to_pylist() == [item.sample_id for item in wanted]
    assert table["input_ids"].to_pylist() == [list(item.input_ids) for item in wanted]
    assert table["loss_spans"].to_pylist() == [[edge for span in item.loss_spans for edge in span] for item in wanted]


@settings(max_examples=30, deadline=None, derandomize=True)
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
    with opened(folder) as store:
        for row, found in zip(rows, store.read(rows), strict=True):
            assert_same(found, samples[row])


@pytest.mark.parametrize("kept_bytes", [0, 3000])
def test_a_small_cache_and_few_maps_change_nothing_but_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(reader_files, "MAPPED_FILES", 1)
    samples = data_set(folder, LENGTHS)
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    real = RawReader.__init__
    monkeypatch.setattr(RawReader, "__init__", lambda self, *a, **k: real(self, *a, **(k | {"cache_bytes": kept_bytes})))
    with opened(folder) as store:
        for _ in range(2):
            for row, found in zip(order, store.read(order), strict=True):
                assert_same(found, samples[row])
        caches = [store._reader._indexes, *store._reader._pages]
        assert sum(cache._held_bytes for cache in caches) <= kept_bytes


def test_many_threads_may_read_one_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_files, "MAPPED_FILES", 1)
    samples = data_set(folder, LENGTHS, per_shard=3, per_group=2)
    wrong: list[int] = []
    with opened(folder) as store:

        def read(seed: int) -> None:
            for row in np.random.default_rng(seed).permutation(len(samples)).tolist() * 5:
                [found] = store.read([row])
                if found.input_ids.tolist() != list(samples[row].input_ids):
                    wrong.append(row)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_samples_are_read_only_because_they_share_a_cache(folder: Path) -> None:
    data_set(folder, LENGTHS)
    with opened(folder) as store:
        for name in ("input_ids", "loss_mask"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(store.read([0])[0], name)[0] = 1


def test_a_version_is_opened_by_its_fingerprint(folder: Path) -> None:
    data_set(folder, [[3, 4]])
    first = read_manifest(open_store(folder), fingerprint=None, verify="full").fingerprint
    data_set(folder, LENGTHS)
    with SampleStore(folder, fingerprint=first, reader=READER) as store:
        assert store.rows == 2
    with opened(folder) as store:
        assert store.rows == 28
    with pytest.raises(DataError, match="no complete data set"):
        SampleStore(folder, fingerprint="0" * 64, reader=READER)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 30)), max_size=60))
def test_a_byte_cache_keeps_what_was_used_last(limit: int, calls: list[tuple[bool, int, int]]) -> None:
    cache: ByteCache[int] = ByteCache(limit_bytes=limit)
    model: list[tuple[int, int]] = []  # (key, bytes), least recently used first
    for is_put, key, nbytes in calls:
        held = [entry for entry in model if entry[0] == key]
        if is_put:
            cache.put(key, key, nbytes=nbytes)
            if not held and nbytes <= limit:
                model.append((key, nbytes))
                while sum(size for _, size in model) > limit:
                    model.pop(0)
        else:
            assert cache.get(key) == (key if held else None)
            model = [entry for entry in model if entry[0] != key] + held
        assert cache._held_bytes == sum(size for _, size in model) <= limit


class TestCollate:
    def test_rows_are_padded_on_the_right_to_the_planned_length(self, folder: Path) -> None:
        samples = data_set(folder, LENGTHS)
        planned = PlannedBatch(position=4, epoch=0, bucket=0, padded_length_tokens=16, rows=(3, 0, 4, 11))
        with opened(folder) as store:
            batch = collate(planned, store, pad_id=999)
        assert batch.planned is planned
        assert batch.input_ids.shape == batch.loss_mask.shape == (4, 16)
        assert batch.input_ids.dtype == batch.lengths.dtype == np.int64
        assert batch.loss_mask.dtype == np.bool_
        assert batch.lengths.tolist() == [8, 5, 2, 5]
        for place, row in enumerate(planned.rows):
            length = len(samples[row].input_ids)
            assert batch.input_ids[place].tolist() == [*samples[row].input_ids, *[999] * (16 - length)]
            assert batch.loss_mask[place].tolist() == [*samples[row].loss_mask.tolist(), *[False] * (16 - length)]
        assert batch.nbytes == 4 * 16 * 9 + 4 * 8

    def test_a_full_row_needs_no_padding(self, folder: Path) -> None:
        samples = data_set(folder, LENGTHS)
        with opened(folder) as store:
            batch = collate(PlannedBatch(0, 0, 0, 8, (3, 9)), store, pad_id=999)
        assert 999 not in batch.input_ids
        assert batch.loss_mask.tolist() == [samples[row].loss_mask.tolist() for row in (3, 9)]

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8).map(sorted), min_size=1, max_size=4))
    def test_spans_become_the_mask_that_they_describe(self, edges: list[list[int]]) -> None:
        spans = [np.array(own[: len(own) // 2 * 2], np.int32) for own in edges]
        width = 14
        mask = reader._loss_mask(spans, np.full(len(spans), 12), width=width)
        for row, own in zip(mask, spans, strict=True):
            inside = {place for start, end in own.reshape(-1, 2).tolist() for place in range(start, end)}
            assert row.tolist() == [place in inside for place in range(width)]

    @pytest.mark.parametrize("spans", [[0, 6], [-1, 2], [3, 3], [1, 2, 3]])
    def test_spans_that_leave_the_sample_are_refused(self, spans: list[int]) -> None:
        with pytest.raises(DataError, match="loss spans"):
            reader._loss_mask([np.array(spans, np.int32)], np.array([5]), width=8)

    def test_a_plan_of_other_data_is_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        with opened(folder) as store:
            with pytest.raises(DataError, match="batch 7 is planned for 4 tokens, a sample of it has 8"):
                collate(PlannedBatch(7, 0, 0, 4, (4, 3)), store, pad_id=0)
            with pytest.raises(DataError, match=r"row 28 is asked for, the data set has the rows 0\.\.27"):
                collate(PlannedBatch(0, 0, 0, 8, (3, 28)), store, pad_id=0)
            with pytest.raises(DataError, match="row -1 "):
                store.read([-1])

    @pytest.mark.parametrize("ahead", [0, 1, 5])
    def test_reading_ahead_gives_the_same_batches(self, folder: Path, ahead: int) -> None:
        data_set(folder, LENGTHS)
        planned = [PlannedBatch(number, 0, 0, 40, (number, 27 - number)) for number in range(28)]
        config = READER.model_copy(update={"prefetch_batches": ahead})
        with opened(folder) as store:
            for found, one in zip(read_batches(planned, store, pad_id=3, reader=config), planned, strict=True):
                wanted = collate(one, store, pad_id=3)
                assert found.planned is one
                np.testing.assert_array_equal(found.input_ids, wanted.input_ids)
                np.testing.assert_array_equal(found.loss_mask, wanted.loss_mask)


class TestDamage:
    def test_a_file_of_another_size_is_refused_on_opening(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = shards_of(folder)[3]
        file.write_bytes(file.read_bytes() + b"x")
        with pytest.raises(DataError, match=r"bucket=1/part-.*\.parquet has \d+ bytes, the manifest says \d+"):
            opened(folder)

    def test_a_missing_file_is_refused_on_opening(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        shards_of(folder)[3].unlink()
        with pytest.raises(DataError, match="is missing"):
            opened(folder)

    @pytest.mark.parametrize("mask", [0x10, 0xFF, 0x01])
    def test_a_flipped_byte_is_found_by_hash_and_never_read_as_other_tokens(self, folder: Path, mask: int) -> None:
        samples = data_set(folder, [[30, 31, 32]])
        [file] = shards_of(folder)
        content = file.read_bytes()
        refused = 0
        for place in range(0, len(content), 17):
            file.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
            with pytest.raises(DataError, match="differs from the hash"):
                opened(folder, READER.model_copy(update={"verify": "full"}))
            try:
                with opened(folder) as store:
                    found = store.read([0, 1, 2])
            except (DataError, SchemaVersionError):
                refused += 1
                continue
            for got, wanted in zip(found, samples, strict=True):
                assert_same(got, wanted)
        assert refused > 10

    def test_another_schema_version_is_refused_by_name(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = shards_of(folder)[3]
        table = pq.read_table(file).replace_schema_metadata({"dflash_schema_version": "9"})
        pq.write_table(table, file)
        rewrite_manifest(folder)
        with pytest.raises(SchemaVersionError, match=r"part-.*\.parquet has schema version 9, this code reads 3"):
            opened(folder)

    def test_other_columns_are_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = shards_of(folder)[3]
        pq.write_table(pq.read_table(file).drop_columns(["turns"]), file, **PAGE_LAYOUT)
        rewrite_manifest(folder)
        with pytest.raises(DataError, match="has the columns"):
            opened(folder)

    def test_another_page_layout_is_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        file = shards_of(folder)[3]
        pq.write_table(pq.read_table(file), file)
        rewrite_manifest(folder)
        with pytest.raises(DataError, match=r"part-.*\.parquet cannot be read"):
            opened(folder)

    def test_a_row_count_that_contradicts_the_manifest_is_refused(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        shards = values_of(folder / "manifest.json")["shards"]
        shards[0]["rows"] += 1
        rewrite(folder / "manifest.json", shards=shards)
        with pytest.raises(DataError, match="it has 7 rows, the manifest says 8"):
            opened(folder)

    def test_a_folder_without_a_manifest_is_no_data_set(self, folder: Path) -> None:
        data_set(folder, LENGTHS)
        (folder / "manifest.json").unlink()
        with pytest.raises(DataError, match="no complete data set"):
            opened(folder)
