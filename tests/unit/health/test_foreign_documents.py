"""Documents of other people: what is a record, what is a summary, what is left out, and hostile names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DataError
from dflash.health import Rows, read_rows, sniff
from dflash.health.foreign_documents import document_rows, history_rows
from dflash.health.foreign_values import flattened


def rows_of(value: Any) -> tuple[list[dict[str, Any]], Rows]:
    rows = Rows(format="")
    found = [dict(row) for row in document_rows(json.dumps(value).encode(), rows=rows, origin="x")]
    return found, rows


def lines_of(data: bytes, kind: str) -> tuple[list[dict[str, Any]], Rows]:
    rows = Rows(format="")
    return [dict(row) for row in read_rows([data], kind=kind, rows=rows, origin="x")], rows  # type: ignore[arg-type]


def test_golden_series_of_different_lengths_become_one_row_a_step_in_order() -> None:
    found, rows = rows_of(
        {
            "lm loss": {"start_step": 0, "end_step": 10, "step_interval": 5, "values": {"10": 1.0, "0": 3.0, "5": 2.0}},
            "grad-norm": {"start_step": 5, "end_step": 10, "step_interval": 5, "values": [7.0, 8.0]},
            "note": "not a series",
        }
    )
    assert found == [
        {"step": 0, "lm loss": 3.0},
        {"step": 5, "lm loss": 2.0, "grad-norm": 7.0},
        {"step": 10, "lm loss": 1.0, "grad-norm": 8.0},
    ]
    assert rows.spelt_is_absent


def test_of_several_values_at_one_step_the_newest_counts() -> None:
    entries = [
        {"key": "loss", "step": 1, "value": 5.0},
        {"key": "loss", "step": 0, "value": 4.0},
        {"key": "loss", "step": 1, "value": 6.0},
    ]
    assert list(history_rows(entries)) == [{"step": 0, "loss": 4.0}, {"step": 1, "loss": 6.0}]
    assert list(history_rows([{"key": "loss", "step": "x", "value": 1.0}])) == []


def test_a_trainer_state_gives_its_steps_and_notes_what_is_left_out() -> None:
    history = [{"step": 1, "loss": 2.0}, 7, {"step": 2, "loss": 1.9}, {"step": 2, "train_loss": 1.95, "train_runtime": 9.0}]
    found, rows = rows_of({"log_history": history})
    assert found == history[:1] + history[2:3]
    assert rows.unreadable == 1
    assert len(rows.notes) == 1


@pytest.mark.parametrize("value", [{}, [], 3, "text", {"log_history": []}, {"metrics": []}])
def test_a_document_without_records_gives_none_or_says_so(value: Any) -> None:
    try:
        found, _ = rows_of(value)
    except DataError as error:
        assert "holds no records" in error.what  # noqa: PT017
    else:
        assert found == []


def test_a_deeply_nested_document_is_survived() -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with pytest.raises(DataError, match="not JSON"):
        list(document_rows(deep, rows=Rows(format=""), origin="x"))
    assert flattened({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}, "x": [1]}) == {}
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_a_table_with_quotes_ragged_rows_and_empty_cells() -> None:
    data = b'"step","a, b","loss"\n1,"x, y",2.0\n2,short\n3,,\n\n4,"",nan\n'
    found, rows = lines_of(data, sniff(data, origin="x"))
    assert found == [
        {"step": "1", "a, b": "x, y", "loss": "2.0"},
        {"step": "3", "a, b": "", "loss": ""},
        {"step": "4", "a, b": "", "loss": "nan"},
    ]
    assert rows.unreadable == 1


def test_the_first_line_may_be_torn() -> None:
    data = b'{"step": 1, "lo\n{"step": 2, "loss": 3.0}\n'
    assert sniff(data, origin="x") == "json lines"
    ours = b'{"kind": "st\n{"kind": "step", "schema_version": 1}\n'
    assert sniff(ours, origin="x") == "own"


def test_a_printed_document_is_not_mistaken_for_lines() -> None:
    assert sniff(json.dumps({"log_history": [{"step": 1}]}, indent=2).encode(), origin="x") == "document"
    assert sniff(b'{"step": 1, "loss": 2.0}', origin="x") == "json lines"
    assert sniff(b'{"lm loss": {"values": {"1": 2.0}}}', origin="x") == "document"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.floats(), st.text(max_size=8)), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_lines_come_back_as_they_were_written(row: dict[str, Any], cut: int) -> None:
    data = (json.dumps({"loss": 1.0} | row) + "\n").encode() * 3
    rows = Rows(format="")
    blocks = [data[start : start + cut] for start in range(0, len(data), cut)]
    found = list(read_rows(blocks, kind="json lines", rows=rows, origin="x"))
    assert json.dumps(found) == json.dumps([{"loss": 1.0} | row] * 3)
    assert rows.unreadable == 0
