"""The checker's report depends on the log alone: not on how it was read, nor on saves, nor on dead records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import HealthConfig
from dflash.errors import DataError
from dflash.health import HealthChecker
from dflash.health import check as check_module
from dflash.health.detectors.base import Findings
from dflash.health.lines import LogItem, LogReplaced, TornLine
from dflash.records import HealthReport, from_json, to_dict, to_json
from tests.support.amount import amount
from tests.support.health_runs import CHECKPOINT, HEALTH, TRAIN, found, healthy, items_of, judged, new_checker, remedy
from tests.support.log_simulator import Record, StepRecord, change_steps, event, nonfinite, resumed, scaled, spike

RUN = healthy(seed=6, steps=700)


def eventful() -> list[Record]:
    """A run with something for most detectors, a crash and a resume among it."""
    records = spike(RUN, step=350, factor=8, decay_steps=6)
    records = nonfinite(records, steps=[420, 470], skipped=True)
    records = spike(records, step=500, factor=4, forever=True)
    return resumed(records, died_at=533, from_step=400)


def items_with_damage() -> list[LogItem]:
    items = items_of(eventful())
    at = next(i for i, item in enumerate(items) if item.segment == 1)  # type: ignore[union-attr]
    return [*items[:at], TornLine(offset=9, length_bytes=70, reason="truncated"), *items[at:]]


ITEMS = items_with_damage()


def state_of(checker: HealthChecker) -> dict[str, Any]:
    state: dict[str, Any] = msgspec.msgpack.decode(checker.packed())
    return state


def report_of(checker: HealthChecker) -> HealthReport:
    return checker.report(run="run", now_s=2e9, ended=True, remedy=remedy)


def at_once(items: list[LogItem]) -> HealthReport:
    checker = new_checker()
    checker.feed(items)
    return report_of(checker)


EXPECTED = at_once(ITEMS)


@settings(max_examples=amount(6, full=12), deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(0, len(ITEMS)), max_size=8))
def test_chunks_and_restored_states_change_nothing(cuts: set[int]) -> None:
    checker, done = new_checker(), 0
    for cut in [*sorted(cuts), len(ITEMS)]:
        checker.feed(ITEMS[done:cut])
        done = cut
        json.dumps(state_of(checker), allow_nan=False, default=bytes.hex)
        checker = HealthChecker.of_packed(checker.packed(), HEALTH, TRAIN, CHECKPOINT)
    assert report_of(checker) == EXPECTED


def test_the_eventful_run_has_something_for_many_detectors() -> None:
    assert {finding.detector for finding in EXPECTED.findings} >= {"loss spike", "non-finite", "step integrity"}
    assert EXPECTED.verdict == "unhealthy"
    assert EXPECTED.stats["dead_records"] == 134
    assert EXPECTED.segment == 1


@pytest.mark.parametrize(("died_at", "from_step"), [(533, 400), (649, 650), (250, 200), (560, 0), (401, 333)])
def test_a_resumed_run_is_judged_like_an_uninterrupted_one(died_at: int, from_step: int) -> None:
    records = nonfinite(spike(RUN, step=350, factor=8, decay_steps=6), steps=[430, 480], skipped=True)
    at = next(i for i, r in enumerate(records) if r.step == 333)
    records.insert(at, event("save_begin", step=333))  # a checkpoint between the regular ones
    records.insert(at + 4, event("save_durable", step=333, at_step=335))
    whole, broken = judged(records), judged(resumed(records, died_at=died_at, from_step=from_step))
    assert broken.findings == whole.findings
    assert broken.verdict == whole.verdict
    assert broken.records == whole.records
    assert broken.stats["buckets"] == whole.stats["buckets"]
    assert broken.stats["dead_records"] == max(0, died_at + 1 - from_step)
    checked = {row.detector: row.checked for row in broken.detectors}
    assert checked["loss spike"] == {row.detector: row.checked for row in whole.detectors}["loss spike"]


def test_findings_of_dead_records_are_no_longer_findings() -> None:
    bad = resumed(RUN, died_at=560, from_step=400)
    bad = change_steps(bad, lambda r: scaled(r, loss=20.0) if r.segment == 0 and r.step == 555 else r)
    bad = change_steps(bad, lambda r: replace(r, nonfinite=("ce",), ce=None) if r.segment == 0 and r.step == 560 else r)
    assert judged(bad[: len(bad) - 305], ended=False).verdict in ("unhealthy", "healthy")
    before = [r for r in bad if r.segment == 0]
    assert judged(before).verdict == "unhealthy"
    after = judged(bad)
    assert after.verdict == "healthy"
    assert not [f for f in after.findings if f.first_step in (555, 560)]


def test_a_segment_that_starts_where_no_snapshot_was_taken_keeps_what_lies_before() -> None:
    records = nonfinite(RUN, steps=[90], skipped=True)
    records = [r for r in records if not (isinstance(r, StepRecord) and r.step % 200 == 0)]
    report = judged(resumed(records, died_at=560, from_step=451))
    assert [f.first_step for f in found(report, "non-finite")] == [90]
    assert report.stats["dead_records"] == 560 - 451 + 1
    assert report.last_step == 699


def test_a_line_cut_off_by_a_crash_is_only_noted() -> None:
    (note,) = found(EXPECTED, "step integrity")
    assert (note.severity, note.first_step) == ("info", 400)
    assert "segment 1" in note.message
    loose = items_of(RUN)
    loose.insert(300, TornLine(offset=1, length_bytes=5, reason="bad"))
    (warning,) = found(at_once(loose), "step integrity")
    assert warning.severity == "warn"


def test_a_replaced_log_that_starts_again_is_judged_from_nothing() -> None:
    items = [*items_of(nonfinite(RUN, steps=[100], skipped=False)), LogReplaced(reason="truncated"), *items_of(RUN)]
    report = at_once(items)
    assert not found(report, "non-finite")
    (finding,) = found(report, "step integrity")
    assert "truncated" in finding.message
    assert report.records == 700


def test_a_rotated_log_goes_on() -> None:
    items = items_of(RUN)
    report = at_once([*items[:300], LogReplaced(reason="replaced by another file"), *items[300:]])
    assert report.records == 700
    assert report.coverage_frac == 1.0
    assert len(found(report, "step integrity")) == 1


def test_mixed_updates_have_a_gradient_baseline_of_their_own() -> None:
    def paired(record: StepRecord) -> StepRecord:
        (micro,) = record.micro_batches
        other = replace(micro, batch_id=10_000 + micro.batch_id, bucket=(micro.bucket + 1) % 6)
        return replace(record, micro_batches=(micro, other))

    checker = new_checker()
    checker.feed(items_of(change_steps(RUN, lambda r: scaled(paired(r), grad_norm=20.0 if r.step == 600 else 1.0))))
    (outlier,) = [f for f in found(report_of(checker), "gradient spike") if f.first_step == 600]
    assert (outlier.bucket, len(outlier.batch_ids)) == (None, 2)
    assert list(checker.history.grad_norm) == ["mixed"]


def test_memory_stays_bounded() -> None:
    checker = new_checker()
    steps = [replace(r, step=r.step - 400) for r in RUN if isinstance(r, StepRecord) and r.step >= 400]
    sizes = []
    for cycle in range(14):
        by = 300 * cycle
        checker.feed(items_of([replace(r, step=r.step + by, mono_time_s=r.mono_time_s + by) for r in steps]))
        sizes.append(len(checker.packed()))
    assert max(sizes[7:]) < 1.1 * sizes[6]
    assert all(len(curve.points) <= 301 for curve in checker.history.loss.values())


def test_findings_are_kept_by_weight_and_all_counted() -> None:
    findings = Findings()
    template = next(f for f in EXPECTED.findings if f.severity == "critical")
    findings.add(template)
    for step in range(150):
        findings.add(replace(template, severity="info" if step % 2 else "warn", first_step=step, last_step=step))
    assert (findings.total, findings.critical, len(findings.kept)) == (151, 1, 100)
    kept = list(findings.kept.values())
    assert kept[0] == template
    assert sum(f.severity == "warn" for f in kept) == 75
    assert min(f.first_step for f in kept if f.severity == "info") == 103
    findings.keep_before(100)
    assert all(f.last_step < 100 for f in findings.kept.values())


def test_the_report_survives_json() -> None:
    assert from_json(HealthReport, to_json(EXPECTED), origin="report.json") == EXPECTED
    assert to_dict(EXPECTED)["verdict"] == "unhealthy"


@pytest.mark.parametrize("part", ["config", "live", "panel", "snapshots"])
def test_a_state_that_does_not_fit_is_refused(part: str) -> None:
    checker = new_checker()
    checker.feed(ITEMS[:50])
    packed = msgspec.msgpack.encode(state_of(checker) | {part: "damaged"})
    with pytest.raises(DataError, match="another version" if part == "config" else "is damaged"):
        HealthChecker.of_packed(packed, HEALTH, TRAIN, CHECKPOINT)


def test_a_detector_whose_memory_does_not_fit_is_refused() -> None:
    state = state_of(new_checker())
    state["panel"]["detectors"]["loss spike"]["memory"]["open"] = "damaged"
    with pytest.raises(DataError, match="is damaged"):
        HealthChecker.of_packed(msgspec.msgpack.encode(state), HEALTH, TRAIN, CHECKPOINT)


def test_a_state_made_with_other_thresholds_or_by_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = new_checker().packed()
    with pytest.raises(DataError, match="another version or configuration"):
        HealthChecker.of_packed(packed, HealthConfig(bucket_run=9), TRAIN, CHECKPOINT)
    monkeypatch.setattr(check_module, "STATE_VERSION", check_module.STATE_VERSION + 1)
    with pytest.raises(DataError, match="another version or configuration"):
        HealthChecker.of_packed(packed, HEALTH, TRAIN, CHECKPOINT)


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", new_checker().packed()[:-1]])
def test_a_packed_state_that_is_none_is_refused(packed: bytes) -> None:
    with pytest.raises(DataError, match="damaged"):
        HealthChecker.of_packed(packed, HEALTH, TRAIN, CHECKPOINT)
