"""`data plan` on the command line: the plan of a run before the run, in numbers and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli import main
from dflash.data.plan import load_plan
from dflash.errors import EXIT_OK, EXIT_USER_ERROR
from tests.support.plans import positions_of_epoch
from tests.support.tiny_run import TinyRun, build_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return build_tiny_run(tmp_path_factory.mktemp("planned"))


def test_the_survey_is_the_plan_that_the_run_has(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.data_dir.rglob("*"))
    assert main(["data", "plan", str(run.paths.config), "--data", str(run.data_dir), "--json"]) == EXIT_OK
    payload = json.loads(capsys.readouterr().out)
    stored = load_plan(run.paths.plan_dir)
    assert payload["manifest"]["plan_sha256"] == stored.manifest.plan_sha256
    assert payload["stats"]["batches"] == len(positions_of_epoch(stored, 0))
    assert payload["picture"] is None
    assert sorted(run.data_dir.rglob("*")) == before, "nothing is written"


def test_the_table_has_a_line_for_every_bucket_and_the_picture_is_written(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    arguments = ["data", "plan", str(run.paths.config), "plan.order=sorted", "--data", str(run.data_dir)]
    assert main([*arguments, "--stats", "--output", str(picture)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    stored = load_plan(run.paths.plan_dir)
    edges = run.config.data.bucket_edges_tokens
    for bucket, edge in enumerate(edges):
        cells = lines[1 + bucket].split()
        own = [stored[p] for p in positions_of_epoch(stored, 0) if stored[p].bucket == bucket]
        assert cells[:2] == [str(bucket), str(edge)]
        assert cells[2] == str(sum(len(batch.rows) for batch in own))
        assert cells[4] == str(len(own))
    text = "\n".join(lines)
    assert "the order `sorted` keeps no limit" in text
    assert "random batches of 16 would reach" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_missing_data_set_is_one_clear_error(run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "plan", str(run.paths.config), "--data", str(tmp_path / "none"), "--json"]) == EXIT_USER_ERROR
    assert "error" in json.loads(capsys.readouterr().out)
