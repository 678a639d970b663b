"""Data sets on a live S3 server: the same bytes as on local disk, resumed after a stop, and two builders at once."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dflash.data.commit import commit
from dflash.data.manifest import manifest_name
from dflash.data.prepare import PreparedData, load_data, plan_build
from dflash.data.prompt_hashes import read_prompt_hashes
from dflash.data.reader import SampleStore
from dflash.data.synthetic import prompt_hash
from dflash.data.units import build_unit
from dflash.errors import StorageError
from dflash.storage import open_store
from dflash.storage.s3_store import S3Store
from tests.support.s3_server import BUCKET, point_to, s3_server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))

from workshop import GOOD, TOKENIZER, VOCAB_SIZE, Workshop, rows

SETTINGS: dict[str, Any] = {"bad_rows": "quarantine", "max_bad_frac": 0.2, "rows_per_shard": 20}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def remote(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    point_to(monkeypatch, endpoint)
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def place(tmp_path: Path) -> Workshop:
    TOKENIZER.save_pretrained(str(tmp_path / "target"))
    return Workshop(tmp_path, tmp_path / "target")


def corpus(place: Workshop) -> tuple[str, ...]:
    many = rows(*(f"numbers {number} and " + "the weather " * (number % 5) for number in range(60)))
    return place.corpus(*GOOD), place.corpus("{oops", *many, name="b.jsonl")


def content(data: PreparedData) -> dict[str, bytes]:
    names = [name for name in data.store.names("") if name != "build.json"]
    return {name: data.store.read(name) for name in names}


@pytest.mark.parametrize("edges", [(24, 40, 80), "auto"])
def test_a_data_set_on_s3_has_the_bytes_of_the_local_one(place: Workshop, remote: str, edges: Any) -> None:
    files = corpus(place)
    settings = {**SETTINGS, "bucket_edges_tokens": edges}
    local = place.prepare(place.config(*files, **settings))
    config = place.config(*files, **settings, store=remote)
    stored = place.prepare(config)
    assert stored.location.startswith(remote)
    assert content(stored) == content(local)
    assert place.prepare(config).reused
    with SampleStore(stored.location, fingerprint=stored.fingerprint, reader=config.data.reader) as store:
        assert store.rows == stored.manifest.samples == 64
    assert prompt_hash("hi") in read_prompt_hashes(stored.store, stored.manifest)


def test_sources_on_s3_give_the_same_data_set_as_local_ones(place: Workshop, remote: str) -> None:
    files = corpus(place)
    sources = open_store(f"{remote}/corpus")
    for file in files:
        sources.put(Path(file).name, Path(file).read_bytes(), only_if_absent=True)
    local = place.prepare(place.config(*files, **SETTINGS))
    config = place.config(f"{remote}/corpus/*.jsonl", **SETTINGS, store=f"{remote}/data")
    assert content(place.prepare(config)) == content(local)


def test_a_build_that_stops_goes_on_file_by_file(place: Workshop, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus(place)
    local = place.prepare(place.config(*files, **SETTINGS))
    config = place.config(*files, **SETTINGS, store=remote)
    original, puts = S3Store.put_file, []

    def unlucky(self: S3Store, name: str, source: Path, *, only_if_absent: bool) -> bool:
        puts.append(name)
        if len(puts) == 7:
            raise StorageError("the network is gone", remedy="wait")
        return original(self, name, source, only_if_absent=only_if_absent)

    monkeypatch.setattr(S3Store, "put_file", unlucky)
    with pytest.raises(StorageError, match="the network is gone"):
        place.prepare(config)
    before = list(puts)
    data = place.prepare(config)
    assert content(data) == content(local)
    first_unit = next(name for name in before if "part-" in name).split("-")[1]
    assert not [name for name in puts[7:] if first_unit in name], "the finished file is not put again"


def test_a_damaged_object_is_replaced(place: Workshop, remote: str) -> None:
    files = corpus(place)
    config = place.config(*files, **SETTINGS, store=remote, reader={"verify": "full"})
    data = place.prepare(config)
    good = content(data)
    shard = data.manifest.shards[0]
    data.store.put(shard.path, bytes(shard.size_bytes), only_if_absent=False)
    mended = place.prepare(config)
    assert (mended.reused, mended.manifest) == (False, data.manifest)
    assert content(mended) == good


def _race(folder: str, store: str, prompts: list[str], ready: Barrier, results: Any) -> None:
    """One of two builders with equal recipes whose answers differ: they meet just before they commit."""
    place = Workshop(Path(folder), Path(folder) / "target")
    config = place.config(str(Path(folder) / "a.jsonl"), **SETTINGS, store=store)
    job, units = plan_build(config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t1", progress=lambda *_: None)
    records = [
        build_unit(spec, job=job, edges=(24, 40, 80), tokenizer=TOKENIZER, answerer=None, progress=lambda *_: None)
        for spec in units
    ]
    puts: list[bool] = []
    original = S3Store.put

    def watched(self: S3Store, name: str, data: bytes, *, only_if_absent: bool) -> bool:
        won = original(self, name, data, only_if_absent=only_if_absent)
        if name.startswith("manifests/"):
            puts.append(won)
        return won

    S3Store.put = watched  # type: ignore[method-assign]
    ready.wait(timeout=120)
    manifest = commit(records, job=job, tokenizer=TOKENIZER)
    results.put((puts, manifest.fingerprint, json.dumps([shard.sha256 for shard in manifest.shards]), prompts))


def test_of_two_builders_at_once_exactly_one_commits(place: Workshop, remote: str) -> None:
    corpus(place)
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    builders = [context.Process(target=_race, args=(str(place.folder), remote, ["x"], ready, results)) for _ in range(2)]
    for builder in builders:
        builder.start()
    outcomes = [results.get(timeout=180) for _ in builders]
    for builder in builders:
        builder.join(timeout=60)
        assert builder.exitcode == 0
    assert sorted(outcome[0] for outcome in outcomes) == [[False], [True]]
    assert len({outcome[1:3] for outcome in outcomes}) == 1, "both go on with the same data set"
    location = next(f"{remote}/{name.split('/')[0]}" for name in open_store(remote).names(""))
    assert load_data(location, fingerprint=outcomes[0][1], verify="full").manifest.samples == 4


def test_builders_whose_target_answers_differently_still_agree_on_one_data_set(place: Workshop, remote: str) -> None:
    """A server at temperature 0 may answer differently twice: both builders' files lie side by side, one manifest is valid."""
    source = place.corpus(*({"prompt": f"question {number}"} for number in range(6)))
    manifests = []
    for word in ("yes", "no"):
        root = place.folder / word  # journals of their own, as on two machines
        config = place.config(source, **SETTINGS, regenerate=True, store=remote)
        config = config.model_copy(update={"run": config.run.model_copy(update={"root": str(root)})})
        ids = TOKENIZER(f"{word} {word}<|im_end|>")["input_ids"]
        job, units = plan_build(
            config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t1", progress=lambda *_: None
        )
        from dflash.data.answers import InProcessAnswerer

        answerer = InProcessAnswerer(lambda prompts, _, ids=ids: [ids for _ in prompts], batch_size=4, stop_ids=(ids[-1],))
        # The second builder began before the first had finished: it does not find the first one's record.
        job.store.delete(f"units/{units[0].unit[:12]}.json")
        record = build_unit(units[0], job=job, edges=(24, 40, 80), tokenizer=TOKENIZER, answerer=answerer, progress=lambda *_: None)
        manifests.append(commit([record], job=job, tokenizer=TOKENIZER))
    assert manifests[0] == manifests[1]
    found = load_data(job.location, fingerprint=manifests[0].fingerprint, verify="full")
    assert found.manifest == manifests[0]
    assert job.store.size(manifest_name(found.fingerprint)) is not None
    assert len([name for name in job.store.names("bucket=") if name.endswith(".parquet")]) == 2
