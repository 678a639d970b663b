"""A log in S3 is judged by ranged reads, ours or somebody else's, by key or by folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

from dflash.cli import main
from dflash.errors import EXIT_UNHEALTHY
from dflash.storage import open_store
from tests.support import foreign_logs as logs
from tests.support.log_simulator import log_lines, nonfinite, simulate_run
from tests.support.s3_server import BUCKET, point_to, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    point_to(monkeypatch, endpoint)
    return f"s3://{BUCKET}/{uuid4().hex}"


def test_our_log_is_judged_by_key_and_by_folder(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = nonfinite(simulate_run(seed=3, steps=200, lr=lambda step: 1e-3), steps=range(150, 200), skipped=False)
    open_store(folder).put("train_log.jsonl", log_lines(records), only_if_absent=False)
    for address in (folder, f"{folder}/train_log.jsonl"):
        assert main(["health", address, "--json"]) == EXIT_UNHEALTHY
        report = json.loads(capsys.readouterr().out)
        assert report["records"] == 200
        assert report["damage"]["onset_step"] == 150


def test_somebody_elses_log_is_judged(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(folder).put("metrics.csv", logs.table(logs.curve(records=100, seed=2)), only_if_absent=False)
    assert main(["health", f"{folder}/metrics.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["foreign"]["format"] == "table (CSV)"


def test_an_object_that_is_not_there_is_an_error(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", f"{folder}/none.jsonl"]) == 1
    assert "there is no log" in capsys.readouterr().err
