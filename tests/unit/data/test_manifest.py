"""Reading a manifest: names, sizes, hashes by policy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from workshop import Workshop, rows

from dflash.config.data import ReaderConfig
from dflash.data.manifest import find_damage, read_data_file, read_manifest
from dflash.data.prepare import PreparedData
from dflash.data.reader import SampleStore
from dflash.errors import DataError
from tests.support.sealing import rewrite


@pytest.fixture
def data(workshop: Workshop) -> PreparedData:
    return workshop.prepare(workshop.config(workshop.corpus(*rows(*(f"number {n}" for n in range(40)))), rows_per_shard=1))


def test_every_policy_sees_a_missing_or_shortened_file(data: PreparedData) -> None:
    for verify in ("sizes", "sampled", "full"):
        read_manifest(data.store, fingerprint=data.fingerprint, verify=verify)  # type: ignore[arg-type]
    path = Path(data.location, data.manifest.shards[5].path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{path.name} has {len(content) - 1} bytes, the manifest says {len(content)} bytes"):
        read_manifest(data.store, fingerprint=data.fingerprint, verify="sizes")
    path.unlink()
    with pytest.raises(DataError, match=f"{path.name} is missing") as caught:
        read_manifest(data.store, fingerprint=None, verify="sizes")
    assert "data prepare" in caught.value.remedy


def test_sampling_looks_at_other_files_each_time(data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    files = data.manifest.shards
    assert len(files) == 40
    asked: list[str] = []
    from dflash.data import manifest as module

    original = module.sha256_in_store
    monkeypatch.setattr(module, "sha256_in_store", lambda store, name: (asked.append(name), original(store, name))[1])
    random.seed(5)
    for _ in range(200):
        before = len(asked)
        assert find_damage(data.store, files, verify="sampled") is None
        assert len(asked) - before == 3, "one in sixteen, rounded up"
    assert set(asked) == {file.path for file in files}


@pytest.mark.parametrize(("verify", "hashed"), [("sizes", 0), ("sampled", 3), ("full", 42)])
def test_the_reader_hashes_what_it_is_told_to_before_it_gives_a_sample(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch, verify: str, hashed: int
) -> None:
    from dflash.data import manifest as module

    asked: list[str] = []
    original = module.sha256_in_store
    monkeypatch.setattr(module, "sha256_in_store", lambda store, name: (asked.append(name), original(store, name))[1])
    reader = ReaderConfig(verify=verify)  # type: ignore[arg-type]
    with SampleStore(data.location, fingerprint=data.fingerprint, reader=reader) as store:
        assert len(set(asked)) == len(asked) == hashed, "40 shards, the prompt hashes and the quarantine file; one in sixteen"
        store.read(range(store.rows))
        assert len(asked) == hashed, "nothing is hashed later"


def test_a_small_file_is_verified_whenever_it_is_read(data: PreparedData) -> None:
    (file,) = data.manifest.prompt_files
    assert len(read_data_file(data.store, file)) == file.size_bytes
    path = Path(data.location, file.path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="differs from the hash"):
        read_data_file(data.store, file)


def test_a_manifest_of_another_version_under_a_name_is_refused(data: PreparedData) -> None:
    rewrite(Path(data.location, f"manifests/{data.fingerprint[:16]}.json"), fingerprint=data.fingerprint[:16] + "0" * 48)
    with pytest.raises(DataError, match="is the manifest of"):
        read_manifest(data.store, fingerprint=data.fingerprint, verify="sizes")
