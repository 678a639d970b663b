"""Strict JSON for frozen dataclass records, standard library only.

Every record that is written to disk carries `schema_version`; reading checks it before anything else,
refuses unknown and missing fields, and never evaluates anything.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from dflash.errors import DataError, SchemaVersionError

RecordT = TypeVar("RecordT")


def to_dict(record: Any) -> dict[str, Any]:
    """A record as plain JSON-able values (tuples become lists)."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(record)))
    return plain


def to_json(record: Any, *, indent: int | None = None) -> str:
    """A record as JSON text with sorted keys, refusing NaN and infinities (JSON has neither)."""
    separators = (",", ":") if indent is None else None
    return json.dumps(dataclasses.asdict(record), indent=indent, sort_keys=indent is None, separators=separators, allow_nan=False)


def from_json(kind: type[RecordT], text: str | bytes, *, origin: str) -> RecordT:
    """Parse JSON text into a record of `kind`.

    Args:
        kind: frozen dataclass.
        text: JSON.
        origin: file or object name, for errors.

    Raises:
        SchemaVersionError: another schema version.
        DataError: not JSON, or fields do not fit.
    """
    return from_dict(kind, json_object(text, origin=origin), origin=origin)


def json_object(text: str | bytes, *, origin: str) -> dict[str, Any]:
    """Parse strict JSON text that holds an object.

    Raises:
        DataError: it does not, or holds a number that is not finite.
    """
    try:
        raw = json.loads(text, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not JSON: {error}", remedy="restore the file or build it again") from error
    if not isinstance(raw, dict):
        raise DataError(f"{origin} holds {type(raw).__name__}, not an object", remedy="restore the file or build it again")
    return raw


def from_dict(kind: type[RecordT], raw: Mapping[str, Any], *, origin: str) -> RecordT:
    """Build a record of `kind` from plain values; see `from_json` for the errors."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _check_version(fields, raw, origin)
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise DataError(
            f"{origin} has unknown fields {unknown} for {kind.__name__}", remedy="use the version of the code that wrote it"
        )
    hints = _hints(typing.cast("Hashable", kind))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(hints[name], raw[name], f"{origin}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DataError(f"{origin} lacks the field {name!r} of {kind.__name__}", remedy="restore the file or build it again")
    return kind(**values)


@functools.cache
def _hints(kind: Hashable) -> Mapping[str, Any]:
    """Types of a record's fields: evaluated once a class, because a supervisor reads the same few records all day."""
    return typing.get_type_hints(typing.cast("type[Any]", kind))


def finite_number(text: str) -> float:
    """NaN and Infinity, which JSON lacks and Python's parser admits, and numbers too large for a float are no values.

    Raises:
        ValueError: the text is one of them.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _check_version(fields: Mapping[str, Any], raw: Mapping[str, Any], origin: str) -> None:
    if "schema_version" not in fields:
        return
    wanted = fields["schema_version"].default
    found = raw.get("schema_version")
    if type(found) is not int or found != wanted:
        raise SchemaVersionError(
            f"{origin} has schema version {found!r}, this code reads {wanted}",
            remedy="build the file again with this version of the code, or use the version that wrote it",
        )


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        return _checked(value in arguments, value, where, hint)
    if origin is tuple:
        _checked(isinstance(value, list | tuple), value, where, hint)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(arguments[0], item, where) for item in value)
        _checked(len(value) == len(arguments), value, where, hint)
        return tuple(_convert(kind, item, where) for kind, item in zip(arguments, value, strict=True))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        _checked(isinstance(value, dict), value, where, hint)
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        _checked(isinstance(value, dict), value, where, hint)
        return from_dict(typing.cast("type[Any]", hint), value, origin=where)
    return _convert_scalar(hint, value, where)


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    options = [argument for argument in arguments if argument is not type(None)]
    if len(options) == 1:
        return _convert(options[0], value, where)
    return _checked(isinstance(value, tuple(options)), value, where, options)


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(_checked(number, value, where, hint))
    if hint is int:
        return _checked(isinstance(value, int) and not isinstance(value, bool), value, where, hint)
    return _checked(isinstance(value, hint), value, where, hint)


def _checked(holds: bool, value: Any, where: str, hint: Any) -> Any:
    if not holds:
        wanted = getattr(hint, "__name__", str(hint))
        raise DataError(f"{where} is {value!r}, expected {wanted}", remedy="restore the file or build it again")
    return value
