"""A log of ours by itself: read once however often it is judged, with the configuration beside it if there is one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash.cli.health_log import LogJudge
from dflash.cli.log_sources import LocalPlace, StoreLog
from dflash.config import dump_config, parse_config
from dflash.errors import SchemaVersionError
from dflash.health import FieldMap, Piece, parse_map
from dflash.records import HealthReport
from dflash.storage import open_store
from tests.support import foreign_logs as logs
from tests.support.health_runs import config, healthy, judged
from tests.support.log_simulator import log_lines, nonfinite, resumed, simulate_run, without_steps

RUN = simulate_run(seed=3, steps=260, lr=lambda step: 1e-3)
END_S = 1_700_000_060.0


class Counted(LocalPlace):
    """Counts the bytes that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes_read = 0

    def read_at(self, offset: int, *, before: int, max_bytes: int) -> Piece | None:
        piece = super().read_at(offset, before=before, max_bytes=max_bytes)
        self.bytes_read += 0 if piece is None else len(piece.tail) + len(piece.data)
        return piece


def judge_of(path: Path, *, given: FieldMap | None = None) -> tuple[LogJudge, Counted]:
    source = Counted(path)
    return LogJudge(source, given=given or FieldMap(), name="x"), source


def report_of(path: Path, **options: FieldMap) -> HealthReport:
    return judge_of(path, **options)[0].judge(now_s=END_S, ended=True).report


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(log_lines(RUN))
    return path


def test_the_verdict_is_the_checkers_own(log: Path) -> None:
    records = nonfinite(RUN, steps=range(150, 260), skipped=False)
    log.write_bytes(log_lines(records))
    alone, with_run = report_of(log), judged(records)
    assert alone.verdict == with_run.verdict == "unhealthy"
    assert alone.damage == with_run.damage
    assert alone.decision is None


def test_a_growing_log_is_read_once(tmp_path: Path) -> None:
    lines = log_lines(RUN).splitlines(keepends=True)
    path = tmp_path / "log"
    path.write_bytes(lines[0])
    judge, source = judge_of(path)
    for start in range(1, len(lines), 40):
        judge.judge(now_s=END_S, ended=True)
        with path.open("ab") as file:
            file.write(b"".join(lines[start : start + 40]))
    report = judge.judge(now_s=END_S, ended=True).report
    assert report.records == 260
    assert report.findings == report_of(path).findings
    checks = len(range(1, len(lines), 40)) + 1
    assert source.bytes_read <= path.stat().st_size + len(lines[0]) + 4096 * checks


def test_a_resumed_a_gapped_and_a_torn_log_are_read_as_in_a_run(log: Path) -> None:
    records = resumed(without_steps(RUN, 60, 64), died_at=200, from_step=150)
    data = log_lines(records)
    log.write_bytes(data[:5000] + b'{"kind": "st\n' + data[5000 + data[5000:].index(b"\n") + 1 :])
    report = report_of(log)
    assert report.segment == 1
    assert report.stats["dead_records"] == 51
    found = {finding.detector for finding in report.findings}
    assert "step integrity" in found


def test_the_configuration_beside_the_log_is_used(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = "train: {schedule: constant, lr: 1.0e-3, warmup_frac: 0.0}"
    text = f"target: {{mask_token: x}}\ndata: {{num_conversations: 3}}\n{schedule}\n"
    beside = log.parent / "config.yaml"
    beside.write_text(dump_config(parse_config(text, origin="test")))
    row = next(row for row in report_of(log).detectors if row.detector == "lr mismatch")
    assert (row.checked, row.findings) == (260, 0)
    beside.write_text(dump_config(parse_config(text.replace("1.0e-3", "2.0e-3"), origin="test")))
    row = next(row for row in report_of(log).detectors if row.detector == "lr mismatch")
    assert row.findings > 0
    beside.write_text("train: [")
    with caplog.at_level(logging.WARNING):
        assert report_of(log).records == 260
    assert "is not used" in caplog.text


def test_a_mapping_makes_our_own_log_somebody_elses(log: Path) -> None:
    report = report_of(log, given=parse_map(["loss=ce,step=step"]))
    assert report.stats["foreign"]["fields"]["loss"] == "ce"
    assert report.records == 260


def test_somebody_elses_log_is_read_again_when_it_has_grown(tmp_path: Path) -> None:
    rows = logs.curve(records=120, seed=4)
    path = tmp_path / "log.jsonl"
    path.write_bytes(logs.json_lines(rows[:80]))
    judge, _ = judge_of(path)
    assert judge.judge(now_s=END_S, ended=True).report.records == 80
    path.write_bytes(logs.json_lines([*rows, rows[-1] | {"step": 9999, "loss": float("nan")}]))
    report = judge.judge(now_s=END_S, ended=True).report
    assert (report.records, report.verdict) == (121, "unhealthy")


def test_a_log_that_becomes_ours_while_it_is_watched_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(b"")
    judge, _ = judge_of(path)
    assert judge.judge(now_s=END_S, ended=True).report.verdict == "blind"
    path.write_bytes(log_lines(RUN))
    assert judge.judge(now_s=END_S, ended=True).report.records == 260


def test_a_log_that_becomes_somebody_elses_while_it_is_watched_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n")
    judge, _ = judge_of(path)
    assert judge.judge(now_s=END_S, ended=True).report.verdict == "blind"
    path.write_bytes(logs.json_lines(logs.curve(records=80, seed=1)))
    assert judge.judge(now_s=END_S, ended=True).report.verdict == "healthy"


def test_another_schema_version_is_refused(log: Path) -> None:
    log.write_bytes(log_lines(RUN).replace(b'"schema_version":1', b'"schema_version":7'))
    with pytest.raises(SchemaVersionError, match="schema version 7"):
        report_of(log)


def test_an_object_in_a_store_gives_the_same_verdict(log: Path) -> None:
    source = StoreLog(open_store(str(log.parent)), log.name)
    there = LogJudge(source, given=FieldMap(), name="x").judge(now_s=END_S, ended=True).report
    assert there == report_of(log)
    missing = LogJudge(StoreLog(open_store(str(log.parent)), "none"), given=FieldMap(), name="x")
    assert missing.judge(now_s=END_S, ended=True).report.verdict == "blind"


def test_a_healthy_run_on_its_schedule_is_healthy_alone_too(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    path.write_bytes(log_lines(healthy(seed=6, steps=700)))
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    report = report_of(path)
    assert report.verdict == "healthy"
    assert report.coverage_frac == 1.0
