"""Reading a data set from a live S3 server gives what the local one gives, over a network that breaks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from dflash.config.data import ReaderConfig
from dflash.data import reader_files
from dflash.data.columns import TokenizedSample
from dflash.data.reader import Batch, SampleStore, collate, read_batches
from dflash.errors import DataError, StorageError
from dflash.records import DataManifest, PlannedBatch
from dflash.storage import open_store, s3_client
from tests.support.data_sets import write_samples
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import BUCKET, point_to, s3_server

READER = ReaderConfig(cache_mib=1, prefetch_batches=3, threads=2)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(endpoint) as proxy:
        point_to(monkeypatch, proxy.url)
        monkeypatch.setenv(s3_client.READ_TIMEOUT_ENV, "2")
        monkeypatch.setattr(s3_client, "_BACKOFF_S", 0.001)
        yield proxy


def data_set(location: str) -> DataManifest:
    random = np.random.default_rng(3)
    buckets: list[list[TokenizedSample]] = [[], []]
    for number in range(300):
        length = int(random.integers(4, 3000))
        ids = random.integers(0, 100_000, length).astype(np.int32)
        cut = int(random.integers(1, length - 2))
        bucket = int(length > 1000)
        buckets[bucket].append(TokenizedSample(f"s{number}", "walk", ids, ((0, 1), (cut, length)), 2))
    return write_samples(open_store(location), buckets, edges=[1000, 3000], rows_per_shard=120, rows_per_group=50)


def plan(store: SampleStore) -> list[PlannedBatch]:
    rows = np.random.default_rng(5).permutation(store.rows)
    pieces = [rows[start : start + 16] for start in range(0, len(rows), 16)]
    return [
        PlannedBatch(number, 0, 0, int(store.lengths[piece].max()), tuple(piece.tolist())) for number, piece in enumerate(pieces)
    ]


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.planned == wanted.planned
    for name in ("input_ids", "loss_mask", "lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_s3_and_local_give_the_same_files_and_batches(proxy: FaultyProxy, tmp_path: Path) -> None:
    location = f"s3://{BUCKET}/{uuid4().hex}"
    manifest = data_set(location)
    assert data_set(str(tmp_path)) == manifest
    with (
        SampleStore(tmp_path, fingerprint=manifest.fingerprint, reader=READER) as local,
        SampleStore(location, fingerprint=manifest.fingerprint, reader=READER) as remote,
    ):
        np.testing.assert_array_equal(remote.lengths, local.lengths)
        np.testing.assert_array_equal(remote.buckets, local.buckets)
        planned = plan(local)
        proxy.inject(Fault("reset", 3, "GET", "part-"))
        proxy.inject(Fault("cut", 3, "GET", "part-", after_bytes=100))
        proxy.inject(Fault("status", 3, "GET", "part-"))
        found = list(read_batches(planned, remote, pad_id=7, reader=READER))
        assert sum(fault.times for fault in proxy.faults) == 0, "the faults were met"
        for batch, one in zip(found, planned, strict=True):
            assert_same(batch, collate(one, local, pad_id=7))


def test_a_batch_asks_for_its_own_pages_only(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"s3://{BUCKET}/{uuid4().hex}"
    data_set(location)
    asked: list[int] = []
    real = reader_files.RangedShards._read

    def read(self: reader_files.RangedShards, run: list[tuple[int, int, int]]) -> bytes:
        asked.append(sum(length for _, _, length in run))
        return real(self, run)

    with SampleStore(location, fingerprint=None, reader=READER) as store:
        size = sum(shard.size_bytes for shard in store.manifest.shards)
        monkeypatch.setattr(reader_files.RangedShards, "_read", read)
        store.read([0, 200])
        assert 0 < sum(asked) < size / 5
        assert len(asked) <= 8  # two page indexes and two pages a sample
        asked.clear()
        store.read([200, 0])
        assert asked == [], "kept"


def test_a_store_that_goes_away_ends_the_epoch_with_a_clear_error(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    location = f"s3://{BUCKET}/{uuid4().hex}"
    data_set(location)
    with SampleStore(location, fingerprint=None, reader=READER) as store:
        batches = read_batches(plan(store), store, pad_id=0, reader=READER)
        next(batches)
        proxy.inject(Fault("status", 10_000, "GET"))
        with pytest.raises(StorageError, match="SlowDown"):
            list(batches)


def test_a_missing_shard_is_found_on_opening(proxy: FaultyProxy) -> None:
    location = f"s3://{BUCKET}/{uuid4().hex}"
    manifest = data_set(location)
    open_store(location).delete(manifest.shards[1].path)
    with pytest.raises(DataError, match=r"part-.*parquet is missing"):
        SampleStore(location, fingerprint=manifest.fingerprint, reader=READER)
