"""YAML text to plain values, by the safe loader alone: mappings, lists, texts, numbers, dates; nothing is called or imported.

Invariant: any text gives plain values or one `UnreadableYamlError` that tells the place but repeats no line, because a line may be
what must not be told. Hard decision: values that aliases multiply are refused by the size that they stand for: thirty lines of
aliases stand for a billion values, and whoever writes them out or hashes them would never end. Bytes, sets and pairs are
refused too: validation would turn them into texts and lists behind the back of whoever looked for a credential.
"""

from __future__ import annotations

import datetime as dt
import reprlib
from collections.abc import Hashable
from typing import Any

import yaml

from dflash.config.credentials import hide_credentials

try:  # the same loader in C, six times as fast: every look at a run begins with its configuration
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # a PyYAML that was built without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

LARGEST_VALUES = 100_000
"""Values that one text may stand for, everything behind aliases counted as often as it is named."""

LARGEST_BITS = 64
"""Of a whole number; one of thousands of digits cannot even be shown in a message."""

_PLAIN = (str, int, float, dt.date, type(None))  # a bool is an int, a time of day a date

# Half of a surrogate pair, an escape beyond the last character, and nesting without end come bare from the loader.
_FAILURES = (yaml.YAMLError, ValueError, OverflowError, RecursionError)


class UnreadableYamlError(ValueError):
    """The text is no YAML that a configuration may be written in; says why and where."""


class _UniqueKeyLoader(_SafeLoader):
    """The safe loader, refusing a key that stands twice in one mapping (YAML lets the last one win silently)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Dates that do not exist, `!!bool maybe`: the loader's own errors are of any kind, name no place and repeat the value."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise yaml.constructor.ConstructorError(None, None, f"no {node.tag.rpartition(':')[2]}", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # `!!map [a]` is the loader's to refuse
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        UnreadableYamlError: it is no YAML, names a type of its own, or stands for too much.
    """
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - derives from the safe loader
        size = _size(value, {})
    except UnreadableYamlError:
        raise
    except _FAILURES as error:
        raise UnreadableYamlError(_in_words(error)) from error
    if size > LARGEST_VALUES:
        raise UnreadableYamlError(f"its aliases make more than {LARGEST_VALUES} values of it")
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Values behind `value`, itself counted; a value inside itself is one without end."""
    if not isinstance(value, dict | list):
        if not isinstance(value, _PLAIN):
            raise UnreadableYamlError(f"it holds a value of the type {type(value).__name__}, which no key takes")
        if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
            raise UnreadableYamlError(f"it holds a whole number of more than {LARGEST_BITS} bits")
        return 1
    if id(value) not in known:
        known[id(value)] = LARGEST_VALUES + 1  # until its own size is known, it is only met inside itself
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(inner, known) for inner in inside)
    return known[id(value)]


def _in_words(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{type(error).__name__} ({reprlib.repr(str(error).partition(chr(10))[0])})"
    parts = [str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part]
    words = hide_credentials(", ".join(parts))  # a name that the text gives its tags or keys
    return f"{words} (line {mark.line + 1}, column {mark.column + 1})"
