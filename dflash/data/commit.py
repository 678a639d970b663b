"""From unit records to one version of a data set: judged, assembled, committed.

Invariant: `manifests/<fingerprint>.json` is put if absent and never changed, so of two builders exactly one commits, and the
other verifies what is there and uses it. `manifest.json` is a copy of the newest version for people and their tools.
Assembly is a pure function: equal records give equal bytes, wherever they were built.
"""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from dflash.config import Config, DataConfig
from dflash.data.bad_rows import check_share, forbids, reason_code, refuse_if_forbidden, warn_of_answers
from dflash.data.buckets import auto_edges, equal_mass_edges
from dflash.data.columns import TokenizedSample
from dflash.data.fingerprint import data_set_fingerprint
from dflash.data.manifest import BUILD_FILE, EDGES_FILE, MANIFEST_FILE, PREVIEW_FILE, manifest_name, read_manifest
from dflash.data.parquet import readable
from dflash.data.preview import preview_page
from dflash.data.quarantine import PART_PREFIX
from dflash.data.shards import columns_of_table
from dflash.data.units import BuildJob, reuse_policy, staged_lengths
from dflash.errors import DataError, SchemaVersionError, StorageError
from dflash.records import BucketStats, DataFile, DataManifest, QuarantinedRow, UnitRecord, sealed, to_sealed_json, unsealed
from dflash.storage import Store

logger = logging.getLogger(__name__)

MIN_EXACT_FRAC = 0.9
"""Share of answers under which the template, not the odd token, must be why rendering changes them."""

PREVIEW_PER_BUCKET = 6
"""Samples of each bucket that the preview page shows."""


def known_edges(job: BuildJob) -> tuple[int, ...] | None:
    """The data set's bucket edges; None while they are yet to be measured.

    Raises:
        DataError: the stored edges are damaged.
    """
    configured = job.config.data.bucket_edges_tokens
    if not isinstance(configured, str):
        return configured
    if job.store.size(EDGES_FILE) is None:
        return None
    try:
        edges = tuple(unsealed(job.store.read(EDGES_FILE), origin=f"{job.location}/{EDGES_FILE}")["edges_tokens"])
    except (KeyError, TypeError, DataError) as error:
        raise DataError(f"{job.location}/{EDGES_FILE} is damaged", remedy="remove the data set and build it again") from error
    if not edges or any(type(edge) is not int for edge in edges) or list(edges) != sorted(set(edges)):
        raise DataError(f"{job.location}/{EDGES_FILE} holds {list(edges)}", remedy="remove the data set and build it again")
    return edges


def fix_edges(job: BuildJob, staged: Sequence[UnitRecord]) -> tuple[int, ...]:
    """Choose bucket edges for the staged units and write them down, unless another builder has done so.

    Returns:
        The data set's edges from now on; files that come later keep them.

    Raises:
        BadRowError: a row that is not tolerated.
        DataError: too many bad rows, or nothing but bad rows: edges that they chose would stay when they are mended.
    """
    fixed = known_edges(job)
    if fixed is not None:
        return fixed
    data = job.config.data
    try:
        _judge_rows(
            _bad_counts(staged),
            [record.quarantine for record in staged],
            rows=sum(record.source.rows for record in staged),
            store=job.staging.store,
            data=data,
        )
        counts = staged_lengths(job, staged)
    except (StorageError, DataError):
        # Another builder may have fixed the edges and dealt out the same staged rows in the meantime.
        if (fixed := known_edges(job)) is None:
            raise
        return fixed
    choose = auto_edges if data.bucket_edges_tokens == "auto" else equal_mass_edges
    edges = choose(counts, buckets=data.num_buckets, pad_multiple_tokens=job.config.plan.pad_multiple_tokens)
    content = {"edges_tokens": list(edges), "chosen": data.bucket_edges_tokens, "samples": int(counts.sum())}
    job.store.put(EDGES_FILE, sealed(content).encode(), only_if_absent=True)
    return known_edges(job) or edges


def commit(records: Sequence[UnitRecord], *, job: BuildJob, tokenizer: PreTrainedTokenizerBase) -> DataManifest:
    """Make a version of the data set of finished units; the manifest comes last.

    Args:
        records: one a unit, in the order of the samples.
        job: what the units share.
        tokenizer: for the preview.

    Returns:
        The manifest that is there now: this builder's, or the equal one of another.

    Raises:
        DataError: too many bad rows, or nothing but bad rows.
        StorageError: the store cannot be used.
    """
    manifest = assemble(records, job)
    judge(manifest, job)
    warn_of_inexact_answers(records)
    store, name = job.store, manifest_name(manifest.fingerprint)
    content = to_sealed_json(manifest).encode()
    _write_preview(store, manifest, tokenizer)
    if not store.put(name, content, only_if_absent=True):
        try:
            manifest = read_manifest(store, fingerprint=manifest.fingerprint, verify=reuse_policy(store, job.config))
            logger.info("%s was committed by another builder: verified and used", name)
        except SchemaVersionError:
            raise
        except DataError as error:
            logger.warning("%s: replaced by what was built now", error.what)
            store.put(name, content, only_if_absent=False)
    point_to(store, manifest)
    store.put(BUILD_FILE, _build_note(job, manifest), only_if_absent=False)
    return manifest


def judge(manifest: DataManifest, job: BuildJob) -> None:
    """Apply the policies on bad rows to a whole data set; its units may have been built under milder ones.

    Raises:
        BadRowError: a row that is not tolerated.
        DataError: too many bad rows, or nothing but bad rows.
    """
    data, counts = job.config.data, manifest.quarantined
    _judge_rows(counts, manifest.quarantine_files, rows=manifest.rows, store=job.store, data=data)
    warn_of_answers(counts, rows=manifest.rows, data=data)
    for source in manifest.sources:
        if not source.rows:
            logger.warning("%s holds no row at all", source.label)


def _judge_rows(counts: Mapping[str, int], files: Sequence[DataFile], *, rows: int, store: Store, data: DataConfig) -> None:
    listed = [file for file in files if file.rows]
    if any(forbids(code, data) for code in counts):
        for row in (row for file in listed for row in _bad_rows(store, file)):
            refuse_if_forbidden(row, data)
    rejected = (row for file in listed for row in _bad_rows(store, file) if not reason_code(row).startswith(PART_PREFIX))
    where = f"all are listed in {store.uri}/{listed[0].path}" if listed else ""
    more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
    check_share(counts, rows=rows, data=data, example=next(rejected, None), listed_in=where + more)


def warn_of_inexact_answers(records: Sequence[UnitRecord]) -> None:
    """Say so if rendering changes many of the target's answers."""
    answers, exact = sum(record.answers for record in records), sum(record.exact_answers for record in records)
    if exact < MIN_EXACT_FRAC * answers:
        logger.warning(
            "only %d of %d answered conversations are rendered as the very tokens that the target generated: "
            "look at the chat template's treatment of white space and reasoning",
            exact,
            answers,
        )


def assemble(records: Sequence[UnitRecord], job: BuildJob) -> DataManifest:
    """The manifest of some units."""
    config, recipe, edges = job.config, job.recipe, records[0].edges_tokens
    buckets = tuple(_summed(stats) for stats in zip(*(record.buckets for record in records), strict=True))
    return DataManifest(
        fingerprint=data_set_fingerprint(recipe.fingerprint, edges=edges, units=[record.source.unit for record in records]),
        recipe_fingerprint=recipe.fingerprint,
        sources=tuple(record.source for record in records),
        target_id=recipe.target_id,
        target_fingerprint=recipe.target_fingerprint,
        tokenizer_sha256=recipe.tokenizer_sha256,
        template_sha256=recipe.template_sha256,
        template_flags=config.data.template_flags,
        vocab_size=recipe.vocab_size,
        mask_token_id=recipe.mask_token_id,
        mask_token_uses=0,  # a unit with a single use is never finished
        on_policy=config.data.answers.regenerate,
        answer_sampling=_sampling(records, config),
        rows=sum(record.source.rows for record in records),
        samples=sum(bucket.samples for bucket in buckets),
        tokens=sum(bucket.tokens for bucket in buckets),
        supervised_tokens=sum(bucket.supervised_tokens for bucket in buckets),
        max_length_tokens=config.data.max_length_tokens,
        edges_tokens=edges,
        quarantined=_bad_counts(records),
        dropped_tokens=sum(record.dropped_tokens for record in records),
        buckets=buckets,
        prompt_files=tuple(record.prompts for record in records),
        quarantine_files=tuple(record.quarantine for record in records),
        shards=tuple(shard for record in records for shard in record.shards),
    )


def point_to(store: Store, manifest: DataManifest) -> None:
    """Let `manifest.json` be a copy of this version."""
    content = store.read(manifest_name(manifest.fingerprint))
    if store.size(MANIFEST_FILE) != len(content) or store.read(MANIFEST_FILE) != content:
        store.put(MANIFEST_FILE, content, only_if_absent=False)


def _sampling(records: Sequence[UnitRecord], config: Config) -> Mapping[str, Any]:
    answers = config.data.answers
    if not answers.regenerate:
        return {}
    return {
        "engine": answers.engine,
        "temperature": answers.temperature,
        "max_new_tokens": answers.max_new_tokens,
        "seed": config.data.seed if answers.temperature > 0 else None,
        "rendered_exactly_frac": sum(r.exact_answers for r in records) / max(sum(r.answers for r in records), 1),
    }


def _summed(stats: Sequence[BucketStats]) -> BucketStats:
    first = stats[0]
    return BucketStats(
        first.bucket,
        first.upper_edge_tokens,
        sum(own.samples for own in stats),
        sum(own.tokens for own in stats),
        sum(own.supervised_tokens for own in stats),
    )


def _bad_counts(records: Sequence[UnitRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.quarantined)
    return dict(sorted(counts.items()))


def _bad_rows(store: Store, file: DataFile) -> list[QuarantinedRow]:
    lines = store.read(file.path).decode("utf-8").split("\n")
    return [QuarantinedRow(**json.loads(line)) for line in lines if line]


def _write_preview(store: Store, manifest: DataManifest, tokenizer: PreTrainedTokenizerBase) -> None:
    samples: list[TokenizedSample] = []
    for bucket in range(len(manifest.edges_tokens)):
        wanted = PREVIEW_PER_BUCKET
        for shard in (shard for shard in manifest.shards if shard.bucket == bucket):
            with store.open(shard.path) as content, readable(Path(f"{store.uri}/{shard.path}")):
                columns = columns_of_table(pq.ParquetFile(content).read_row_group(0))
            samples += [columns.sample(row) for row in range(min(wanted, len(columns)))]
            wanted -= min(wanted, len(columns))
            if not wanted:
                break
    store.put(PREVIEW_FILE, preview_page(samples, manifest, tokenizer).encode("utf-8"), only_if_absent=False)


def _build_note(job: BuildJob, manifest: DataManifest) -> bytes:
    """When, where and with what a version was made: everything that a manifest must not say."""
    note = {
        "fingerprint": manifest.fingerprint,
        "committed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "location": job.location,
        "files": list(job.config.data.files),
        "python": platform.python_version(),
        **{name: version(name) for name in ("pyarrow", "numpy", "tokenizers", "transformers")},
    }
    return (json.dumps(note, indent=2) + "\n").encode()
