"""Builds that are killed at any moment: nothing that verifies is ever wrong, and the next build goes on where it stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from workshop import GOOD, Workshop, rows

from dflash.data.prepare import PreparedData, load_data
from dflash.data.tokenize import BatchTokenizer, TokenizedBatch
from dflash.errors import DataError
from tests.support.amount import amount
from tests.support.killed_builds import kill_builds

KILLS = amount(3, full=5)


def files_of(place: Workshop) -> tuple[str, ...]:
    return (
        place.corpus(*GOOD),
        place.corpus("{oops", *rows(*(f"numbers {number}" for number in range(90))), name="b.jsonl"),
        place.corpus(*rows(*("talk " * number for number in range(1, 9))), name="c.jsonl"),
    )


def content(data: PreparedData) -> dict[str, bytes]:
    """Every file that the manifest stands for, and the manifest."""
    manifest = data.manifest
    names = [file.path for file in (*manifest.shards, *manifest.prompt_files, *manifest.quarantine_files)]
    return {name: data.store.read(name) for name in [*names, f"manifests/{data.fingerprint[:16]}.json"]}


def check_what_is_left(data_root: Path, golden: dict[str, bytes]) -> None:
    """Every manifest that is there verifies in full and is the right one."""
    for file in [*data_root.glob("*/manifest.json"), *data_root.glob("*/manifests/*.json")]:
        named = file.name != "manifest.json"
        folder = file.parent.parent if named else file.parent
        fingerprint = str(json.loads(file.read_text())["fingerprint"]) if named else None
        assert content(load_data(folder, fingerprint=fingerprint, verify="full")) == golden


@pytest.mark.parametrize(
    "settings",
    [{"rows_per_shard": 20}, {"rows_per_shard": 20, "bucket_edges_tokens": "auto", "num_buckets": 3}],
    ids=["given edges", "measured edges"],
)
def test_a_build_killed_at_random_moments_ends_as_if_it_never_was(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    common = {**settings, "bad_rows": "quarantine", "max_bad_frac": 0.2}
    undisturbed = Workshop(tmp_path_factory.mktemp("undisturbed"), workshop.target_dir)
    steps: list[str] = []
    golden = content(
        undisturbed.prepare(undisturbed.config(*files_of(undisturbed), **common), progress=lambda *_: steps.append(""))
    )
    files = files_of(workshop)
    common["files"] = list(files)
    # Each kill is somewhere in what the former ones have left to do; a late builder may get through.
    choose = random.Random(len(settings))
    builders = kill_builds(workshop.folder, common, [choose.randrange(3, 40) for _ in range(KILLS)])
    assert sum(builder["killed_at"] is not None for builder in builders) >= KILLS // 2
    for number in range(KILLS):
        check_what_is_left(workshop.folder / f"after-{number}", golden)
    finished = workshop.prepare(workshop.config(*files, **{key: value for key, value in common.items() if key != "files"}))
    assert content(finished) == golden
    check_what_is_left(workshop.data_root, golden)


def test_finished_files_are_not_built_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    config = workshop.config(*files_of(workshop), bad_rows="quarantine", max_bad_frac=0.2)
    done = workshop.prepare(config)
    folder = Path(done.location)
    records = sorted(folder.glob("units/*.json"), key=lambda file: json.loads(file.read_text())["source"]["label"])
    for file in (*workshop.manifests(), records[1]):  # as a kill before the second record would have left it
        file.unlink()
    stamps = {path: path.stat().st_mtime_ns for path in (records[0], records[2], *folder.glob("bucket=*/*"))}
    rows_seen: list[int] = []
    original = BatchTokenizer.__call__

    def counting(self: BatchTokenizer, batch: Any) -> TokenizedBatch:
        found = original(self, batch)
        rows_seen.append(found.rows)
        return found

    monkeypatch.setattr(BatchTokenizer, "__call__", counting)
    again = workshop.prepare(config)
    assert (again.reused, again.manifest) == (False, done.manifest)
    assert sum(rows_seen) == done.manifest.sources[1].rows, "only the unfinished file was read again"
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "nothing that was there is written again"
    assert records[1].exists()


def test_answers_of_an_interrupted_build_are_kept(workshop: Workshop) -> None:
    def interrupted(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        if len(workshop.target.batches) == 5:
            raise KeyboardInterrupt
        return workshop.target(prompts, keys)

    corpus = workshop.corpus(*({"prompt": f"question {number}"} for number in range(40)))
    config = workshop.config(corpus, regenerate=True, answers={"batch_size": 2})
    with pytest.raises(KeyboardInterrupt):
        workshop.prepare(config, generate=interrupted)
    assert workshop.manifests() == []
    (folder,) = workshop.left_behind()
    with pytest.raises(DataError, match="no complete data set"):
        load_data(workshop.data_root / folder, fingerprint=None, verify="sizes")
    data = workshop.prepare(config)
    assert data.manifest.samples == 40
    assert len(workshop.target.keys) == 40, "what was answered came from the journal"
    assert len(set(workshop.target.keys)) == 40
    load_data(data.location, fingerprint=data.fingerprint, verify="full")
    assert not list(workshop.data_root.glob("*/.scratch"))
