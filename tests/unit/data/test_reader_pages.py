"""Single pages against pyarrow's own decoder, and what becomes of damaged bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.reader_pages import (
    PAGE_LAYOUT,
    PageDefect,
    PageIndex,
    decode_levels,
    decode_lists,
    decode_values,
    parse_page_index,
    parse_struct,
)

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_spans", pa.list_(pa.int32())), ("length", pa.int32())])
ANY_LISTS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=1, max_size=60)


def written(lists: list[list[int]], *, rows_per_group: int = 1000, **layout: Any) -> bytes:
    table = pa.table(
        [pa.array([row or [0] for row in lists], pa.list_(pa.int32())), pa.array(lists, pa.list_(pa.int32())), [*map(len, lists)]],
        schema=SCHEMA,
    )
    buffer = io.BytesIO()
    options = {**PAGE_LAYOUT, "use_dictionary": False, "write_statistics": ["length"], **layout}
    pq.write_table(table, buffer, row_group_size=rows_per_group, **options)
    return buffer.getvalue()


def chunks(data: bytes, column: int) -> list[tuple[PageIndex, int]]:
    """Page index and rows of every row group's column chunk."""
    footer = int.from_bytes(data[-8:-4], "little")
    groups = parse_struct(data[-8 - footer : -8], 0)[0][4]
    found = []
    for group in groups:
        chunk = group[1][column]
        found.append((parse_page_index(data[chunk[4] : chunk[4] + chunk[5]], rows=group[3]), group[3]))
    return found


def pages(data: bytes, column: int) -> list[tuple[bytes, int]]:
    """Bytes and rows of every page."""
    found = []
    for index, _ in chunks(data, column):
        for page in range(len(index.sizes)):
            start = index.base + int(index.offsets[page])
            rows = int(index.first_rows[page + 1]) - int(index.first_rows[page])
            found.append((data[start : start + int(index.sizes[page])], rows))
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ANY_LISTS, st.integers(1, 30), st.sampled_from([1, 64, 16384]), st.sampled_from(["zstd", "none"]))
def test_every_page_decodes_to_what_was_written(lists: list[list[int]], per_group: int, page_bytes: int, codec: str) -> None:
    data = written(lists, rows_per_group=per_group, data_page_size=page_bytes, write_batch_size=4, compression=codec)
    assert pq.read_table(io.BytesIO(data))["loss_spans"].to_pylist() == lists
    found: list[list[int]] = []
    for page, rows in pages(data, 1):
        values, offsets = decode_lists(page, rows=rows)
        found += [values[offsets[row] : offsets[row + 1]].tolist() for row in range(rows)]
    assert found == lists
    row = 0
    for page, rows in pages(data, 0):
        wanted = [value for own in lists[row : row + rows] for value in own or [0]]
        assert decode_values(page, values=len(wanted), rows=rows).tolist() == wanted
        row += rows
    lengths = [length for page, rows in pages(data, 2) for length in decode_values(page, values=rows, rows=rows).tolist()]
    assert lengths == [*map(len, lists)]


def test_rows_of_the_usual_length_share_a_page_of_the_usual_size() -> None:
    lengths = np.random.default_rng(0).integers(32, 3000, 400)
    data = written([[7] * int(length) for length in lengths])
    [(index, rows)] = chunks(data, 0)
    assert rows == 400
    per_page = np.diff(index.first_rows)
    assert per_page.max() <= 80 and len(index.sizes) > 80, "a sample is read with a few neighbours, not with its row group"
    assert index.nbytes < 13 * len(index.sizes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12), st.booleans())
def test_levels_decode_from_runs_and_from_packed_bits(runs: list[tuple[int, int]], packed: bool) -> None:
    levels = [level for level, count in runs for _ in range(count)]
    if packed:
        padded = [*levels, *[0] * (-len(levels) % 8)]
        bits = [level >> bit & 1 for level in padded for bit in range(2)]
        encoded = _varint(len(padded) // 8 << 1 | 1) + np.packbits(bits, bitorder="little").tobytes()
    else:
        encoded = b"".join(_varint(count << 1) + bytes([level]) for level, count in runs)
    assert decode_levels(encoded, len(levels), bits=2).tolist() == levels
    for cut in range(len(encoded)):
        with pytest.raises(PageDefect):
            decode_levels(encoded[:cut], len(levels), bits=2)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_every_flipped_bit_of_a_page_is_noticed_or_harmless() -> None:
    data = written([[5, 6, 7], [8], [], [9, 10]])
    [(page, rows)] = pages(data, 1)
    wanted = decode_lists(page, rows=rows)
    refused = 0
    for place in range(8 * len(page)):
        flipped = bytearray(page)
        flipped[place // 8] ^= 1 << place % 8
        try:
            found = decode_lists(bytes(flipped), rows=rows)
        except (PageDefect, LookupError, TypeError, ValueError, OverflowError):
            refused += 1
        else:
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)
    assert refused > 4 * len(page)


def test_every_flipped_bit_of_a_page_index_is_noticed_or_leads_to_a_page_that_is_refused() -> None:
    lists = [[number] * (1 + number % 5) for number in range(40)]
    data = written(lists, data_page_size=1, write_batch_size=4)
    footer = int.from_bytes(data[-8:-4], "little")
    chunk = parse_struct(data[-8 - footer : -8], 0)[0][4][0][1][1]
    index_bytes = data[chunk[4] : chunk[4] + chunk[5]]
    assert len(parse_page_index(index_bytes, rows=40).sizes) > 15, "the long form of the list header"
    refused = 0
    for place in range(8 * len(index_bytes)):
        flipped = bytearray(index_bytes)
        flipped[place // 8] ^= 1 << place % 8
        try:
            index = parse_page_index(bytes(flipped), rows=40)
            found: list[list[int]] = []
            for page in range(len(index.sizes)):
                start = index.base + int(index.offsets[page])
                rows = int(index.first_rows[page + 1]) - int(index.first_rows[page])
                values, offsets = decode_lists(data[start : start + int(index.sizes[page])], rows=rows)
                found += [values[offsets[row] : offsets[row + 1]].tolist() for row in range(rows)]
        except (PageDefect, LookupError, TypeError, ValueError, OverflowError):
            refused += 1
        else:
            assert found == lists
    assert refused > 7 * len(index_bytes)


@pytest.mark.parametrize("index", [b"", b"\x19", b"\x19\x00", b"\x19\x1c", b"\x19\x1c\x16\x02\x15\x02\x16\x02\x00", bytes(40)])
def test_a_malformed_page_index_is_refused(index: bytes) -> None:
    with pytest.raises(PageDefect):
        parse_page_index(index, rows=1)


@pytest.mark.parametrize("layout", [{"data_page_version": "1.0"}, {"use_dictionary": True}, {"write_page_checksum": False}])
def test_pages_of_another_layout_are_refused(layout: dict[str, Any]) -> None:
    data = written([[1, 2], [3]], **layout)
    for page, rows in pages(data, 1):
        with pytest.raises(PageDefect):
            decode_lists(page, rows=rows)


def test_nulls_are_refused() -> None:
    for column in (pa.array([[1, None]], pa.list_(pa.int32())), pa.array([[1], None], pa.list_(pa.int32()))):
        buffer = io.BytesIO()
        pq.write_table(pa.table({"x": column}), buffer, **{**PAGE_LAYOUT, "use_dictionary": False, "write_statistics": False})
        [(page, rows)] = pages(buffer.getvalue(), 0)
        with pytest.raises(PageDefect, match="null"):
            decode_lists(page, rows=rows)
        with pytest.raises(PageDefect):
            decode_values(page, values=2, rows=rows)


def test_counts_that_contradict_the_index_are_refused() -> None:
    [(page, rows)] = pages(written([[1, 2], [3]]), 0)
    with pytest.raises(PageDefect, match="2 rows instead of 3"):
        decode_lists(page, rows=3)
    with pytest.raises(PageDefect, match="3 values instead of 4"):
        decode_values(page, values=4, rows=rows)
