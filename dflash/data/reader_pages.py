"""Single pages of a Parquet file, decoded without reading the row group around them.

A plan visits samples in random order. A row group is the smallest thing that pyarrow decodes, and it must hold thousands
of rows or the footers of a large data set no longer fit into memory: a sample would cost hundreds. Parquet's own page index
says where each page is, so this module reads exactly the page that holds a sample: 16 KiB instead of ten megabytes.

Invariant: a page is used only if its checksum, its sizes and its row and value counts agree with the index and the lengths.
Sources: the Parquet format's `parquet.thrift` (page headers, offset index), Encodings (PLAIN, RLE/bit-packed hybrid), and
Apache Thrift's compact protocol.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes: TypeAlias = bytes | memoryview

PAGE_BYTES = 16 * 1024
"""Bytes of a page before compression. Smaller ones compress worse (3 % more bytes than whole row groups at this size) and
make the index longer; larger ones decode more neighbours of the sample that is wanted."""

PAGE_LAYOUT: Mapping[str, Any] = {
    "compression": "zstd",
    "data_page_size": PAGE_BYTES,
    "data_page_version": "2.0",
    "use_dictionary": ["source"],
    "write_page_checksum": True,
    "write_page_index": True,
    "write_statistics": ["length", "supervised", "turns"],
}
"""How shards are written (arguments of `pyarrow.parquet.ParquetWriter`) so that this module can read them."""

_INTEGERS = (4, 5, 6)
"""Types of the compact protocol that are zigzag variable-length numbers."""
_DATA_PAGE_V2 = 3
_PLAIN = 0
_VALUE_LEVEL, _EMPTY_LEVEL = 3, 1
"""Definition levels in an optional list of optional elements: a value is there, or the list is empty."""

_LONGEST_HEADER_BYTES = 256
_LOCATION_VARINTS = 7
"""A page location in the compact protocol: three field headers, three numbers, one stop byte."""

_CODEC = pa.Codec("zstd")


class PageDefect(Exception):  # noqa: N818 - never leaves the reader, which names the file
    """What is wrong with the bytes."""


@dataclass(frozen=True, slots=True)
class PageIndex:
    """Where the pages of one column chunk are: page i is `[offsets[i], offsets[i] + sizes[i])` from `base`.

    Attributes:
        offsets: [p] uint32; sizes: [p] uint32.
        first_rows: [p + 1] uint32 rows of the row group; page i holds `[first_rows[i], first_rows[i + 1])`.
    """

    base: int
    offsets: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    first_rows: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.offsets.nbytes + self.sizes.nbytes + self.first_rows.nbytes


def parse_page_index(data: Bytes, *, rows: int) -> PageIndex:
    """Decode an OffsetIndex structure of a row group with `rows` rows.

    Raises:
        PageDefect: it is malformed.
    """
    raw = np.frombuffer(data, np.uint8)
    if len(raw) < 3 or raw[0] != 0x19:  # field 1, a list
        raise PageDefect("the page index is malformed")
    wide = raw[1] >> 4 == 15
    values = _varints(raw[2:])
    pages = int(values[0]) if wide else int(raw[1]) >> 4
    values = values[1 if wide else 0 :]
    if raw[1] & 0x0F != 12 or not pages or len(values) < pages * _LOCATION_VARINTS:
        raise PageDefect("the page index is malformed")
    table = values[: pages * _LOCATION_VARINTS].reshape(pages, _LOCATION_VARINTS)
    if (table[:, [0, 2, 4, 6]] != np.array([0x16, 0x15, 0x16, 0], np.uint64)).any():
        raise PageDefect("the page index is malformed")
    offsets, sizes, firsts = (table[:, column] >> np.uint64(1) for column in (1, 3, 5))  # zigzag of numbers that are not negative
    ends = np.append(firsts[1:], np.uint64(rows))
    if firsts[0] != 0 or (ends <= firsts).any() or (offsets < offsets[0]).any() or (sizes == 0).any():
        raise PageDefect("the page index is malformed")
    relative = offsets - offsets[0]
    if max(int(relative.max()), int(sizes.max()), rows) >= 2**32:
        raise PageDefect("the row group is larger than 4 GiB")
    return PageIndex(
        base=int(offsets[0]),
        offsets=relative.astype(np.uint32),
        sizes=sizes.astype(np.uint32),
        first_rows=np.append(firsts, np.uint64(rows)).astype(np.uint32),
    )


def decode_values(page: Bytes, *, values: int, rows: int) -> NDArray[np.int32]:
    """The [values] int32 of one page (its header included) in which nothing is null or empty.

    Raises:
        PageDefect: the page is damaged, or holds another number of values or rows.
    """
    details, _, found = _open_page(page, rows=rows)
    if details[2] or details[1] != values:
        raise PageDefect(f"a page of {rows} rows holds {details[1] - details[2]} values instead of {values}")
    return found


def decode_lists(page: Bytes, *, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The values of one page of lists, and [rows + 1] int64 offsets of the lists in them.

    Raises:
        PageDefect: the page is damaged, holds a null, or another number of rows.
    """
    details, body, found = _open_page(page, rows=rows)
    entries, nulls, repetition_bytes = details[1], details[2], details[6]
    starts = np.flatnonzero(decode_levels(body[:repetition_bytes], entries, bits=1) == 0)
    if nulls:  # places of empty lists, which hold no value
        definitions = body[repetition_bytes : repetition_bytes + details[5]]
        levels = decode_levels(definitions, entries, bits=_VALUE_LEVEL.bit_length())
        present = levels == _VALUE_LEVEL
        if not (present | (levels == _EMPTY_LEVEL)).all():
            raise PageDefect("a value is null where none can be")
        starts = np.concatenate([[0], np.cumsum(present)])[starts]
    if len(starts) != rows:
        raise PageDefect(f"a page holds {len(starts)} lists instead of {rows}")
    return found, np.append(starts, len(found))


def split_pages(chunk: Bytes) -> Iterator[tuple[Bytes, int]]:
    """The pages of a column chunk, each with its rows.

    Raises:
        PageDefect: a page header is malformed.
    """
    position = 0
    while position < len(chunk):
        header, body = parse_struct(bytes(chunk[position : position + _LONGEST_HEADER_BYTES]), 0)
        size = body + header[3]
        yield chunk[position : position + size], header[8][3]
        position += size


def _open_page(page: Bytes, *, rows: int) -> tuple[dict[int, Any], memoryview, NDArray[np.int32]]:
    """The data page's own header, its body, and its values, once checksum, sizes and rows are found to be right."""
    view = memoryview(page)
    header, start = parse_struct(bytes(view[:_LONGEST_HEADER_BYTES]), 0)
    body, details = view[start:], header.get(8)
    if header.get(1) != _DATA_PAGE_V2 or not isinstance(details, dict) or details.get(4) != _PLAIN:
        raise PageDefect("it was not written with the page layout of this code")
    checksum = header.get(4)
    if len(body) != header.get(3) or checksum is None or zlib.crc32(body) != checksum & 0xFFFFFFFF:
        raise PageDefect("a page's checksum does not match")
    if details.get(3) != rows:
        raise PageDefect(f"a page holds {details.get(3)} rows instead of {rows}")
    count, values_at = details[1] - details[2], details[5] + details[6]
    plain_bytes = header[2] - values_at
    if not 0 <= count <= details[1] or plain_bytes != 4 * count:
        raise PageDefect(f"a page of {count} values has {plain_bytes} bytes")
    packed: Any = body[values_at:]
    if details.get(7, True) and plain_bytes:
        try:
            packed = _CODEC.decompress(packed, decompressed_size=plain_bytes)
        except (OSError, pa.ArrowException) as error:
            raise PageDefect(f"a page cannot be decompressed: {error}") from error
    values = np.frombuffer(packed, "<i4", count)
    values.flags.writeable = False  # samples are views into a shared cache
    return details, body, values


def decode_levels(data: Bytes, count: int, *, bits: int) -> NDArray[np.uint8]:
    """[count] levels of `bits` bits from their run-length/bit-packed hybrid encoding.

    Raises:
        PageDefect: it ends too early.
    """
    view, position, found = memoryview(data), 0, 0
    pieces: list[NDArray[np.uint8]] = []
    weights = 1 << np.arange(bits, dtype=np.uint8)
    while found < count:
        try:
            header, position = _varint(view, position)
            if header & 1:
                size = (header >> 1) * bits
                unpacked = np.unpackbits(np.frombuffer(view, np.uint8, size, position), bitorder="little")
                pieces.append((unpacked.reshape(-1, bits) * weights).sum(axis=1, dtype=np.uint8))
                position += size
            else:
                pieces.append(np.full(min(header >> 1, count), view[position], np.uint8))
                position += 1
        except (IndexError, ValueError) as error:
            raise PageDefect("a page's levels end too early") from error
        if not len(pieces[-1]):
            raise PageDefect("a page's levels end too early")
        found += len(pieces[-1])
    return np.concatenate(pieces)[:count] if pieces else np.empty(0, np.uint8)


def parse_struct(data: bytes, position: int) -> tuple[dict[int, Any], int]:
    """A structure in Thrift's compact protocol, as field number -> value, and the position behind it.

    Raises:
        PageDefect: the bytes end too early or hold a type that Parquet does not use.
    """
    try:
        return _struct(data, position)
    except (IndexError, RecursionError) as error:
        raise PageDefect("a header is malformed") from error


def _struct(data: bytes, position: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    number = 0
    while True:
        byte = data[position]
        position += 1
        if byte == 0:
            return fields, position
        if byte >> 4:
            number += byte >> 4
        else:
            raw, position = _varint(data, position)
            number = _signed(raw)
        kind = byte & 0x0F
        if kind in _INTEGERS:
            raw = data[position]
            if raw < 0x80:
                position += 1
            else:
                raw, position = _varint(data, position)
            fields[number] = (raw >> 1) ^ -(raw & 1)
        else:
            fields[number], position = _value(data, position, kind)


def _value(data: bytes, position: int, kind: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        raw, position = _varint(data, position)
        return _signed(raw), position
    if kind in (1, 2):
        return kind == 1, position
    if kind == 8:
        size, position = _varint(data, position)
        return data[position : position + size], position + size
    if kind == 12:
        return _struct(data, position)
    if kind == 9:
        return _list(data, position)
    if kind == 3:
        return data[position], position + 1
    if kind == 7:
        return None, position + 8
    raise PageDefect(f"a header holds the unknown type {kind}")


def _list(data: bytes, position: int) -> tuple[list[Any], int]:
    size, kind = data[position] >> 4, data[position] & 0x0F
    position += 1
    if size == 15:
        size, position = _varint(data, position)
    items = []
    for _ in range(size):
        item, position = (data[position] == 1, position + 1) if kind in (1, 2) else _value(data, position, kind)
        items.append(item)
    return items, position


def _varint(data: Bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise PageDefect("a header holds an endless number")
    return value, position + 1


def _signed(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _varints(raw: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Every variable-length number of the bytes, least significant group first."""
    ends = np.flatnonzero(raw < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    widths = ends - starts + 1
    if not len(ends) or widths.max() > 9:
        raise PageDefect("the page index is malformed")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(widths.max())):
        has = widths > place
        values[has] |= (raw[starts[has] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values
