"""Records as JSON: the same after a round trip, and anything that does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import records
from dflash.errors import DataError, SchemaVersionError
from dflash.records import (
    BucketStats,
    CheckpointManifest,
    Conversation,
    DetectorSummary,
    EvaluationResult,
    EventRecord,
    FileEntry,
    Finding,
    HealthReport,
    LedgerEntry,
    LrOverlay,
    Message,
    MicroBatchRecord,
    PlanArray,
    PlannedBatch,
    RollbackPlan,
    ShardEntry,
    StepRecord,
    TrainerState,
    from_dict,
    from_json,
    to_dict,
    to_json,
)

KINDS = sorted(
    (kind for kind in vars(records).values() if dataclasses.is_dataclass(kind) and kind is not records.RunPaths),
    key=lambda kind: kind.__name__,
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# `Mapping[str, Any]` holds whatever JSON can hold; floats are never NaN on disk.
st.register_type_strategy(Mapping, st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3))


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a record's field, built from its type; schema versions stay at their default."""
    if dataclasses.is_dataclass(hint):
        return instances(hint)  # type: ignore[arg-type]
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(strategy_of(argument) for argument in arguments))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        values = JSON_VALUES if arguments[1] is Any else strategy_of(arguments[1])
        return st.dictionaries(st.text(max_size=5), values, max_size=3)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if arguments and type(None) in arguments:
        return st.none() | st.one_of(*(strategy_of(argument) for argument in arguments if argument is not type(None)))
    return st.from_type(hint)


def instances(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {
        field.name: strategy_of(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.name not in {"schema_version", "kind"}
    }
    if kind is Conversation:  # its `kind` is a free label; elsewhere it is a constant of the record
        fields["kind"] = st.text(max_size=5)
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_record_survives_json(kind: type) -> None:
    @given(record=instances(kind))
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    def holds(record: Any) -> None:
        assert from_json(kind, to_json(record), origin="memory") == record
        assert from_json(kind, to_json(record, indent=2), origin="memory") == record
        assert from_dict(kind, to_dict(record), origin="memory") == record
        assert json.loads(to_json(record)) == to_dict(record)

    holds()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_record_is_frozen_and_the_files_among_them_are_versioned(kind: type) -> None:
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    parts = {
        MicroBatchRecord,
        BucketStats,
        ShardEntry,
        PlanArray,
        PlannedBatch,
        Message,
        Conversation,
        FileEntry,
        Finding,
        DetectorSummary,
    }
    parts |= {records.DataFile, records.SourceEntry, records.CheckResult, records.Damage, LrOverlay}
    parts |= {records.SavedState, records.GuardState, records.ProbeFigures}
    parts |= {records.PromptSetEntry, records.RivalRow, records.SweepCell, records.RegisteredDrafter, records.Ruling}
    names = {field.name for field in dataclasses.fields(kind)}
    assert "schema_version" in names or kind in parts | {records.QuarantinedRow}


ENTRY = LedgerEntry(step=3, segment=0, state="durable", at="2026-01-01T00:00:00Z", reason="saved")
STATE = TrainerState(
    step=1,
    plan_position=2,
    segment=0,
    plan_sha256="a",
    config_sha256="b",
    seed=4,
    total_steps=9,
    skipped_positions=(5, 7),
    overlay=LrOverlay(from_step=1, rewarm_from=0.1, rewarm_steps=20, cap=1.0),
    nonfinite_in_row=0,
)
OVERLAY = LrOverlay(from_step=1, rewarm_from=0.1, rewarm_steps=20, cap=1.0)


def refused(kind: type, raw: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        from_dict(kind, raw, origin="file.json")
    assert "file.json" in caught.value.what
    assert caught.value.remedy
    return caught.value.what


def test_unknown_and_missing_fields_are_named() -> None:
    raw = to_dict(ENTRY)
    assert "['colour']" in refused(LedgerEntry, {**raw, "colour": 1})
    assert "'reason'" in refused(LedgerEntry, {key: value for key, value in raw.items() if key != "reason"})


@pytest.mark.parametrize("version", [0, 1, None, "1", 1.5, True])
def test_other_schema_version_is_refused_before_the_fields_are_looked_at(version: object) -> None:
    raw = {**to_dict(ENTRY), "schema_version": version, "field_of_tomorrow": 1}
    with pytest.raises(SchemaVersionError) as caught:
        from_dict(LedgerEntry, raw, origin="ledger.jsonl:4")
    assert f"schema version {version!r}, this code reads 2" in caught.value.what
    assert "ledger.jsonl:4" in caught.value.what


def test_missing_schema_version_is_another_version() -> None:
    raw = {key: value for key, value in to_dict(ENTRY).items() if key != "schema_version"}
    with pytest.raises(SchemaVersionError):
        from_dict(LedgerEntry, raw, origin="x")


@pytest.mark.parametrize(
    ("kind", "record", "field", "value"),
    [
        (LedgerEntry, ENTRY, "step", "3"),
        (LedgerEntry, ENTRY, "step", 3.0),
        (LedgerEntry, ENTRY, "step", True),
        (LedgerEntry, ENTRY, "step", None),
        (LedgerEntry, ENTRY, "state", "spotless"),
        (LedgerEntry, ENTRY, "reason", 5),
        (TrainerState, STATE, "skipped_positions", 5),
        (TrainerState, STATE, "skipped_positions", [["1"]]),
        (TrainerState, STATE, "skipped_positions", "12"),
        (LrOverlay, OVERLAY, "cap", True),
        (LrOverlay, OVERLAY, "cap", "1.0"),
        (TrainerState, STATE, "overlay", 1.0),
    ],
)
def test_wrong_type_is_refused_with_field_and_value(kind: type, record: Any, field: str, value: object) -> None:
    message = refused(kind, {**to_dict(record), field: value})
    assert f"file.json: {field}" in message
    assert str(value).strip("[]") in message


def test_nested_records_are_checked_as_strictly() -> None:
    manifest = CheckpointManifest(
        step=1,
        segment=0,
        plan_position=1,
        plan_sha256="p",
        data_fingerprint="d",
        target_fingerprint="t",
        mask_token_id=3,
        created_at="now",
        finite=True,
        weights_norm=1.5,
        files=(FileEntry(name="a", size_bytes=1, sha256="x"),),
    )
    raw = to_dict(manifest)
    assert from_dict(CheckpointManifest, raw, origin="m") == manifest
    raw["files"][0]["mode"] = "0644"
    assert "files" in refused(CheckpointManifest, raw)
    raw["files"] = [["a", 1, "x"]]
    assert "files" in refused(CheckpointManifest, raw)


def test_whole_numbers_are_floats_where_floats_are_meant_and_fixed_tuples_keep_their_length() -> None:
    read = from_dict(LrOverlay, {**to_dict(OVERLAY), "cap": 1}, origin="x")
    assert isinstance(read.cap, float)
    interval = {field.name: 0 for field in dataclasses.fields(EvaluationResult)}
    assert "acceptance_ci" in refused(
        EvaluationResult,
        {
            **interval,
            "schema_version": 1,
            "drafter": "d",
            "step": None,
            "dataset": "s",
            "template_flags": {},
            "acceptance_ci": [1.0],
        },
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_never_written(bad: float) -> None:
    event = EventRecord(segment=0, step=0, wall_time_s=0.0, mono_time_s=0.0, event="start", details={"loss": bad})
    for record in (dataclasses.replace(OVERLAY, cap=bad), event):
        with pytest.raises(ValueError, match="Out of range float"):
            to_json(record)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_non_finite_numbers_are_never_read(token: str) -> None:
    text = to_json(STATE).replace('"cap":1.0', f'"cap":{token}')
    assert token in text
    with pytest.raises(DataError, match=r"trainer\.json"):
        from_json(TrainerState, text, origin="trainer.json")
    event = f'{{"segment":0,"step":0,"wall_time_s":0,"mono_time_s":0,"event":"start","details":{{"x":{token}}},"schema_version":1}}'
    with pytest.raises(DataError, match=r"log\.jsonl"):
        from_json(EventRecord, event, origin="log.jsonl")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"text"', "null", '{"step": 1} {"step": 2}', b"\xff\xfe"])
def test_text_that_is_no_record(text: str | bytes) -> None:
    with pytest.raises(DataError, match=r"ledger\.jsonl:9"):
        from_json(LedgerEntry, text, origin="ledger.jsonl:9")


def test_json_is_one_line_and_independent_of_field_order() -> None:
    text = to_json(STATE)
    assert "\n" not in text
    assert list(json.loads(text)) == sorted(json.loads(text))
    shuffled = json.dumps(dict(reversed(to_dict(STATE).items())))
    assert from_json(TrainerState, shuffled, origin="x") == STATE


def test_optional_record_inside_a_record() -> None:
    decision = RollbackPlan(
        key="k", action="rollback", rung=2, segment=0, onset_step=1, alarm_step=2, region_step=1, target_step=0,
        skip=((1, 3), (5, 6)), overlay=OVERLAY, reason="r",
    )  # fmt: skip
    report = HealthReport(
        run="r",
        verdict="healthy",
        headline="h",
        checked_at="t",
        segment=0,
        first_step=None,
        last_step=None,
        records=0,
        coverage_frac=1.0,
        detectors=(),
        findings=(),
        damage=None,
        decision=decision,
        stats={"nested": {"list": [1, 2.5, None]}},
    )
    for value in (report, dataclasses.replace(report, decision=None)):
        assert from_json(HealthReport, to_json(value), origin="x") == value
    raw = to_dict(report)
    raw["decision"]["schema_version"] = 9
    with pytest.raises(SchemaVersionError):
        from_dict(HealthReport, raw, origin="x")


def test_step_record_with_null_measurements() -> None:
    names = {field.name for field in dataclasses.fields(StepRecord)}
    assert {"ce", "nonfinite", "micro_batches", "wait_time_s", "plan_position"} <= names
    raw = {
        "segment": 0, "step": 4, "wall_time_s": 1.0, "mono_time_s": 1.0, "ce": None, "objective": None, "accuracy": 0.0,
        "accepted_length": 0.0, "coverage_frac": 0.5, "grad_norm": None, "clip_coef": None, "lr": 0.1, "warmup_factor": 1.0,
        "skipped": True, "nonfinite": ["ce"], "micro_batches": [], "plan_position": 5, "padding_frac": 0.0,
        "step_time_s": 1.0, "wait_time_s": 0.0, "tokens_per_s": 1.0, "ready_depth": 0, "feature_depth": 0, "target_depths": [5],
        "rank_wait_s": [], "kind": "step", "schema_version": 1,
    }  # fmt: skip
    record = from_dict(StepRecord, raw, origin="log:1")
    assert (record.ce, record.nonfinite, record.target_depths) == (None, ("ce",), (5,))
    assert to_dict(record) == raw
    older = {key: value for key, value in raw.items() if key != "rank_wait_s"}
    assert from_dict(StepRecord, older, origin="log:1") == record
    assert "kind" in refused(StepRecord, {**raw, "kind": "event"})
