"""Fuzzing readers of files: valid examples mutated as JSON and as bytes, a few in `make test`, minutes of them in `make test-full`.

A fuzz test says what may come out: a value, or an error of the package. Anything else fails it with the smallest input that
shows it. With `make test` the examples are the same in every run; otherwise they differ, and `DFLASH_FUZZ_S` says for how long.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dflash.errors import DflashError
from tests.support.amount import FULL

FUZZ_S = float(os.environ.get("DFLASH_FUZZ_S", "600"))
ROUND = 400
"""Examples between two looks at the clock."""

TIMEOUT_S = int(FUZZ_S) + 600

ValueT = TypeVar("ValueT")

TOKENS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1", b"\r\n", b"\n", b"\n\n", b"null", b"NaN", b"-Infinity",
    b"1e999", b"9" * 5000, b"-0", b"[" * 3000, b'{"a":' * 1500, b'"\\ud800"', b'"\\u0000"', b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80",
    b"true", b"{}", b"[]", b'""', b": ", b"- ", b"&a *a", b"!!python/object:os.system", b"? ", b"0x_", b"2026-13-45", b"%",
    b"<<: *x", b",", b'"', b"\\",
)  # fmt: skip

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", "nan", "\ud800", "a\x00b", "../x", "s3://", "9" * 400, "step", "config", "\u2028"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3))


@st.composite
def changed_json(draw: st.DrawFn, seeds: Sequence[Any]) -> Any:
    """One of some JSON values with up to four nodes replaced, removed, doubled or renamed."""
    value = copy.deepcopy(draw(st.sampled_from(list(seeds))))
    for _ in range(draw(st.integers(0, 4))):
        value = _changed(draw, value)
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of some files with up to four stretches cut, doubled, moved, flipped or replaced by what parsers stumble over."""
    data = draw(st.sampled_from(list(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 2, 8, 64, 1000])))
        act = draw(st.sampled_from(["cut", "token", "bytes", "double", "tail", "flip"]))
        piece = {
            "cut": b"",
            "token": draw(st.sampled_from(TOKENS)),
            "bytes": draw(st.binary(max_size=6)),
            "double": data[at:end] * 2,
            "tail": data[end:][:200] + data[at:end],
            "flip": bytes(byte ^ 0x20 for byte in data[at:end]),
        }[act]
        data = data[:at] + piece + data[end:]
    return data


def explained(error: DflashError) -> DflashError:
    """The error, which has to say what to do, briefly, in text that can be written."""
    assert error.remedy
    assert len(str(error).encode("utf-8")) < 100_000
    return error


def json_text(value: Any) -> bytes:
    """A value as JSON, whatever it holds: lone surrogates as escapes, NaN and infinities as the words that many writers use."""
    return json.dumps(value).encode()


def fuzz(strategy: st.SearchStrategy[ValueT], check: Callable[[ValueT], None], *, usual: int, share: float) -> None:
    """Check values of a strategy: `usual` of them, the same each time, or with `make test-full` as many as the time allows.

    Args:
        strategy: of the values.
        check: raises if one is not treated as it should be.
        usual: values with `make test`.
        share: of `FUZZ_S`, which is what one reader gets from all its tests together.
    """
    quiet = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    if not FULL:
        settings(quiet, max_examples=usual, derandomize=True, phases=(Phase.generate, Phase.shrink))(given(strategy)(check))()
        return
    end_s = time.monotonic() + share * FUZZ_S
    number = int.from_bytes(os.urandom(4), "big")
    while time.monotonic() < end_s:
        number += 1
        seed(number)(settings(quiet, max_examples=ROUND)(given(strategy)(check)))()


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """One change somewhere in a value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        act = draw(st.sampled_from(["inside", "inside", "replace", "remove", "rename", "add"]))
        if act == "inside":
            return {**value, key: _changed(draw, value[key])}
        if act == "replace":
            return {**value, key: draw(VALUES)}
        if act == "add":
            return {**value, draw(st.text(max_size=6)): draw(VALUES)}
        kept = {name: inner for name, inner in value.items() if name != key}
        return kept if act == "remove" else {**kept, draw(st.text(max_size=6)): value[key]}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        act = draw(st.sampled_from(["inside", "inside", "remove", "double", "swap"]))
        if act == "inside":
            return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
        if act == "remove":
            return [*value[:at], *value[at + 1 :]]
        return value[: at + 1] + value[at:] if act == "double" else value[::-1]
    return draw(VALUES)
