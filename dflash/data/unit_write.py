"""Writing one unit: tokenized batches become shards, counts, prompt hashes and a quarantine file, and then a record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dflash.config import DataConfig
from dflash.data.bad_rows import BadRowFile, refuse_if_forbidden
from dflash.data.columns import SampleColumns
from dflash.data.prompt_hashes import PromptTable, write_table
from dflash.data.put import put_data_file
from dflash.data.shards import ShardWriter, unit_part
from dflash.data.sources import Progress, UnitSpec
from dflash.data.tokenize import TokenizedBatch
from dflash.records import BucketStats, DataFile, QuarantinedRow, ShardEntry, SourceEntry, UnitRecord
from dflash.storage import Store


class BucketWriter:
    """Deals samples out to the buckets of one unit and counts them.

    Args:
        store: receives finished shards.
        scratch: local folder for unfinished ones.
        unit: id of the unit.
        edges: upper edges of the buckets; the last is at least the longest sample.
        data: sizes of shards and row groups.
    """

    def __init__(self, store: Store, scratch: Path, *, unit: str, edges: Sequence[int], data: DataConfig) -> None:
        self._edges = np.asarray(edges, np.int64)
        self._counts = np.zeros((len(edges), 3), np.int64)  # samples, tokens, supervised tokens
        self._shards = ShardWriter(
            store, scratch, unit=unit, rows_per_shard=data.rows_per_shard, rows_per_group=data.rows_per_group
        )

    @property
    def samples(self) -> int:
        """Samples added so far."""
        return int(self._counts[:, 0].sum())

    def add(self, samples: SampleColumns) -> None:
        """Add samples in order."""
        if not len(samples):
            return
        buckets = np.searchsorted(self._edges, samples.lengths, side="left")
        added = np.stack([np.ones_like(samples.lengths), samples.lengths, samples.supervised], axis=1)
        np.add.at(self._counts, buckets, added)
        self._shards.add(samples, buckets=buckets)

    def close(self) -> tuple[ShardEntry, ...]:
        """Finish the shards and return them, bucket by bucket."""
        return self._shards.close()

    def abort(self) -> None:
        """Close the files without finishing them."""
        self._shards.abort()

    @property
    def stats(self) -> tuple[BucketStats, ...]:
        """What each bucket holds so far."""
        rows = zip(self._edges.tolist(), self._counts.tolist(), strict=True)
        return tuple(BucketStats(bucket, edge, *counts) for bucket, (edge, counts) in enumerate(rows))


def write_unit(
    spec: UnitSpec,
    batches: Iterable[TokenizedBatch],
    *,
    store: Store,
    scratch: Path,
    edges: Sequence[int],
    recipe_fingerprint: str,
    data: DataConfig,
    progress: Progress,
) -> UnitRecord:
    """Write everything of a unit but its record.

    Args:
        spec: the unit.
        batches: all of its rows, in order.
        store: the data set's folder.
        scratch: local folder for unfinished files.
        edges: upper edges of the buckets.
        recipe_fingerprint: for the record.
        data: sizes and policies.
        progress: called with ("tokenize", rows done, rows expected).

    Raises:
        BadRowError: a row that no policy tolerates.
        StorageError: the store cannot be used.
    """
    writer = BucketWriter(store, scratch, unit=spec.unit, edges=edges, data=data)
    prompts, bad_rows = PromptTable(), BadRowFile(scratch / "quarantine.jsonl", data)
    rows = answers = exact = dropped_tokens = 0
    try:
        for batch in batches:
            for _, row in batch.bad:
                refuse_if_forbidden(row, data)
                bad_rows.add(_without_place(row, spec))
            writer.add(batch.samples)
            prompts.add(batch.prompt_digests)
            dropped_tokens += sum(tokens for _, tokens in batch.dropped)
            rows, answers, exact = rows + batch.rows, answers + batch.answers, exact + batch.exact_answers
            progress("tokenize", rows, max(rows, spec.rows_expected))
        shards = writer.close()
    except BaseException:
        writer.abort()
        raise
    finally:
        bad_rows.close()
    stem, table = f"units/{unit_part(spec.unit)}", prompts.table()
    write_table(scratch / "prompts.npy", table)
    source = spec.source
    return UnitRecord(
        recipe_fingerprint=recipe_fingerprint,
        source=SourceEntry(
            label=source.label,
            sha256=source.sha256,
            size_bytes=source.size_bytes,
            unit=spec.unit,
            rows=rows,
            samples=writer.samples,
        ),
        edges_tokens=tuple(edges),
        buckets=writer.stats,
        quarantined=bad_rows.counts,
        dropped_tokens=dropped_tokens,
        answers=answers,
        exact_answers=exact,
        prompts=put_data_file(store, f"{stem}.prompts", scratch / "prompts.npy", rows=len(table)),
        quarantine=put_data_file(store, f"{stem}.quarantine", bad_rows.path, rows=sum(bad_rows.counts.values())),
        shards=shards,
    )


def _without_place(row: QuarantinedRow, spec: UnitSpec) -> QuarantinedRow:
    """The row with its file's label instead of its address: what is stored does not depend on where sources lie."""
    uri = spec.source.uri
    if uri is None or not row.origin.startswith(f"{uri}:"):
        return row
    return QuarantinedRow(spec.source.label + row.origin.removeprefix(uri), row.reason)


def copy_data_file(file: DataFile, stem: str, *, source: Store, target: Store, scratch: Path) -> DataFile:
    """The same file in another store, under another stem."""
    local = scratch / f"copy{Path(file.path).suffix}"
    local.write_bytes(source.read(file.path))
    return put_data_file(target, stem, local, rows=file.rows)
