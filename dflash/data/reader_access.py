"""From row numbers to the pages that hold them: locating, fetching and decoding, with everything decoded kept for a while.

Invariant: what is returned was decoded from pages whose checksums, row counts and value counts fit the index and the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash.data.reader_cache import ByteCache
from dflash.data.reader_files import DAMAGE, Range, ShardBytes, ShardFooter, damaged
from dflash.data.reader_pages import Bytes, PageIndex, decode_lists, decode_values, parse_page_index
from dflash.records import ShardEntry

_IDS, _SPANS = 0, 1
_COLUMNS = (_IDS, _SPANS)
_OFFSET_BYTES = 40
"""A place in a list and its number."""

ValueT = TypeVar("ValueT")


class RawSample(NamedTuple):
    """One sample as it is stored: [n] int32 ids, and [2 k] int32 flat half-open loss spans; views into shared memory."""

    input_ids: NDArray[np.int32]
    loss_spans: NDArray[np.int32]


class _Page(NamedTuple):
    """A decoded page: the list of its row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.int32]
    offsets: Sequence[int] | NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + _OFFSET_BYTES * len(self.offsets)

    def row(self, row: int) -> NDArray[np.int32]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


_Chunk = tuple[int, int]
"""A column of a row group: its global number and the column."""

_PageKey = tuple[int, int, int]
"""A page: row group, column, number in the column chunk."""


class RawReader:
    """Raw samples by global row number, from any number of threads.

    Args:
        source: the bytes; uri: their folder, for messages.
        shards: in order; footers: of each.
        lengths: [rows] int32 tokens of each sample.
        cache_bytes: decoded pages and page indexes that are kept. Half of it is for the indexes and the loss spans: a byte
            of these serves many rows.
    """

    def __init__(
        self,
        source: ShardBytes,
        uri: str,
        shards: Sequence[ShardEntry],
        *,
        footers: Sequence[ShardFooter],
        lengths: NDArray[np.int32],
        cache_bytes: int,
    ) -> None:
        self._source, self._uri, self._shards, self._lengths = source, uri, shards, lengths
        group_rows = np.concatenate([np.empty(0, np.int64), *(footer.group_rows for footer in footers)])
        self._group_ends = np.cumsum(group_rows)
        self._group_starts = self._group_ends - group_rows
        self._group_shards = np.repeat(np.arange(len(footers)), [len(footer.group_rows) for footer in footers])
        self._index_ranges = np.concatenate([np.empty((0, 2, 2), np.int64), *(footer.page_indexes for footer in footers)])
        self._indexes: ByteCache[PageIndex] = ByteCache(limit_bytes=cache_bytes // 4)
        self._pages: tuple[ByteCache[_Page], ByteCache[_Page]] = (
            ByteCache(limit_bytes=cache_bytes // 2),
            ByteCache(limit_bytes=cache_bytes // 4),
        )

    def read(self, rows: NDArray[np.int64]) -> list[RawSample]:
        """The samples of existing rows, in the order asked for.

        Raises:
            DataError: the bytes are damaged.
        """
        groups = np.searchsorted(self._group_ends, rows, side="right")
        within = (rows - self._group_starts[groups]).tolist()
        numbers = groups.tolist()
        indexes = self._page_indexes(sorted(set(numbers)))
        places: list[tuple[_PageKey, int]] = []
        for column in _COLUMNS:
            for group, row in zip(numbers, within, strict=True):
                first_rows = indexes[group, column].first_rows
                page = int(first_rows.searchsorted(row, side="right")) - 1
                places.append(((group, column, page), row - int(first_rows[page])))
        pages = self._decoded(list(dict.fromkeys(key for key, _ in places)), indexes)
        found = [pages[key].row(row) for key, row in places]
        return [RawSample(ids, spans) for ids, spans in zip(found[: len(rows)], found[len(rows) :], strict=True)]

    def _page_indexes(self, groups: Sequence[int]) -> dict[_Chunk, PageIndex]:
        def decode(chunk: _Chunk, data: Bytes) -> PageIndex:
            return parse_page_index(data, rows=int(self._group_ends[chunk[0]] - self._group_starts[chunk[0]]))

        def where(chunk: _Chunk) -> Range:
            start, length = self._index_ranges[chunk].tolist()
            return int(self._group_shards[chunk[0]]), start, length

        chunks = [(group, column) for group in groups for column in _COLUMNS]
        return self._through(lambda _: self._indexes, chunks, where, decode)

    def _decoded(self, keys: Sequence[_PageKey], indexes: dict[_Chunk, PageIndex]) -> dict[_PageKey, _Page]:
        def decode(key: _PageKey, data: Bytes) -> _Page:
            group, column, page = key
            first_rows = indexes[group, column].first_rows
            start, stop = int(first_rows[page]), int(first_rows[page + 1])
            if column == _SPANS:
                return _Page(*decode_lists(data, rows=stop - start))
            base = int(self._group_starts[group])
            # A few rows: faster than numpy's cumulative sum.
            offsets = list(accumulate(self._lengths[base + start : base + stop].tolist(), initial=0))
            return _Page(decode_values(data, values=offsets[-1], rows=stop - start), offsets)

        def where(key: _PageKey) -> Range:
            group, column, page = key
            index = indexes[group, column]
            return int(self._group_shards[group]), index.base + int(index.offsets[page]), int(index.sizes[page])

        return self._through(lambda key: self._pages[key[1]], keys, where, decode)

    def _through(
        self,
        cache_of: Callable[[Any], ByteCache[Any]],
        keys: Sequence[Any],
        where: Callable[[Any], Range],
        decode: Callable[[Any, Bytes], ValueT],
    ) -> dict[Any, ValueT]:
        """The decoded thing of every key: from its cache, or fetched (all missing ones together) and kept."""
        found: dict[Any, Any] = {key: cache_of(key).get(key) for key in keys}
        missing = [key for key, value in found.items() if value is None]
        if not missing:
            return found
        ranges = [where(key) for key in missing]
        shard = ranges[0][0]
        try:
            data = self._source.fetch(ranges)
            for key, (shard, _, _), piece in zip(missing, ranges, data, strict=True):  # noqa: B007 - named by the error
                value: Any = decode(key, piece)
                found[key] = value
                cache_of(key).put(key, value, nbytes=value.nbytes)
        except DAMAGE as error:
            raise damaged(self._uri, self._shards[shard], error) from error
        return found
