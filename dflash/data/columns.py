"""Samples in columns: what travels from tokenizing processes to Parquet, as flat arrays instead of one object a token.

Layout of n samples with N tokens in all: `input_ids` [N] int32 end to end with `lengths` [n]; `loss_spans` [2 M] int32
end to end with `span_counts` [n] spans each, every span two numbers (start, end), half-open, counted from the sample's
first token, ascending and disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """One sample: [n] ids, and its supervised tokens as half-open spans."""

    sample_id: str
    source: str
    input_ids: Sequence[int] | Int32
    loss_spans: tuple[tuple[int, int], ...]
    turns: int

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[n] whether a token carries loss."""
        mask = np.zeros(len(self.input_ids), np.bool_)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """Samples as columns; see the module's layout."""

    sample_ids: list[str]
    sources: list[str]
    input_ids: Int32
    lengths: Int32
    loss_spans: Int32
    span_counts: Int32
    turns: Int32

    @classmethod
    def of(cls, samples: Sequence[TokenizedSample]) -> Self:
        """The columns of single samples."""
        spans = [sample.loss_spans for sample in samples]
        return cls(
            sample_ids=[sample.sample_id for sample in samples],
            sources=[sample.source for sample in samples],
            input_ids=_joined(np.asarray(sample.input_ids, np.int32) for sample in samples),
            lengths=np.array([len(sample.input_ids) for sample in samples], np.int32),
            loss_spans=np.fromiter(chain.from_iterable(chain.from_iterable(spans)), np.int32),
            span_counts=np.array([len(own) for own in spans], np.int32),
            turns=np.array([sample.turns for sample in samples], np.int32),
        )

    @classmethod
    def joined(cls, parts: Sequence[SampleColumns]) -> Self:
        """Several columns end to end."""
        return cls(
            sample_ids=list(chain.from_iterable(part.sample_ids for part in parts)),
            sources=list(chain.from_iterable(part.sources for part in parts)),
            input_ids=_joined(part.input_ids for part in parts),
            lengths=_joined(part.lengths for part in parts),
            loss_spans=_joined(part.loss_spans for part in parts),
            span_counts=_joined(part.span_counts for part in parts),
            turns=_joined(part.turns for part in parts),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def supervised(self) -> Int32:
        """[n] supervised tokens of each sample."""
        sizes = self.loss_spans[1::2] - self.loss_spans[::2]
        owner = np.repeat(np.arange(len(self)), self.span_counts)
        return np.bincount(owner, weights=sizes, minlength=len(self)).astype(np.int32)

    def take(self, rows: NDArray[np.int64]) -> SampleColumns:
        """The samples at `rows`, in that order."""
        return SampleColumns(
            sample_ids=[self.sample_ids[row] for row in rows.tolist()],
            sources=[self.sources[row] for row in rows.tolist()],
            input_ids=self._ids_of(rows),
            lengths=self.lengths[rows],
            loss_spans=self.loss_spans[_elements(2 * self.span_counts, rows)],
            span_counts=self.span_counts[rows],
            turns=self.turns[rows],
        )

    def _ids_of(self, rows: NDArray[np.int64]) -> Int32:
        ends = np.cumsum(self.lengths, dtype=np.int64)
        starts = (ends - self.lengths)[rows].tolist()
        # Copying pieces is many times as fast as gathering single tokens.
        return _joined(self.input_ids[start:end] for start, end in zip(starts, ends[rows].tolist(), strict=True))

    def cut(self, start: int, stop: int) -> SampleColumns:
        """The samples [start, stop), as views."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        span_ends = np.concatenate([[0], np.cumsum(2 * self.span_counts, dtype=np.int64)])
        return SampleColumns(
            sample_ids=self.sample_ids[start:stop],
            sources=self.sources[start:stop],
            input_ids=self.input_ids[ends[start] : ends[stop]],
            lengths=self.lengths[start:stop],
            loss_spans=self.loss_spans[span_ends[start] : span_ends[stop]],
            span_counts=self.span_counts[start:stop],
            turns=self.turns[start:stop],
        )

    def sample(self, row: int) -> TokenizedSample:
        """One sample of its own."""
        own = self.cut(row, row + 1)
        pairs = own.loss_spans.reshape(-1, 2).tolist()
        spans = tuple((int(start), int(end)) for start, end in pairs)
        return TokenizedSample(own.sample_ids[0], own.sources[0], own.input_ids, spans, int(own.turns[0]))


def _elements(counts: Int32, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions, in a flat column with `counts` values a row, of all values of `rows`."""
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[rows]
    wanted = counts[rows].astype(np.int64)
    before = np.cumsum(wanted) - wanted
    positions: NDArray[np.int64] = np.repeat(starts - before, wanted) + np.arange(int(wanted.sum()))
    return positions


def _joined(arrays: Iterable[Int32]) -> Int32:
    parts = list(arrays)
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
