"""Logs that are one JSON value: `trainer_state.json`, golden values, exported metric histories, a list of rows.

The hard decision: the last row of a `trainer_state.json` is the run's average under the names of a summary
(`train_loss`, `train_runtime`), not a step, and is left out; as a record it would be a spike or a fall that never was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash.errors import DataError
from dflash.health.foreign_values import Row, Rows, flattened, step_of

_SUMMARY_FIELDS = frozenset({"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"})


def document_rows(data: bytes, *, rows: Rows, origin: str) -> Iterator[Row]:
    """The records of a JSON document.

    Raises:
        DataError: it is not JSON, or of no known form.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not JSON: {str(error)[:120]}", remedy="give a whole file; it may be cut off") from error
    if isinstance(value, list):
        yield from _list_rows(value, rows=rows)
    elif isinstance(value, dict) and isinstance(value.get("log_history"), list):
        rows.format = "Hugging Face trainer_state.json"
        yield from _trainer_rows(value["log_history"], rows=rows)
    elif isinstance(value, dict) and isinstance(value.get("metrics"), list):
        yield from _list_rows(value["metrics"], rows=rows)
    elif isinstance(value, dict) and _golden_series(value):
        rows.format, rows.spelt_is_absent = "golden values (Megatron, NeMo)", True
        yield from _golden_rows(_golden_series(value))
    elif isinstance(value, dict) and _histories(value):
        rows.format = "metric history"
        entries = ({**entry, "key": key} for key, history in _histories(value).items() for entry in history)
        yield from history_rows(entries)
    elif isinstance(value, dict) and value:
        rows.format = "one JSON object"
        yield flattened(value)
    else:
        raise DataError(f"{origin} holds no records", remedy="give a log: a list of records, trainer_state.json or a golden file")


def is_history_entry(value: Mapping[str, Any]) -> bool:
    """Whether an object is one value of one metric, as MLflow exports them."""
    return "value" in value and "step" in value and isinstance(value.get("key"), str)


def history_rows(entries: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """One row a step out of single values, in the order of steps; of several values at one step the newest counts."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        step = step_of(entry.get("step"))
        if step is None:
            continue
        row = by_step.setdefault(step, {"step": step})
        row[str(entry.get("key"))] = entry.get("value")
        if "timestamp" in entry:
            row["timestamp"] = entry["timestamp"]
    for step in sorted(by_step):
        yield by_step[step]


def _list_rows(items: list[Any], *, rows: Rows) -> Iterator[Row]:
    objects = [item for item in items if isinstance(item, dict)]
    rows.unreadable += len(items) - len(objects)
    if objects and all(is_history_entry(item) for item in objects):
        rows.format = "MLflow metric history"
        yield from history_rows(objects)
        return
    rows.format = "list of JSON objects"
    yield from map(flattened, objects)


def _trainer_rows(history: list[Any], *, rows: Rows) -> Iterator[Row]:
    objects = [item for item in history if isinstance(item, dict)]
    rows.unreadable += len(history) - len(objects)
    for item in objects:
        if _SUMMARY_FIELDS.intersection(item):
            rows.notes.append("the row of averages over the whole run is left out")
        else:
            yield flattened(item)


def _golden_series(value: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Metric -> step -> value, of everything in the document that looks like a golden series."""
    series: dict[str, dict[int, Any]] = {}
    for name, item in value.items():
        if not isinstance(item, dict) or not isinstance(item.get("values"), dict | list):
            continue
        values = item["values"]
        if isinstance(values, list):
            start, interval = step_of(item.get("start_step")) or 0, step_of(item.get("step_interval")) or 1
            series[name] = {start + index * interval: number for index, number in enumerate(values)}
        else:
            steps = {step: number for text, number in values.items() if (step := step_of(text)) is not None}
            series[name] = dict(sorted(steps.items()))
    return series


def _golden_rows(series: Mapping[str, Mapping[int, Any]]) -> Iterator[Row]:
    for step in sorted({step for values in series.values() for step in values}):
        yield {"step": step} | {name: values[step] for name, values in series.items() if step in values}


def _histories(value: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Metric -> its values, where a document holds nothing but such lists."""
    return {
        name: item
        for name, item in value.items()
        if isinstance(item, list)
        and item
        and all(isinstance(entry, dict) and "value" in entry and "step" in entry for entry in item)
    }
