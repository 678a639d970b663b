"""The log's lines as the health room sees them: typed, and only the fields that a detector uses.

Invariant: a line becomes exactly one item (or two, when a crash glued a torn line to a whole one); nothing that the
file holds is dropped silently. Bare NaN and Infinity tokens, which are not JSON but which many writers emit, are
turned into null and named in `nonfinite`.

The hard decision: these are not the full records of `dflash.records`: fields that no detector reads are scanned but
not built, nothing here is tracked by the cycle collector, and the fields stand in the order in which a log has them, where
the decoder looks first. A test keeps the names equal to those of the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from dflash.errors import SchemaVersionError
from dflash.records.log import LOG_SCHEMA_VERSION

# The saved state holds integers of 64 bits: a line with a larger one is as unreadable as any other damaged line.
LARGEST = 2**63 - 1
Whole = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]

# Fields that the trainer itself writes as null when they are not finite.
_NULLABLE = frozenset({"ce", "grad_norm", "clip_coef", "ce_sum"})
_REASON_CHARACTERS = 120
_SALVAGE_TRIES = 256
# Nesting thousands deep ends the decoder with a RecursionError instead of its own.
_UNREADABLE = (msgspec.DecodeError, RecursionError)


class MicroBatchLine(msgspec.Struct, frozen=True, gc=False):
    """One micro-batch of a step: its cross-entropy summed over `n_tokens` supervised slots; a row may be no sample, see `Seen`."""

    batch_id: Whole
    bucket: Whole
    ce_sum: float | None
    correct: tuple[Whole, ...]
    epoch: Whole
    n_tokens: Count
    rows: tuple[int, ...]
    valid: tuple[Whole, ...]


class StepLine(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="step"):
    """One optimizer step; the fields mean what they mean in `dflash.records.StepRecord`."""

    accepted_length: float
    accuracy: float
    ce: float | None
    clip_coef: float | None
    feature_depth: Whole
    grad_norm: float | None
    lr: float
    micro_batches: tuple[MicroBatchLine, ...]
    mono_time_s: float
    nonfinite: tuple[str, ...]
    plan_position: Whole
    ready_depth: Whole
    schema_version: Literal[1]
    segment: Count
    skipped: bool
    step: Count
    step_time_s: float
    target_depths: tuple[Whole, ...]
    tokens_per_s: float
    wall_time_s: float


class EventLine(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """Something that happened at a step, as in `dflash.records.EventRecord`."""

    details: dict[str, Any]
    event: str
    schema_version: Literal[1]
    segment: Count
    step: Count
    wall_time_s: float


class TornLine(msgspec.Struct, frozen=True):
    """A line that could not be read: where it stood and why."""

    offset: int
    length_bytes: int
    reason: str


class LogReplaced(msgspec.Struct, frozen=True):
    """What had been read before is no longer in the file: it was truncated, rewritten or replaced."""

    reason: str


LogItem = StepLine | EventLine | TornLine | LogReplaced

_DECODER: msgspec.json.Decoder[StepLine | EventLine] = msgspec.json.Decoder(StepLine | EventLine)


def decode_block(block: bytes, *, offset: int, origin: str) -> list[LogItem]:
    """Decode whole lines.

    Args:
        block: bytes that end with a newline.
        offset: where the block starts in the file, for the position of torn lines.
        origin: name of the file, for errors.

    Returns:
        The items in the order of the file.

    Raises:
        SchemaVersionError: a line was written with another schema version.
    """
    try:
        return list[LogItem](_DECODER.decode_lines(block))
    except _UNREADABLE:
        items: list[LogItem] = []
        for raw in block.split(b"\n")[:-1]:
            items += _decode_line(raw, offset, origin)
            offset += len(raw) + 1
        return items


def _decode_line(raw: bytes, offset: int, origin: str) -> list[LogItem]:
    if not raw.strip():
        return []
    try:
        return [_DECODER.decode(raw)]
    except _UNREADABLE as error:
        repaired = _repaired(raw, origin)
        if repaired is not None:
            return [repaired]
        reason = str(error)[:_REASON_CHARACTERS]
        salvaged, start = _salvaged(raw)
        torn = TornLine(offset=offset, length_bytes=start, reason=reason)
        return [torn] if salvaged is None else [torn, salvaged]


def _repaired(raw: bytes, origin: str) -> StepLine | EventLine | None:
    """The line with its NaN and Infinity tokens turned into nulls, if that is all that is wrong with it."""
    try:
        # Through text, because the standard parser guesses UTF-16 or UTF-32 for bytes with zeros in them.
        plain = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    version = plain.get("schema_version")
    if isinstance(version, int) and version != LOG_SCHEMA_VERSION:
        raise _wrong_version(version, origin)
    names: set[str] = set()
    cleaned = _without_nonfinite(plain, names)
    if not names:
        return None
    if cleaned.get("kind") == "step":
        declared = cleaned.get("nonfinite")
        known = declared if isinstance(declared, list) else ()
        cleaned["nonfinite"] = sorted(names.union(name for name in known if isinstance(name, str)))
    try:
        return msgspec.convert(cleaned, StepLine | EventLine)
    except msgspec.ValidationError:
        return None


def _without_nonfinite(plain: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            names.add(name)
            cleaned[name] = None if name in _NULLABLE else 0.0
        elif isinstance(value, list):
            cleaned[name] = [_without_nonfinite(item, names) if isinstance(item, dict) else item for item in value]
        else:
            cleaned[name] = value
    return cleaned


def _salvaged(raw: bytes) -> tuple[StepLine | EventLine | None, int]:
    """A whole line at the end of a torn one (a writer that died mid-line, then one that appended), and its start."""
    start = raw.find(b'{"', 1)
    for _ in range(_SALVAGE_TRIES):
        if start == -1:
            break
        try:
            return _DECODER.decode(raw[start:]), start
        except _UNREADABLE:
            start = raw.find(b'{"', start + 1)
    return None, len(raw)


def _wrong_version(found: int, origin: str) -> SchemaVersionError:
    return SchemaVersionError(
        f"{origin} has a line of schema version {found!r}, this code reads {LOG_SCHEMA_VERSION}",
        remedy="judge the run with the version of the code that wrote its log",
    )
