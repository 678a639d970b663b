"""Lines become items: exactly the records' fields, NaN tokens named, broken lines reported, never dropped."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from dflash.errors import SchemaVersionError
from dflash.health.lines import EventLine, MicroBatchLine, StepLine, TornLine, decode_block
from dflash.records import EventRecord, MicroBatchRecord, StepRecord, to_dict
from tests.support.log_simulator import event, log_lines, nonfinite, simulate_run

RECORDS = simulate_run(seed=3, steps=6, lr=lambda step: 1e-3)
STEP = next(record for record in RECORDS if isinstance(record, StepRecord) and record.step == 4)


def decode(*lines: bytes) -> list[object]:
    return list(decode_block(b"".join(line + b"\n" for line in lines), offset=0, origin="log"))


def step_line(**changes: object) -> bytes:
    return json.dumps(to_dict(STEP) | changes).encode()


@pytest.mark.parametrize(("line", "record"), [(StepLine, StepRecord), (EventLine, EventRecord), (MicroBatchLine, MicroBatchRecord)])
def test_the_fields_are_fields_of_the_records(line: type, record: type) -> None:
    names = {field.name for field in msgspec.structs.fields(line)}
    assert names <= {field.name for field in dataclasses.fields(record)}


def test_every_record_of_a_log_is_read_with_its_values() -> None:
    items = decode_block(log_lines(RECORDS), offset=0, origin="log")
    assert len(items) == len(RECORDS)
    for item, record in zip(items, RECORDS, strict=True):
        if isinstance(item, StepLine):
            assert isinstance(record, StepRecord)
            assert (item.step, item.ce, item.grad_norm, item.lr) == (record.step, record.ce, record.grad_norm, record.lr)
            assert item.micro_batches[0].ce_sum == record.micro_batches[0].ce_sum
            assert item.nonfinite == record.nonfinite
        else:
            assert isinstance(item, EventLine)
            assert isinstance(record, EventRecord)
            assert (item.event, item.details) == (record.event, record.details)


def test_nulls_that_the_trainer_declared_are_read() -> None:
    (item,) = decode(log_lines(nonfinite([STEP], steps=[4], skipped=True)).strip())
    assert isinstance(item, StepLine)
    assert item.ce is None
    assert item.skipped
    assert item.nonfinite == ("ce", "grad_norm")


@pytest.mark.parametrize("token", [float("nan"), float("inf"), float("-inf")])
def test_bare_nonfinite_tokens_are_named(token: float) -> None:
    (item,) = decode(step_line(grad_norm=token, tokens_per_s=token))
    assert isinstance(item, StepLine)
    assert item.grad_norm is None
    assert item.ce == STEP.ce
    assert item.nonfinite == ("grad_norm", "tokens_per_s")


def test_a_nonfinite_token_inside_a_micro_batch_is_named() -> None:
    micro = to_dict(STEP.micro_batches[0]) | {"ce_sum": float("nan")}
    (item,) = decode(step_line(micro_batches=[micro]))
    assert isinstance(item, StepLine)
    assert item.micro_batches[0].ce_sum is None
    assert item.nonfinite == ("ce_sum",)


@pytest.mark.parametrize(
    "broken",
    [
        step_line()[:200],
        b"\x00\xff\x7fELF",
        b"[1, 2]",
        step_line(kind="other"),
        step_line(step=-1),
        step_line(step="four"),
        step_line(ce=None, step=None),
        b'{"a":' * 5000,
        step_line(plan_position=2**63),
        step_line().replace(b'"batch_id": 4', b'"batch_id": 9999999999999999999999'),
    ],
)
def test_a_line_that_cannot_be_read_is_reported_with_its_place(broken: bytes) -> None:
    first = log_lines([STEP])
    items = decode_block(first + broken + b"\n" + first, offset=100, origin="log")
    assert [type(item) for item in items] == [StepLine, TornLine, StepLine]
    torn = items[1]
    assert isinstance(torn, TornLine)
    assert (torn.offset, torn.length_bytes) == (100 + len(first), len(broken))
    assert torn.reason


def test_a_record_glued_to_a_torn_line_is_saved() -> None:
    resume = log_lines([event("resume", step=3, segment=1)]).strip()
    items = decode(step_line()[:333] + resume)
    assert [type(item) for item in items] == [TornLine, EventLine]
    assert isinstance(items[0], TornLine)
    assert items[0].length_bytes == 333
    assert isinstance(items[1], EventLine)
    assert items[1].segment == 1


def test_blank_lines_hold_nothing() -> None:
    assert decode(b"", b"  ") == []


@pytest.mark.parametrize("value", [float("nan"), 1.0])
def test_another_schema_version_is_refused(value: float) -> None:
    with pytest.raises(SchemaVersionError, match="schema version 99"):
        decode(step_line(schema_version=99, grad_norm=value))
