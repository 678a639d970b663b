"""Data sets of given samples, written through the real shard writer into any store."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.columns import SampleColumns, TokenizedSample
from dflash.data.manifest import MANIFEST_FILE, manifest_name
from dflash.data.shards import ShardWriter
from dflash.records import BucketStats, DataManifest, SourceEntry, to_sealed_json
from dflash.storage import Store

UNIT = "0123456789ab" + "0" * 52


def write_samples(
    store: Store,
    buckets: Sequence[Sequence[TokenizedSample]],
    *,
    edges: Sequence[int],
    rows_per_shard: int,
    rows_per_group: int,
    **changes: Any,
) -> DataManifest:
    """A data set of the given samples of each bucket; its row order is bucket by bucket; `changes` go into the manifest."""
    parts = ((SampleColumns.of([item]), np.array([bucket], np.int64)) for bucket, own in enumerate(buckets) for item in own)
    return write_columns(store, parts, edges=edges, rows_per_shard=rows_per_shard, rows_per_group=rows_per_group, **changes)


def write_columns(
    store: Store,
    parts: Iterable[tuple[SampleColumns, NDArray[np.int64]]],
    *,
    edges: Sequence[int],
    rows_per_shard: int,
    rows_per_group: int,
    **changes: Any,
) -> DataManifest:
    """A data set of streamed columns, each part with the [n] buckets of its samples."""
    counts, tokens, supervised = (np.zeros(len(edges), np.int64) for _ in range(3))
    with tempfile.TemporaryDirectory() as scratch:
        writer = ShardWriter(store, Path(scratch), unit=UNIT, rows_per_shard=rows_per_shard, rows_per_group=rows_per_group)
        for samples, buckets in parts:
            writer.add(samples, buckets=buckets)
            np.add.at(counts, buckets, 1)
            np.add.at(tokens, buckets, samples.lengths)
            np.add.at(supervised, buckets, samples.supervised)
        shards = writer.close()
    fingerprint = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    rows = int(counts.sum())
    manifest = DataManifest(
        fingerprint=fingerprint,
        recipe_fingerprint="0" * 64,
        sources=(SourceEntry("toy", "0" * 64, 0, UNIT, rows, rows),),
        target_id="toy",
        target_fingerprint="0" * 64,
        tokenizer_sha256="0" * 64,
        template_sha256="0" * 64,
        template_flags={},
        vocab_size=2**20,
        mask_token_id=2**20 - 1,
        mask_token_uses=0,
        on_policy=False,
        answer_sampling={},
        rows=rows,
        samples=rows,
        tokens=int(tokens.sum()),
        supervised_tokens=int(supervised.sum()),
        max_length_tokens=max(edges),
        edges_tokens=tuple(edges),
        quarantined={},
        dropped_tokens=0,
        buckets=tuple(
            BucketStats(bucket, edge, *(int(column[bucket]) for column in (counts, tokens, supervised)))
            for bucket, edge in enumerate(edges)
        ),
        prompt_files=(),
        quarantine_files=(),
        shards=shards,
    )
    manifest = replace(manifest, **changes)
    for name in (manifest_name(fingerprint), MANIFEST_FILE):
        store.put(name, to_sealed_json(manifest).encode(), only_if_absent=False)
    return manifest
