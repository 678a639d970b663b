"""The plan on disk: `plan.parquet` with one row a batch, and `manifest.json`, written last.

Invariant: the manifest's `plan_sha256` is over the batches themselves; a plan that loads is the plan that was written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash.data.parquet import open_parquet, read_columns, versioned_schema
from dflash.errors import DataError
from dflash.records import PlanManifest, PlannedBatch, from_json, to_json
from dflash.records.data import PLAN_SCHEMA_VERSION
from dflash.storage import atomic_write_bytes, atomic_write_text

PLAN_FILE = "plan.parquet"
MANIFEST_FILE = "manifest.json"

_SCHEMA = versioned_schema(
    pa.schema(
        [
            ("position", pa.int64()),
            ("epoch", pa.int32()),
            ("bucket", pa.int32()),
            ("padded_length_tokens", pa.int32()),
            ("rows", pa.list_(pa.int64())),
        ]
    ),
    PLAN_SCHEMA_VERSION,
)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A verified plan: what it is, and its batches in consumption order."""

    manifest: PlanManifest
    batches: tuple[PlannedBatch, ...]


def content_sha256(batches: Sequence[PlannedBatch]) -> str:
    """SHA-256 (hex) over every field of every batch, as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for batch in batches:
        head = (batch.position, batch.epoch, batch.bucket, batch.padded_length_tokens, len(batch.rows))
        digest.update(np.array([*head, *batch.rows], dtype="<i8").tobytes())
    return digest.hexdigest()


def write_plan(plan: BatchPlan, plan_dir: Path) -> None:
    """Write a plan durably, the manifest last; the folder is created."""
    batches = plan.batches
    offsets = np.concatenate([[0], np.cumsum([len(batch.rows) for batch in batches])])
    rows = pa.array(np.fromiter(chain.from_iterable(b.rows for b in batches), dtype=np.int64))
    columns = [
        pa.array([batch.position for batch in batches], pa.int64()),
        pa.array([batch.epoch for batch in batches], pa.int32()),
        pa.array([batch.bucket for batch in batches], pa.int32()),
        pa.array([batch.padded_length_tokens for batch in batches], pa.int32()),
        pa.LargeListArray.from_arrays(pa.array(offsets), rows).cast(pa.list_(pa.int64())),
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), sink, compression="zstd")
    plan_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(plan_dir / PLAN_FILE, sink.getvalue().to_pybytes())
    atomic_write_text(plan_dir / MANIFEST_FILE, to_json(plan.manifest, indent=2) + "\n")


def load_plan(plan_dir: Path) -> BatchPlan:
    """Read a plan and verify it.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: missing, or not the plan that its manifest describes.
    """
    file = plan_dir / MANIFEST_FILE
    if not file.is_file():
        raise DataError(f"there is no batch plan in {plan_dir}", remedy="prepare the run first: it builds the plan")
    manifest = from_json(PlanManifest, file.read_bytes(), origin=str(file))
    batches = _read_batches(plan_dir / PLAN_FILE)
    found = content_sha256(batches)
    if found != manifest.plan_sha256:
        raise DataError(
            f"{plan_dir / PLAN_FILE} has the hash {found[:16]}..., its manifest says {manifest.plan_sha256[:16]}...",
            remedy="restore the file from a copy; a run cannot go on with another plan",
        )
    return BatchPlan(manifest, batches)


def _read_batches(path: Path) -> tuple[PlannedBatch, ...]:
    with open_parquet(path, _SCHEMA, version=PLAN_SCHEMA_VERSION) as file:
        *heads, rows = read_columns(file, path, columns=_SCHEMA.names, group=None)
    flat = tuple(rows.flatten().to_numpy().tolist())
    ends = np.cumsum(rows.value_lengths().to_numpy()).tolist()
    members = (flat[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
    columns = (column.to_numpy().tolist() for column in heads)
    return tuple(PlannedBatch(*fields) for fields in zip(*columns, members, strict=True))
