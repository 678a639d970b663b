"""Sealed records: nothing can change unnoticed, and nothing but the values counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DataError, SchemaVersionError
from dflash.records import LedgerEntry, from_sealed_json, sealed, to_sealed_json, unsealed

ENTRY = LedgerEntry(step=3, segment=0, state="durable", at="2026-01-01T00:00:00Z", reason="saved")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4).filter(lambda key: key != "seal"), VALUES, max_size=4)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=OBJECTS, indent=st.sampled_from([None, 1, 4]))
def test_values_come_back_whatever_the_indentation_and_order(values: dict[str, Any], indent: int | None) -> None:
    text = sealed(values)
    assert text.endswith("}\n")
    assert unsealed(text, origin="x") == values
    again = json.dumps(dict(reversed(json.loads(text).items())), indent=indent, ensure_ascii=False)
    assert unsealed(again, origin="x") == values


@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=OBJECTS, key=st.text(max_size=4), value=VALUES)
def test_any_other_value_is_noticed(values: dict[str, Any], key: str, value: Any) -> None:
    raw = json.loads(sealed(values))
    changed = raw | {key: value}
    if json.dumps(changed, sort_keys=True) == json.dumps(raw, sort_keys=True):
        return
    with pytest.raises(DataError, match=r"x is damaged: .*\(seal\)"):
        unsealed(json.dumps(changed), origin="x")
    for lost in values:
        with pytest.raises(DataError, match="x is damaged"):
            unsealed(json.dumps({name: each for name, each in raw.items() if name != lost}), origin="x")


def test_a_record_comes_back_and_its_version_and_fields_are_checked_first() -> None:
    text = to_sealed_json(ENTRY)
    assert from_sealed_json(LedgerEntry, text, origin="x") == ENTRY
    raw = json.loads(text)
    with pytest.raises(SchemaVersionError, match="schema version 99"):
        from_sealed_json(LedgerEntry, json.dumps(raw | {"schema_version": 99}), origin="x")
    with pytest.raises(DataError, match=r"unknown fields \['more'\]"):
        from_sealed_json(LedgerEntry, json.dumps(raw | {"more": 1}), origin="x")
    with pytest.raises(DataError, match="x is damaged"):
        from_sealed_json(LedgerEntry, json.dumps(raw | {"step": 4}), origin="x")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": NaN, "seal": ""}', "[" * 100_000, b"\xff"])
def test_text_that_is_no_sealed_object(text: str | bytes) -> None:
    with pytest.raises(DataError, match=r"x (is not JSON|holds)"):
        unsealed(text, origin="x")


@pytest.mark.parametrize("seal", [None, "", 0, "0" * 64, ["0" * 64]])
def test_a_missing_or_foreign_seal_is_damage(seal: Any) -> None:
    with pytest.raises(DataError, match="x is damaged"):
        unsealed(json.dumps({"a": 1} if seal is None else {"a": 1, "seal": seal}), origin="x")


def test_what_json_lacks_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="JSON"):
        sealed({"a": float("nan")})
