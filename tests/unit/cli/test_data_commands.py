"""`data ...` on the command line: a data set from its files to its plan, and every way to ask for the impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.cli import main
from dflash.data.prepare import load_data
from tests.support.sealing import rewrite

CONFIG = """
run: {name: toy, root: ROOT}
target: {path: demo, mask_token: "<|mask|>"}
drafter: {target_layer_ids: [0, 1, 2]}
data: {source: files, files: [ROOT/*.jsonl], answers: {regenerate: false}, bad_rows: quarantine, max_bad_frac: 0.2}
tracking: {enabled: false}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("ROOT", str(tmp_path)), encoding="utf-8")
    rows = ({"prompt": f"what is {n} + {n}?", "completion": f"it is {2 * n} " * (1 + n % 9)} for n in range(30))
    write(tmp_path / "a.jsonl", *rows)
    return tmp_path


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """A command that succeeds, as JSON."""
    assert main([*(str(argument) for argument in arguments), "--json"]) == 0
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    return payload


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a command that fails like a user error: one error, with a remedy, and no result."""
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert "-> " in captured.err
    assert "Traceback" not in captured.err
    return captured.err


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


class TestPrepareAndShow:
    def test_what_is_built_is_shown_and_found_again(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = run(capsys, "data", "prepare", work / "config.yaml")
        assert first["reused"] is False
        before = files_below(work / "data")
        assert run(capsys, "data", "prepare", work / "config.yaml")["reused"] is True
        assert files_below(work / "data") == before
        for verify in ("sizes", "sampled", "full"):
            shown = run(capsys, "data", "show", first["location"], "--verify", verify)
            assert {key: shown[key] for key in first["manifest"]} == first["manifest"]

    def test_the_table_adds_up(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write(work / "b.jsonl", "{oops", {"prompt": "x", "completion": "y and z"})
        built = run(capsys, "data", "prepare", work / "config.yaml")
        assert main(["data", "show", built["location"]]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split() == ["bucket", "<=", "tokens", "samples", "tokens", "supervised"]
        cells = [[int(cell) for cell in line.split()] for line in lines[:-2]]
        manifest = built["manifest"]
        assert [row[1] for row in cells] == manifest["edges_tokens"]
        sums = [sum(row[column] for row in cells) for column in (2, 3, 4)]
        assert sums == [manifest["samples"], manifest["tokens"], manifest["supervised_tokens"]]
        assert "2 sources, 32 rows; quarantined: not_json 1" in lines[-2]
        assert manifest["fingerprint"] in lines[-1]
        assert "every hash verified" in lines[-1]

    def test_an_older_version_is_shown_by_its_fingerprint(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        old = run(capsys, "data", "prepare", work / "config.yaml")
        write(work / "b.jsonl", {"prompt": "more", "completion": "of the same"})
        new = run(capsys, "data", "prepare", work / "config.yaml")
        assert new["location"] == old["location"]
        assert run(capsys, "data", "show", new["location"])["samples"] == 31
        shown = run(capsys, "data", "show", new["location"], "--fingerprint", old["manifest"]["fingerprint"])
        assert shown["samples"] == 30

    @pytest.mark.parametrize(
        ("where", "said"),
        [
            ("nowhere", "no complete data set"),
            (".", "no complete data set"),
            ("a.jsonl", "no complete data set"),
            ("gs://bucket/x", "unknown scheme"),
            ("s3://", "lacks a bucket"),
        ],
    )
    def test_a_place_without_a_data_set(self, work: Path, capsys: pytest.CaptureFixture[str], where: str, said: str) -> None:
        assert said in refused(capsys, "data", "show", where if "://" in where else work / where)

    @pytest.mark.parametrize("fingerprint", ["0" * 64, "abc", "../../a.jsonl", ""])
    def test_a_version_that_is_not_there(self, work: Path, capsys: pytest.CaptureFixture[str], fingerprint: str) -> None:
        location = run(capsys, "data", "prepare", work / "config.yaml")["location"]
        refused(capsys, "data", "show", location, "--fingerprint", fingerprint)

    def test_a_data_set_that_is_damaged(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        location = Path(run(capsys, "data", "prepare", work / "config.yaml")["location"])
        shard = next(location.glob("bucket=*/*.parquet"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 3] ^= 4
        shard.write_bytes(content)
        assert shard.name in refused(capsys, "data", "show", location)
        run(capsys, "data", "show", location, "--verify", "sizes")
        rewrite(location / "manifest.json", samples=1, schema_version=1)
        assert "schema version 1" in refused(capsys, "data", "show", location, "--verify", "sizes")


class TestRefusals:
    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("data.files=[HERE/none.jsonl]", "none.jsonl"),
            ("data.files=[HERE/*.none]", "no file matches"),
            ("data.files=[HERE]", "HERE"),
            ("data.files=[gs://bucket/x.jsonl]", "unknown scheme 'gs'"),
            ("data.files=[HERE/a.jsonl, HERE/copy/a.jsonl]", "same name and the same content"),
            ("data.files=[HERE/empty]", "no row at all"),
            ("data.files=[HERE/bad]", "2 of 2 rows cannot be used"),
            ("data.store=gs://bucket/x", "unknown scheme 'gs'"),
            ("data.store=s3://", "lacks a bucket"),
            ("data.store=HERE/a.jsonl", "a.jsonl"),
            ("data.runner=dask", "data.runner is 'dask'"),
            ("target.path=HERE/empty", "empty"),
            ("target.mask_token=nonsense", "nonsense"),
            ("data.bucket_edges_tokens=[300, 200]", "[300, 200]"),
            ("data.over_long=explode", "explode"),
        ],
    )
    def test_nothing_is_built_from_it(self, work: Path, capsys: pytest.CaptureFixture[str], override: str, said: str) -> None:
        (work / "empty").write_bytes(b"")
        write(work / "bad", "{oops", "[1]")
        (work / "copy").mkdir()
        (work / "copy" / "a.jsonl").write_bytes((work / "a.jsonl").read_bytes())
        message = refused(capsys, "data", "prepare", work / "config.yaml", override.replace("HERE", str(work)))
        assert said.replace("HERE", str(work)) in message
        assert not list(work.glob("data/*/manifest*"))

    def test_one_bad_row_too_many(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rows = (work / "a.jsonl").read_text().splitlines()
        write(work / "a.jsonl", *rows[:8], "{oops", "{oops")
        assert run(capsys, "data", "prepare", work / "config.yaml")["manifest"]["quarantined"] == {"not_json": 2}
        write(work / "a.jsonl", *rows[:8], "{oops", "{oops", "{oops")
        message = refused(capsys, "data", "prepare", work / "config.yaml")
        assert "3 of 11 rows cannot be used (not_json 3), data.max_bad_frac is 0.2" in message
        listed = Path(message.rpartition("all are listed in ")[2].strip())
        assert len(listed.read_text().splitlines()) == 3


class TestPlan:
    def test_without_a_data_set_it_is_built_and_found_again(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = run(capsys, "data", "plan", work / "config.yaml")
        data = load_data(first["data"], fingerprint=first["manifest"]["data_fingerprint"], verify="full")
        assert data.manifest.samples == first["manifest"]["samples"] == 30
        before = files_below(work)
        assert run(capsys, "data", "plan", work / "config.yaml") == first
        assert files_below(work) == before, "the plan itself is not stored"

    @pytest.mark.parametrize("order", ["interleave", "shuffle", "sorted", "random"])
    def test_any_order_is_summed_up_in_a_line(self, work: Path, capsys: pytest.CaptureFixture[str], order: str) -> None:
        assert main(["data", "plan", str(work / "config.yaml"), f"plan.order={order}", "train.epochs=2"]) == 0
        line = capsys.readouterr().out
        assert "batches in 2 epochs, padding efficiency 0." in line
        assert ("keeps no limit" in line) == (order != "interleave")

    def test_a_picture_that_cannot_be_written(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        picture = work / "no" / "folder" / "plan.png"
        assert "plan.png" in refused(capsys, "data", "plan", work / "config.yaml", "--output", picture)


class TestCollect:
    def test_files_that_nothing_names_are_listed_and_then_removed(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        built = run(capsys, "data", "prepare", work / "config.yaml")
        location = Path(built["location"])
        before = files_below(location)
        assert run(capsys, "data", "gc", location) == {"files": [], "size_bytes": 0}
        orphan = location / "bucket=0" / "part-0123456789ab-00000-01234567.parquet"
        orphan.write_bytes(b"12345")
        listed = {"files": [str(orphan.relative_to(location))], "size_bytes": 5}
        assert run(capsys, "data", "gc", location) == listed
        assert orphan.exists()
        assert run(capsys, "data", "gc", location, "--delete") == listed
        assert files_below(location) == before

    @pytest.mark.parametrize("where", ["", "nowhere"])
    def test_another_folder_is_left_alone(self, work: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
        before = files_below(work)
        assert "no data set" in refused(capsys, "data", "gc", work / where, "--delete")
        assert files_below(work) == before

    def test_a_damaged_record_stops_it(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        location = Path(run(capsys, "data", "prepare", work / "config.yaml")["location"])
        [record] = location.glob("units/*.json")
        record.write_text(record.read_text().replace("part-", "patt-"))
        before = files_below(location)
        assert record.name in refused(capsys, "data", "gc", location, "--delete")
        assert files_below(location) == before
