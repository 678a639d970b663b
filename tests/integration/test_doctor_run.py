"""The doctor on a real small run of the demo: both parts pass, are kept as files, and a data set of another kind is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.config import parse_config
from dflash.errors import PreflightError, StorageError
from dflash.stages import Run, doctor_stage, open_run, plan_stage, prepare_stage
from dflash.storage import open_store
from dflash.train.doctor import examine
from dflash.train.doctor.machine import clock_check, storage_check
from tests.support.s3_server import BUCKET, point_to, s3_server

CONFIG = """
run: {{name: examined, root: {root}}}
target: {{path: demo, mask_token: "<|mask|>"}}
drafter: {{initializer_range: 0.12}}
data:
  num_conversations: 24
  answers: {{max_new_tokens: 48, batch_size: 24, keep_unfinished: true}}
tracking: {{enabled: false}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("doctor") / "runs"
    opened = open_run(parse_config(CONFIG.format(root=root), origin="test"))
    plan_stage(opened, prepare_stage(opened, progress=lambda *_: None))
    return opened


def test_both_parts_pass_and_are_kept(run: Run) -> None:
    first, second = doctor_stage(run, part="start"), doctor_stage(run, part="data")
    assert {result.status for result in first.results} <= {"ok", "warn"}
    assert {result.name: result.status for result in second.results} == {
        "data set": "ok",
        "mask token": "ok",
        "labels": "ok",
        "overfit": "ok",
    }
    assert "unused by the data set" in next(r.message for r in second.results if r.name == "mask token")
    for part, report in (("start", first), ("data", second)):
        kept = json.loads((run.paths.root / f"doctor-{part}.json").read_text())
        assert kept == json.loads(json.dumps(report.payload))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.template_flags={enable_thinking: true}", "template_flags"),
        ("target={path: demo, mask_token_id: 400}", "mask_token_id: data set 3, here 400"),
    ],
)
def test_a_data_set_that_was_made_otherwise_is_refused(override: str, named: str, run: Run, tmp_path: Path) -> None:
    config = parse_config(CONFIG.format(root=tmp_path), origin="test", overrides=[override])
    report = examine(config, parts=("data",), paths=run.paths, overfit_limit_s=1.0)
    found = {result.name: result for result in report.results}
    assert found["data set"].status == "fail"
    assert named in found["data set"].message


def test_a_data_set_that_is_not_the_runs_own_ends_it_with_the_doctors_words(run: Run) -> None:
    pointer = run.paths.data_pointer
    raw = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**raw, "fingerprint": "0" * 64}))
    try:
        with pytest.raises(PreflightError, match="1 of 1 checks failed: data set"):
            doctor_stage(run, part="data")
    finally:
        pointer.write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


def test_an_s3_store_is_written_to_and_its_clock_compared(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to(monkeypatch, endpoint)
    config = parse_config(CONFIG.format(root=tmp_path), origin="test", overrides=[f"data.store=s3://{BUCKET}/doctor"])
    stored = storage_check(config)
    assert stored.status == "ok"
    assert f"s3://{BUCKET}/doctor" in stored.message
    assert list(open_store(f"s3://{BUCKET}/doctor").names("")) == []
    assert "store" in clock_check(config).message
    with pytest.raises(StorageError):
        storage_check(parse_config(CONFIG.format(root=tmp_path), origin="test", overrides=["data.store=s3://no-such-bucket/x"]))
