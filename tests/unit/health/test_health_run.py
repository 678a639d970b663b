"""The check of a run's folder: incremental, atomic, and never more than one full reading from the truth."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dflash.errors import DataError, SchemaVersionError
from dflash.health import check as check_module
from dflash.health import check_run, checker_of
from dflash.health import run as run_module
from dflash.health.detectors.schedule import scheduled_lr
from dflash.health.reader import TAIL_BYTES, LogCursor, ReadResult, read_new
from dflash.records import HealthReport, RollbackPlan, RunPaths, from_json
from tests.support.health_runs import config, end_of, judged, remedy
from tests.support.log_simulator import log_lines, nonfinite, simulate_run, write_log

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = config()
STEPS = 400
# Two buckets: half the pictures to draw.
RUN = simulate_run(
    seed=6,
    steps=STEPS,
    lr=lambda step: scheduled_lr(CONFIG.train, step, total=STEPS),
    order=[1 + step // 2 % 2 for step in range(STEPS)],
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def check(paths: RunPaths, *, ended: bool = True, now_s: float | None = None) -> HealthReport:
    return check_run(paths, CONFIG, now_s=end_of(RUN) if now_s is None else now_s, ended=ended, remedy=remedy)


def written(paths: RunPaths) -> HealthReport:
    return from_json(HealthReport, (paths.health_dir / "report.json").read_text(), origin="report.json")


@pytest.mark.draws
def test_the_report_is_written_as_it_is_returned(paths: RunPaths) -> None:
    write_log(paths.log, RUN)
    report = check(paths)
    assert report.verdict == "healthy"
    assert report.run == paths.root.name
    assert written(paths) == report
    assert (paths.health_dir / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in paths.health_dir.iterdir()) == [
        "last.json",
        "pictures",
        "report.html",
        "report.json",
        "state.json",
    ]


def test_many_checks_end_where_one_check_ends_and_read_each_byte_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_read = 0

    def counted(path: Path, cursor: LogCursor, **limits: int) -> ReadResult:
        nonlocal bytes_read
        result = read_new(path, cursor, **limits)
        bytes_read += result.bytes_read
        return result

    monkeypatch.setattr(run_module, "read_new", counted)
    log = log_lines(nonfinite(RUN, steps=[200], skipped=True))
    paths.log.write_bytes(b"")
    cuts = [*range(0, len(log), 60_000), len(log)]
    unfinished = 0
    for first, last in pairwise(cuts):
        with paths.log.open("ab") as file:
            file.write(log[first:last])
        unfinished += last - (log.rfind(b"\n", 0, last) + 1)
        check(paths, ended=last == len(log))
    assert bytes_read <= len(log) + unfinished + TAIL_BYTES * len(cuts)
    assert written(paths) == judged_as(paths, log)


def judged_as(paths: RunPaths, log: bytes) -> HealthReport:
    fresh = RunPaths(paths.root / "fresh" / paths.root.name)
    fresh.root.mkdir(parents=True)
    fresh.log.write_bytes(log)
    return check(fresh)


def test_bytes_and_records_are_judged_alike(paths: RunPaths) -> None:
    write_log(paths.log, RUN)
    assert check(paths).findings == judged(RUN).findings


def test_damage_gives_a_decision_that_is_written_once(paths: RunPaths) -> None:
    write_log(paths.log, nonfinite(RUN, steps=range(350, 360), skipped=True))
    first = check(paths).decision
    assert first is not None
    (file,) = (paths.health_dir / "decisions").iterdir()
    assert file.name == f"{first.key}.json"
    assert from_json(RollbackPlan, file.read_text(), origin="decision") == first
    stamp = file.stat().st_mtime_ns
    assert check(paths).decision == first
    assert file.stat().st_mtime_ns == stamp


def test_the_page_is_drawn_again_only_when_due_or_when_something_new_is_found(paths: RunPaths) -> None:
    page = paths.health_dir / "report.html"
    start = end_of(RUN)
    lines = log_lines(RUN).splitlines(keepends=True)
    nan = log_lines(nonfinite(RUN, steps=[350], skipped=True)).splitlines(keepends=True)
    at = next(i for i, (a, b) in enumerate(zip(lines, nan, strict=True)) if a != b)

    def drawn(after_s: float, *, ended: bool = False) -> bool:
        before = page.stat().st_mtime_ns if page.exists() else None
        check(paths, ended=ended, now_s=start + after_s)
        return page.stat().st_mtime_ns != before

    paths.log.write_bytes(b"".join(nan[:at]))
    assert drawn(0)
    assert not drawn(10)
    paths.log.write_bytes(b"".join(nan[: at + 1]))
    assert drawn(20)
    assert not drawn(30)
    assert drawn(20 + CONFIG.health.report_interval_s)
    assert drawn(82, ended=True)


NO_STATE = '{"checker":"wcHBwQ==","cursor":{"inode":0,"offset":0,"tail_sha256":"","skipping":false},"drawn_at_s":0.0,"drawn":""}'


@pytest.mark.parametrize("content", ["", '{"checker":{},"cursor":3}', "\x00\x01", NO_STATE])
def test_a_damaged_state_costs_a_full_reading_and_nothing_else(paths: RunPaths, content: str) -> None:
    write_log(paths.log, RUN)
    expected = check(paths)
    (paths.health_dir / "state.json").write_text(content)
    (paths.health_dir / "last.json").unlink()
    assert check(paths) == expected
    assert json.loads((paths.health_dir / "state.json").read_text())["cursor"]["offset"] == paths.log.stat().st_size


def test_a_finished_run_that_an_earlier_version_has_checked_is_read_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(paths.log, RUN)
    with monkeypatch.context() as earlier:
        earlier.setattr(check_module, "STATE_VERSION", check_module.STATE_VERSION - 1)
        expected = check(paths)
    before = (paths.health_dir / "state.json").read_text()
    assert check(paths) == expected
    assert (paths.health_dir / "state.json").read_text() != before


@pytest.mark.parametrize("content", [None, "damaged", '{"checker":{}}'])
def test_the_curves_are_there_whatever_has_become_of_the_state(paths: RunPaths, content: str | None) -> None:
    write_log(paths.log, RUN)
    check(paths)
    expected = checker_of(paths, CONFIG).history
    (paths.health_dir / "state.json").unlink()
    if content is not None:
        (paths.health_dir / "state.json").write_text(content)
    check(paths)  # finds nothing new, and so leaves the state as it is
    assert checker_of(paths, CONFIG).history == expected
    assert sorted(expected.loss) == [1, 2]


def test_numbers_beyond_64_bits_are_no_crash(paths: RunPaths) -> None:
    log = log_lines(RUN)
    paths.log.write_bytes(
        log.replace(b'"total_steps":400', b'"total_steps":1' + b"0" * 30, 1)
        .replace(b'"rows":[1600,', b'"rows":[1' + b"0" * 30 + b",", 1)
        .replace(b'"batch_id":300,', b'"batch_id":1' + b"0" * 30 + b",", 1)
    )
    assert paths.log.read_bytes().count(b"0" * 30) == 3
    report = check(paths)
    assert report.records == STEPS - 1
    assert [f.first_step for f in report.findings if "unreadable" in f.message] == [299]


def test_other_thresholds_judge_the_whole_log_again(paths: RunPaths) -> None:
    write_log(paths.log, RUN)
    check(paths)
    strict = CONFIG.model_copy(update={"health": CONFIG.health.model_copy(update={"bucket_run": 1})})
    report = check_run(paths, strict, now_s=end_of(RUN), ended=True, remedy=remedy)
    assert report.records == STEPS
    assert [f for f in report.findings if f.detector == "bucket run"]


def test_a_run_without_a_log_yet_is_blind(paths: RunPaths) -> None:
    report = check(paths, ended=False)
    assert (report.verdict, report.records, report.last_step) == ("blind", 0, None)
    assert written(paths) == report


def test_a_binary_file_is_blind_not_a_crash(paths: RunPaths) -> None:
    paths.log.write_bytes(bytes(range(256)) * 50 + b"\n")
    report = check(paths)
    assert report.verdict == "blind"
    assert [f.detector for f in report.findings] == ["step integrity"] * len(report.findings)
    assert report.findings


def test_bad_input_leaves_no_report_behind(paths: RunPaths) -> None:
    with pytest.raises(DataError, match="no run folder"):
        check(RunPaths(paths.root / "nowhere"))
    paths.log.mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        check(paths)
    paths.log.rmdir()
    write_log(paths.log, RUN)
    paths.log.write_bytes(paths.log.read_bytes().replace(b'"schema_version":1', b'"schema_version":7'))
    with pytest.raises(SchemaVersionError, match="schema version 7"):
        check(paths)
    assert not paths.health_dir.exists()


class TestNothingNew:
    """A check that finds the log as it left it answers without loading what it knows."""

    def test_the_same_report_comes_again_without_the_state(self, paths: RunPaths) -> None:
        write_log(paths.log, RUN[:-1])
        first = check(paths, ended=False)
        (paths.health_dir / "state.json").write_text("not needed")
        again = check(paths, ended=False, now_s=end_of(RUN) + 1)
        assert again.checked_at != first.checked_at
        assert replace(again, checked_at=first.checked_at) == first
        assert (paths.health_dir / "state.json").read_text() == "not needed"

    def test_silence_is_still_found(self, paths: RunPaths) -> None:
        write_log(paths.log, RUN[:-1])
        assert check(paths, ended=False).verdict == "healthy"
        assert check(paths, ended=False, now_s=end_of(RUN) + 100_000).verdict == "blind"
        assert check(paths, ended=True, now_s=end_of(RUN) + 100_002).verdict == "healthy"

    @pytest.mark.parametrize("change", ["grown", "half a line", "rewritten", "other limits", "no page", "no report"])
    def test_anything_that_could_change_it_is_looked_at(self, paths: RunPaths, change: str) -> None:
        log = log_lines(RUN[:60])
        whole = log[: log.rfind(b"\n", 0, -1) + 1]
        paths.log.write_bytes(whole)
        check(paths, ended=False)
        (paths.health_dir / "state.json").write_text("damaged")
        changed = CONFIG
        if change == "grown":
            paths.log.write_bytes(log)
        elif change == "half a line":
            paths.log.write_bytes(log[:-20])
        elif change == "rewritten":
            paths.log.write_bytes(whole[:-9] + b"  " + whole[-9:])
        elif change == "other limits":
            changed = CONFIG.model_copy(update={"health": CONFIG.health.model_copy(update={"bucket_run": 5})})
        else:
            (paths.health_dir / {"no page": "report.html", "no report": "report.json"}[change]).unlink()
        check_run(paths, changed, now_s=end_of(RUN[:60]), ended=False, remedy=remedy)
        assert json.loads((paths.health_dir / "state.json").read_text())["cursor"]["offset"] > 0

    def test_damage_is_decided_on_again_each_time(self, paths: RunPaths) -> None:
        write_log(paths.log, nonfinite(RUN[:-1], steps=range(350, 360), skipped=True))
        asked: list[int] = []
        for _ in range(2):
            check_run(paths, CONFIG, now_s=end_of(RUN), ended=False, remedy=lambda damage: asked.append(damage.onset_step))
        assert len(asked) == 2
