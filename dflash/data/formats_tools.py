"""Tools and tool calls in the one shape that chat templates expect (that of the OpenAI interface).

Sources give them as objects, as JSON text, with or without the `function` envelope, or under the older names `functions` and
`function_call`; from a table, with nulls for every key that another row has. All of these mean the same here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash.data.quarantine import BadRowError
from dflash.records.codec import finite_number


def tools_of(row: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], ...]:
    """The tools that a row offers.

    Raises:
        BadRowError: they are no list of objects with a name, or hold what JSON has no word for.
    """
    key = "tools" if row.get("tools") is not None else "functions"
    found = _list(row.get(key), key, origin)
    tools = tuple(_enveloped(tool, f"{key}[{index}]", origin) for index, tool in enumerate(found))
    return _written(tools, key, origin)


def tool_calls_of(turn: Mapping[str, Any], where: str, origin: str) -> tuple[dict[str, Any], ...]:
    """The calls that an assistant turn makes, their arguments as objects.

    Raises:
        BadRowError: they are no list of objects with a name, or hold what JSON has no word for.
    """
    found = _list(turn.get("tool_calls"), f"{where}.tool_calls", origin)
    if not found and turn.get("function_call") is not None:
        found = _list([turn["function_call"]], f"{where}.function_call", origin)
    calls = []
    for index, call in enumerate(found):
        enveloped = _enveloped(call, f"{where}.tool_calls[{index}]", origin)
        function = enveloped["function"]
        calls.append({**enveloped, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return _written(tuple(calls), f"{where}.tool_calls", origin)


def _written(found: tuple[dict[str, Any], ...], where: str, origin: str) -> tuple[dict[str, Any], ...]:
    """`found`, if it can be written as JSON: a table may hold NaN, bytes or dates, and escapes half a surrogate pair."""
    if found:
        try:
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRowError("wrong_type", f"{where} cannot be written as JSON: {error}", origin=origin) from error
    return found


def _list(value: Any, where: str, origin: str) -> list[Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRowError("wrong_type", f"{where} is no JSON: {error}", origin=origin) from error
    if value is None or value == "":
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise BadRowError("wrong_type", f"{where} is {type(value).__name__}, not a list", origin=origin)
    return value


def _enveloped(value: Any, where: str, origin: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError("wrong_type", f"{where} is {type(value).__name__}, not an object", origin=origin)
    function = value.get("function")
    if not isinstance(function, dict):
        function, value = value, {}
    if not isinstance(function.get("name"), str):
        raise BadRowError("wrong_type", f"{where} has no name", origin=origin)
    return {**value, "type": "function", "function": function}


def _arguments(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        decoded = json.loads(value, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError):
        return value  # some sources call with plain text
    return decoded if isinstance(decoded, dict) else value


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row without the keys that are there only because another row has them."""
    return {key: _bare(value) for key, value in row.items() if value is not None}


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return without_nulls(value)
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value
