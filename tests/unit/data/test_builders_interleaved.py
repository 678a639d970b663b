"""Builders that die or meet at every single moment of a build: between any two operations on the store.

The kills of `test_killed_builds` are real and at random moments; these are exhaustive. A moment is a call of a method that
changes the store, before it or behind it. The store behaves like a remote one: no lock keeps builders apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from workshop import GOOD, Workshop, rows, samples_of

from dflash.config import Config
from dflash.data.prepare import PreparedData, load_data
from dflash.storage.local_store import LocalStore
from tests.support.sealing import values_of

CHANGES = ("put", "put_file", "delete")
EDGES: list[Any] = [(24, 40, 80), "auto"]


class Died(BaseException):
    """The process ends here; nothing of the build may catch it."""


@pytest.fixture(autouse=True)
def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "local_root", property(lambda _: None))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine itself stays up here, and syncing is most of the time


@contextmanager
def at_moment(number: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Do something at one moment; collects all that pass while it is not being done."""
    passed: list[str] = []
    busy = False

    def happen(what: str) -> None:
        nonlocal busy
        if busy:
            return
        passed.append(what)
        if len(passed) == number:
            busy = True
            try:
                action()
            finally:
                busy = False

    def watched(method: Any, name: str) -> Any:
        def call(self: LocalStore, *arguments: Any, **named: Any) -> Any:
            happen(f"before {name} {arguments[0]}")
            result = method(self, *arguments, **named)
            happen(f"behind {name} {arguments[0]}")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(LocalStore, name, watched(getattr(LocalStore, name), name))
        yield passed


def die() -> None:
    raise Died


def config_of(place: Workshop, names: str, root: Path, edges: Any) -> Config:
    """A build of some of three files into a root of its own; files written once are the same for everybody."""
    content = {
        "a": GOOD[:3],
        "b": ["{oops", *rows("one more", "the weather and " * 4)],
        "c": rows(*("talk " * number for number in range(1, 6))),
    }
    files = [place.corpus(*content[name], name=f"{name}.jsonl") for name in names]
    return place.config(
        *files, bad_rows="quarantine", max_bad_frac=0.4, rows_per_shard=5, bucket_edges_tokens=edges, num_buckets=2, store=str(root)
    )


def files_of(data: PreparedData) -> dict[str, bytes]:
    manifest = data.manifest
    names = [file.path for file in (*manifest.shards, *manifest.prompt_files, *manifest.quarantine_files)]
    return {name: data.store.read(name) for name in [*names, f"manifests/{data.fingerprint[:16]}.json"]}


def verified(root: Path) -> list[PreparedData]:
    """Every version that a reader would believe."""
    newest = [load_data(file.parent, fingerprint=None, verify="full") for file in root.glob("*/manifest.json")]
    named = [(file.parent.parent, str(values_of(file)["fingerprint"])) for file in root.glob("*/manifests/*.json")]
    return newest + [load_data(folder, fingerprint=fingerprint, verify="full") for folder, fingerprint in named]


def moments_of(place: Workshop, config: Config) -> range:
    """Moments of a build: every second or (of the longer build with measured edges) fifth of them, to save time."""
    with at_moment(0, die) as passed:
        place.prepare(config)
    return range(1, len(passed) + 1, 5 if config.data.bucket_edges_tokens == "auto" else 2)


@pytest.mark.parametrize("edges", EDGES)
def test_a_build_that_dies_at_any_moment_is_finished_by_the_next_and_never_wrong_before(workshop: Workshop, edges: Any) -> None:
    golden_config = config_of(workshop, "ab", workshop.folder / "golden", edges)
    moments = moments_of(workshop, golden_config)
    golden = files_of(workshop.prepare(golden_config))
    for moment in moments:
        root = workshop.folder / str(moment)
        config = config_of(workshop, "ab", root, edges)
        with at_moment(moment, die) as passed, pytest.raises(Died):
            workshop.prepare(config)
        for version in verified(root):
            assert files_of(version) == golden, passed[-1]
        assert files_of(workshop.prepare(config)) == golden, passed[-1]


@pytest.mark.parametrize("edges", EDGES)
def test_another_builder_may_run_through_at_any_moment(workshop: Workshop, edges: Any) -> None:
    golden_config = config_of(workshop, "ab", workshop.folder / "golden", edges)
    moments = moments_of(workshop, golden_config)
    golden = files_of(workshop.prepare(golden_config))
    for moment in moments:
        root = workshop.folder / str(moment)
        config = config_of(workshop, "ab", root, edges)
        others: list[PreparedData] = []
        with at_moment(moment, lambda config=config, others=others: others.append(workshop.prepare(config))) as passed:
            mine = workshop.prepare(config)
        assert len(others) == 1, passed
        assert files_of(mine) == files_of(others[0]) == golden, passed[moment - 1]
        assert not list(root.glob("*/staging/units/*.json")), passed[moment - 1]


@pytest.mark.parametrize("edges", EDGES)
def test_a_builder_of_other_files_may_run_through_at_any_moment(workshop: Workshop, edges: Any) -> None:
    """Whoever fixes measured edges first, both versions have them, hold their own rows and verify."""
    moments = moments_of(workshop, config_of(workshop, "ab", workshop.folder / "golden", edges))
    ids = {"ab": 5, "bc": 7}
    for moment in moments[1::2]:
        root = workshop.folder / str(moment)
        mine, other = (config_of(workshop, names, root, edges) for names in ("ab", "bc"))
        others: list[PreparedData] = []
        with at_moment(moment, lambda config=other, others=others: others.append(workshop.prepare(config))) as passed:
            own = workshop.prepare(mine)
        assert own.manifest.edges_tokens == others[0].manifest.edges_tokens, passed[moment - 1]
        for names, config, data in (("ab", mine, own), ("bc", other, others[0])):
            found = load_data(data.location, fingerprint=data.fingerprint, verify="full")
            assert found.manifest == data.manifest
            assert len(samples_of(found, config)) == found.manifest.samples == ids[names]
            assert workshop.prepare(config).reused
