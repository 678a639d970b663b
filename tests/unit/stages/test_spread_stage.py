"""A data set whose pieces are carried out elsewhere, in any order, is the one that is built here."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dflash.config import Config
from dflash.data.prepare import PreparedData
from dflash.data.work import HashWork, UnitWork, Work
from dflash.errors import ConfigError, DataError, StorageError, TargetError
from dflash.stages import build_data, build_spread

QUIET: Any = lambda *_: None  # noqa: E731


class Elsewhere:
    """Carries pieces out from the last to the first, each as a worker gets it: as bytes."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, work: Sequence[Work[Any]]) -> Iterator[tuple[int, Any]]:
        for place in reversed(range(len(work))):
            self.names.append(work[place].name.partition(" (")[0])
            piece = pickle.loads(pickle.dumps(work[place]))  # noqa: S301 - our own bytes
            yield place, piece.run(progress=QUIET)


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files; the working directory is theirs, so that they can be named relative to it."""
    for letter, count in (("a", 5), ("b", 90), ("c", 30)):
        rows = [
            {"prompt": f"{letter} {n}: " + "why " * (n % 9), "reference": f"because {n} " + "so " * (n % 23)} for n in range(count)
        ]
        write(tmp_path / f"{letter}.jsonl", *rows, *(["{oops"] if letter == "b" else []))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(root: str, **data: Any) -> Config:
    tree = {"source": "files", "files": ["[abc].jsonl"], "answers": {"regenerate": False}, "bad_rows": "quarantine", **data}
    return Config.model_validate({"run": {"root": root}, "target": {"path": "demo", "mask_token": "<|mask|>"}, "data": tree})


def content(data: PreparedData) -> dict[str, bytes]:
    names = [name for name in data.store.names("") if name != "build.json"]
    return {name: data.store.read(name) for name in names}


@pytest.mark.parametrize("edges", [(48, 72, 256), "auto"])
def test_pieces_done_elsewhere_in_any_order_make_the_same_data_set(corpus: Path, edges: Any) -> None:
    local = build_data(config("here", bucket_edges_tokens=edges), progress=QUIET)
    elsewhere, steps = Elsewhere(), []
    spread = config("there", bucket_edges_tokens=edges, runner="dask", workers=7)
    data = build_spread(spread, spread=elsewhere, progress=lambda *step: steps.append(step))
    assert content(data) == content(local)
    assert not data.reused
    files = ["c.jsonl", "b.jsonl", "a.jsonl"]
    tokenized = [f"{verb} {file}" for verb in (("tokenize", "build") if edges == "auto" else ("build",)) for file in files]
    assert elsewhere.names == [*(f"hash {file}" for file in files), *tokenized]
    assert [step for step in steps if step[0] == "tokenize"] == [("tokenize", done, 126) for done in (0, 30, 121, 126)]
    assert build_spread(spread, spread=elsewhere, progress=QUIET).reused


def test_a_build_that_stopped_goes_on_with_the_files_that_are_missing(corpus: Path) -> None:
    settings = config("there", runner="dask", bad_rows="error")
    with pytest.raises(DataError, match=r"b\.jsonl:91: not_json"):
        build_spread(settings, spread=Elsewhere(), progress=QUIET)
    finished = sorted(path.name for path in corpus.glob("there/data/*/units/*.json"))
    assert len(finished) == 1, "the last file was done before the bad one"
    assert not list(corpus.glob("there/data/*/manifest*"))
    data = build_spread(config("there", runner="dask"), spread=Elsewhere(), progress=QUIET)
    assert content(data) == content(build_data(config("here"), progress=QUIET))


def test_generated_conversations_can_be_built_elsewhere_too(tmp_path: Path) -> None:
    trees = [
        config(str(tmp_path / place), source="synthetic", files=[], num_conversations=8, runner=runner)
        for place, runner in (("here", "local"), ("there", "ray"))
    ]
    spread = build_spread(trees[1], spread=Elsewhere(), progress=QUIET)
    assert content(spread) == content(build_data(trees[0], progress=QUIET))


def test_a_worker_with_another_tokenizer_refuses_to_work(corpus: Path) -> None:
    class OtherTokenizer(Elsewhere):
        def __call__(self, work: Sequence[Work[Any]]) -> Iterator[tuple[int, Any]]:
            return super().__call__([self.changed(piece) for piece in work])

        @staticmethod
        def changed(piece: Work[Any]) -> Work[Any]:
            if not isinstance(piece, UnitWork):
                return piece
            recipe = replace(piece.job.recipe, tokenizer_sha256="0" * 64)  # the builder's is not the worker's
            return replace(piece, job=replace(piece.job, recipe=recipe))

    with pytest.raises(TargetError, match="loads another tokenizer"):
        build_spread(config("there", runner="dask"), spread=OtherTokenizer(), progress=QUIET)
    assert not list(corpus.glob("there/data/*/units/*.json"))


def test_a_worker_that_cannot_reach_a_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
        HashWork(str(tmp_path / "nowhere.jsonl")).run(progress=QUIET)


def test_without_the_flow_a_cluster_is_refused_unless_everything_is_there(corpus: Path) -> None:
    settings = config("there", runner="ray")
    with pytest.raises(ConfigError, match="only the flow reaches the workers") as caught:
        build_data(settings, progress=QUIET)
    assert "python -m flows.prepare" in caught.value.remedy
    built = build_spread(settings, spread=Elsewhere(), progress=QUIET)
    assert build_data(settings, progress=QUIET).fingerprint == built.fingerprint


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_workers_never_load_the_target_each(runner: str) -> None:
    with pytest.raises(ValidationError, match=r"every worker would load the target.*answers\.engine: server"):
        config("there", runner=runner, answers={"regenerate": True, "engine": "in_process"})
    served = {"regenerate": True, "engine": "server", "server": {"url": "http://127.0.0.1:1/v1"}}
    assert config("there", runner=runner, answers=served).data.runner == runner
