"""Building one unit: a source becomes Parquet shards, prompt hashes, a quarantine file and, last, its record.

All or nothing: without its record a unit does not exist, and what a killed build left (shards that no record names, scratch
files) is never read. A unit whose record is there and whose files are as recorded is not built again, so a build goes on
where it stopped, file by file, and a data set grows without touching what it has.

`build_unit` is a plain function of picklable arguments: it runs here, in a process of a cluster, or twice at once, and gives
the same bytes. With measured bucket edges `stage_unit` comes first: it tokenizes into one bucket below `staging/`; once the
edges are known, `build_unit` deals the same rows out. Nothing is tokenized twice; the price is one more writing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dflash.config import Config
from dflash.data.answers import Answerer
from dflash.data.buckets import count_lengths
from dflash.data.columns import SampleColumns
from dflash.data.fingerprint import Recipe
from dflash.data.manifest import Verify, find_damage
from dflash.data.parquet import readable
from dflash.data.put import scratch_folder
from dflash.data.shards import columns_of_table, unit_part
from dflash.data.sources import Progress, UnitSpec, describe_file
from dflash.data.tokenize import TokenizeJob
from dflash.data.unit_rows import Answering, tokenized_batches
from dflash.data.unit_write import BucketWriter, copy_data_file, write_unit
from dflash.errors import DataError, StorageError
from dflash.records import ShardEntry, UnitRecord, from_sealed_json, to_sealed_json
from dflash.storage import Store, open_store

logger = logging.getLogger(__name__)

STAGING = "staging"


@dataclass(frozen=True, slots=True)
class BuildJob:
    """What all units of a data set share; picklable.

    Attributes:
        config: the whole configuration; its data section matters.
        location: address of the data set's folder.
        journals: local folder of the journals of answers.
    """

    config: Config
    recipe: Recipe
    location: str
    journals: str

    @property
    def store(self) -> Store:
        """The data set's folder."""
        return open_store(self.location)

    @property
    def staging(self) -> BuildJob:
        """The same job, one bucket, below `staging/`."""
        return replace(self, location=f"{self.location}/{STAGING}")


def build_unit(
    spec: UnitSpec,
    *,
    job: BuildJob,
    edges: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    answerer: Answerer | None,
    progress: Progress,
) -> UnitRecord:
    """Build one unit, or find it built.

    Args:
        spec: which source.
        job: what all units share.
        edges: upper edges of the buckets.
        tokenizer: the one that the recipe was made with.
        answerer: the target; needed if `data.answers.regenerate`.
        progress: called with (label, done, total).

    Raises:
        DataError: a row that no policy tolerates, or a token that cannot be used; nothing but orphans is left behind.
        StorageError: source or store cannot be used, or the source changed while it was read.
    """
    record = find_unit(spec, job=job, edges=edges)
    measured = isinstance(job.config.data.bucket_edges_tokens, str)
    staged = find_unit(spec, job=job.staging, edges=_one_bucket(job)) if measured else None
    if record is None and staged is not None:
        record = _dealt_out(spec, staged, job=job, edges=edges, progress=progress)
        if record is not None:
            job.store.put(record_name(spec.unit), _record_bytes(record), only_if_absent=False)
    if record is None:
        record = _tokenized(spec, job=job, edges=edges, tokenizer=tokenizer, answerer=answerer, progress=progress)
        job.store.put(record_name(spec.unit), _record_bytes(record), only_if_absent=False)
    if staged is not None:
        _remove_unit(job.staging.store, staged)
    elif measured:
        # A builder that was slower may have recorded what a faster one had removed already.
        job.staging.store.delete(record_name(spec.unit))
    return record


def stage_unit(
    spec: UnitSpec, *, job: BuildJob, tokenizer: PreTrainedTokenizerBase, answerer: Answerer | None, progress: Progress
) -> UnitRecord:
    """Tokenize one unit into a single bucket below `staging/`, or find that done; arguments and errors as in `build_unit`."""
    edges = _one_bucket(job)
    record = find_unit(spec, job=job.staging, edges=edges)
    if record is None:
        record = _tokenized(spec, job=job.staging, edges=edges, tokenizer=tokenizer, answerer=answerer, progress=progress)
        job.staging.store.put(record_name(spec.unit), _record_bytes(record), only_if_absent=False)
    return record


def staged_lengths(job: BuildJob, staged: Sequence[UnitRecord]) -> NDArray[np.int64]:
    """[L+1] samples of each length in staged units, L = max_length_tokens.

    Raises:
        DataError: a staged file is damaged.
    """
    longest = job.config.data.max_length_tokens
    counts = np.zeros(longest + 1, np.int64)
    for shard in (shard for record in staged for shard in record.shards):
        for table in _row_groups(job.staging.store, shard, columns=["length"]):
            counts += count_lengths(table["length"].to_numpy(), longest=longest)
    return counts


def find_unit(spec: UnitSpec, *, job: BuildJob, edges: Sequence[int]) -> UnitRecord | None:
    """The record of a unit that is built, complete and undamaged; None if it must be built."""
    store, name = job.store, record_name(spec.unit)
    if store.size(name) is None:
        return None
    try:
        record = from_sealed_json(UnitRecord, store.read(name), origin=f"{store.uri}/{name}")
    except DataError as error:
        logger.warning("%s; %s is built again", error.what, spec.source.label)
        return None
    if (record.recipe_fingerprint, record.source.unit, record.edges_tokens) != (job.recipe.fingerprint, spec.unit, tuple(edges)):
        return None
    damage = find_damage(store, (*record.shards, record.prompts, record.quarantine), verify=reuse_policy(store, job.config))
    if damage is not None:
        logger.warning("%s; %s is built again", damage, spec.source.label)
        return None
    return record


def reuse_policy(store: Store, config: Config) -> Verify:
    """How files are looked at before they are used again: local ones are all hashed, remote ones as the reader is told to."""
    return "full" if store.local_root is not None else config.data.reader.verify


def record_name(unit: str) -> str:
    """Name of a unit's record in the data set's store."""
    return f"units/{unit_part(unit)}.json"


def _one_bucket(job: BuildJob) -> tuple[int, ...]:
    return (job.config.data.max_length_tokens,)


def _tokenized(
    spec: UnitSpec,
    *,
    job: BuildJob,
    edges: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    answerer: Answerer | None,
    progress: Progress,
) -> UnitRecord:
    data, recipe = job.config.data, job.recipe
    tokenizing = TokenizeJob(tokenizer, data, spec.source.label, recipe.mask_token_id, recipe.vocab_size)
    answering = None
    if answerer is not None:
        answering = Answering(answerer, Path(job.journals) / f"{spec.journal}.jsonl", progress)
    with scratch_folder(job.store) as scratch, closing(tokenized_batches(spec, tokenizing, answering=answering)) as batches:
        record = write_unit(
            spec,
            batches,
            store=job.store,
            scratch=scratch,
            edges=edges,
            recipe_fingerprint=recipe.fingerprint,
            data=data,
            # Where the target answers, its own progress is the one that tells how long it takes.
            progress=progress if answering is None else _silent,
        )
    uri = spec.source.uri
    if uri is not None and describe_file(uri).sha256 != spec.source.sha256:
        raise StorageError(f"{uri} changed while it was read", remedy="prepare the data again when nobody writes the file")
    return record


def _silent(_label: str, _done: int, _total: int) -> None:
    """Someone else reports."""


def _dealt_out(spec: UnitSpec, staged: UnitRecord, *, job: BuildJob, edges: Sequence[int], progress: Progress) -> UnitRecord | None:
    """A staged unit in its buckets; None if another builder was faster and has removed the staged rows, record and all."""
    try:
        return _dealt_out_now(spec, staged, job=job, edges=edges, progress=progress)
    except (StorageError, DataError):
        if job.staging.store.size(record_name(spec.unit)) is not None:
            raise
        logger.info("%s was finished by another builder", spec.source.label)
        return find_unit(spec, job=job, edges=edges)


def _dealt_out_now(spec: UnitSpec, staged: UnitRecord, *, job: BuildJob, edges: Sequence[int], progress: Progress) -> UnitRecord:
    store, staging, stem = job.store, job.staging.store, f"units/{unit_part(spec.unit)}"
    with scratch_folder(store) as scratch:
        writer = BucketWriter(store, scratch, unit=spec.unit, edges=edges, data=job.config.data)
        try:
            for shard in staged.shards:
                for samples in _read_shard(staging, shard):
                    writer.add(samples)
                    progress("bucket", writer.samples, staged.source.samples)
            shards = writer.close()
        except BaseException:
            writer.abort()
            raise
        return replace(
            staged,
            edges_tokens=tuple(edges),
            buckets=writer.stats,
            shards=shards,
            prompts=copy_data_file(staged.prompts, f"{stem}.prompts", source=staging, target=store, scratch=scratch),
            quarantine=copy_data_file(staged.quarantine, f"{stem}.quarantine", source=staging, target=store, scratch=scratch),
        )


def _read_shard(store: Store, shard: ShardEntry) -> Iterator[SampleColumns]:
    for table in _row_groups(store, shard, columns=None):
        yield columns_of_table(table)


def _row_groups(store: Store, shard: ShardEntry, *, columns: list[str] | None) -> Iterator[pa.Table]:
    where = Path(f"{store.uri}/{shard.path}")
    with store.open(shard.path) as content, readable(where):
        file = pq.ParquetFile(content, page_checksum_verification=True)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def _remove_unit(store: Store, record: UnitRecord) -> None:
    """Remove a staged unit, its record first."""
    store.delete(record_name(record.source.unit))
    for name in (*(shard.path for shard in record.shards), record.prompts.path, record.quarantine.path):
        store.delete(name)


def _record_bytes(record: UnitRecord) -> bytes:
    return to_sealed_json(record).encode()
