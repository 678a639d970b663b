"""Pieces of a data set as task runs: their names, what is tried again, what ends everything, and engines that are missing."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import State, flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.task_runners import ThreadPoolTaskRunner

from dflash.config import DataConfig
from dflash.errors import ConfigError, DataError, StorageError
from tasks import data_piece, spread

DASK = DataConfig(num_conversations=4, runner="dask", workers=2, answers={"regenerate": False})


class WorkerLostError(Exception):
    """Stands in for what an engine raises when it gives a piece up."""


@dataclass(frozen=True)
class Piece:
    """Fails as often as a file of failures says, then gives its name."""

    name: str
    failures: Path
    rows: int = 1

    def run(self, *, progress: Any) -> str:
        progress("tokenize", 1, 1)
        left = json.loads(self.failures.read_text()) if self.failures.exists() else []
        if left:
            self.failures.write_text(json.dumps(left[1:]))
            kind = {"storage": StorageError, "data": DataError}.get(left[0])
            raise WorkerLostError("killed") if kind is None else kind("it is away", remedy="wait")
        return self.name.upper()


@pytest.fixture
def _threads(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process in place of a cluster's workers."""
    monkeypatch.setattr(spread, "_dask", lambda data: (ThreadPoolTaskRunner, WorkerLostError))
    monkeypatch.setattr(data_piece, "_begin", lambda: None)
    monkeypatch.setattr(data_piece.carry_out, "retry_delay_seconds", 0)


@flow
def carry(pieces: Any) -> dict[int, str]:
    with spread.open_spread(DASK) as over:
        return dict(over(pieces))


def failing(folder: Path, *failures: str) -> list[Piece]:
    (folder / "failures").write_text(json.dumps(failures))
    return [Piece("build a.jsonl", folder / "none"), Piece("build b.jsonl", folder / "failures")]


def task_names(state: State[Any]) -> list[str]:
    with get_client(sync_client=True) as client:
        only = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        return sorted(run.name for run in client.read_task_runs(flow_run_filter=only))


@pytest.mark.usefixtures("_threads")
def test_each_piece_is_a_task_run_of_its_own_name_and_keeps_its_place(tmp_path: Path) -> None:
    state = carry(failing(tmp_path), return_state=True)
    assert state.result() == {0: "BUILD A.JSONL", 1: "BUILD B.JSONL"}
    assert task_names(state) == ["build a.jsonl", "build b.jsonl"]


@pytest.mark.usefixtures("_threads")
def test_a_store_that_is_away_is_asked_again_and_a_bad_row_is_not(tmp_path: Path) -> None:
    assert carry(failing(tmp_path, "storage", "storage")) == {0: "BUILD A.JSONL", 1: "BUILD B.JSONL"}
    with pytest.raises(DataError, match="it is away"):
        carry(failing(tmp_path, "data"))
    assert json.loads((tmp_path / "failures").read_text()) == [], "tried once"


@pytest.mark.usefixtures("_threads")
def test_a_piece_that_kills_every_worker_ends_with_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the workers that did `build b\.jsonl` were killed") as caught:
        carry(failing(tmp_path, "lost"))
    assert "out-of-memory" in caught.value.remedy


@pytest.mark.parametrize(("runner", "package"), [("dask", "prefect_dask"), ("ray", "prefect_ray")])
def test_a_missing_engine_is_named_with_the_command_that_installs_it(
    runner: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    data = DASK.model_copy(update={"runner": runner})
    with pytest.raises(ConfigError) as caught, spread.open_spread(data):
        pytest.fail("there is no engine")
    assert f"data.runner is '{runner}'" in caught.value.what
    assert package in caught.value.what
    assert f"--editable '.[{runner}]'" in caught.value.remedy


def test_a_piece_that_takes_long_says_so_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(data_piece.time, "monotonic", lambda: now_s[0])
    log = data_piece.PieceLog("build a.jsonl")
    with caplog.at_level(logging.INFO, logger="tasks.data_piece"):
        for now_s[0], done in ((101.0, 1), (110.5, 2), (115.0, 3), (121.0, 4)):
            log("tokenize", done, 9)
    assert [record.message for record in caplog.records] == ["build a.jsonl: tokenize 2/9", "build a.jsonl: tokenize 4/9"]
