"""Build a data set, or find the one that is there: the one entry to the room's first half.

The steps, each of which another runner may map over its own workers: describe the sources, plan the units, (with measured
edges: stage the units and fix the edges,) build the units, commit. This module runs them here, one unit after the other,
each of them tokenized by `data.workers` processes.

Where things are: `<data.store, or run.root/data>/<recipe>/`; versions of one data set that differ in their files share that
folder and every unit they have in common. One build at a time in one local store: a second process waits, and then usually
finds everything ready. On S3 builders may race: see `commit`.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from dflash.config import Config
from dflash.data.answers import Answerer
from dflash.data.bad_rows import check_share, refuse_if_forbidden
from dflash.data.commit import commit, fix_edges, judge, known_edges, point_to
from dflash.data.fingerprint import answers_fingerprint, data_set_fingerprint, make_recipe
from dflash.data.manifest import PREVIEW_FILE, Verify, manifest_name, read_manifest
from dflash.data.put import SCRATCH_FOLDER
from dflash.data.sources import Progress, UnitSpec, describe_sources, plan_units, survey_source
from dflash.data.tokenizer import resolve_mask_token_id
from dflash.data.units import STAGING, BuildJob, build_unit, reuse_policy, stage_unit
from dflash.errors import DataError, SchemaVersionError, StorageError
from dflash.records import DataManifest
from dflash.storage import Store, open_store

__all__ = [
    "PreparedData",
    "check_before_asking",
    "exclusive",
    "find_data",
    "load_data",
    "open_job",
    "plan_build",
    "prepare_data",
    "read_preview",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A complete data set.

    Attributes:
        location: its folder, an absolute path or `s3://...`; other versions of it lie in the same folder.
        fingerprint: which version.
        reused: it was there already.
    """

    location: str
    fingerprint: str
    manifest: DataManifest
    reused: bool

    @property
    def store(self) -> Store:
        """Its folder."""
        return open_store(self.location)


def load_data(location: str | Path, *, fingerprint: str | None, verify: Verify) -> PreparedData:
    """Open a complete data set.

    Args:
        location: its folder.
        fingerprint: which version; the newest if None.
        verify: which hashes are compared; presence and sizes always are.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: incomplete or damaged.
    """
    store = open_store(location)
    manifest = read_manifest(store, fingerprint=fingerprint, verify=verify)
    return PreparedData(store.uri, manifest.fingerprint, manifest, reused=True)


def read_preview(data: PreparedData) -> str | None:
    """The page that shows samples of the newest version, if it is there."""
    if data.store.size(PREVIEW_FILE) is None:
        return None
    return data.store.read(PREVIEW_FILE).decode("utf-8")


def prepare_data(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    target_fingerprint: str,
    answerer: Answerer | None,
    progress: Progress,
) -> PreparedData:
    """Build the data set that a configuration describes, unless an identical one is there.

    Args:
        config: its `data` section, the target's tokens and `run.root` matter.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.
        target_fingerprint: identity of the target that writes the answers.
        answerer: the target; needed if `data.answers.regenerate` and answers are missing.
        progress: called with (label, done, total).

    Raises:
        DataError: rows, tokens or the template cannot be used; finished units and the journals of answers are kept.
        StorageError: a source file is missing or changes while it is read, or the store cannot be used.
        TargetError: the mask token is not usable.
    """
    job, units = plan_build(
        config, tokenizer=tokenizer, vocab_size=vocab_size, target_fingerprint=target_fingerprint, progress=progress
    )
    with exclusive(job):
        found = find_data(job, units)
        if found is not None:
            return found
        if config.data.answers.regenerate:
            check_before_asking(job, units)
        edges = known_edges(job)
        if edges is None:
            staged = [
                stage_unit(spec, job=job, tokenizer=tokenizer, answerer=answerer, progress=own)
                for spec, own in _with_progress(units, progress)
            ]
            edges = fix_edges(job, staged)
        records = [
            build_unit(spec, job=job, edges=edges, tokenizer=tokenizer, answerer=answerer, progress=own)
            for spec, own in _with_progress(units, progress)
        ]
        manifest = commit(records, job=job, tokenizer=tokenizer)
    return PreparedData(job.store.uri, manifest.fingerprint, manifest, reused=False)


def plan_build(
    config: Config, *, tokenizer: PreTrainedTokenizerBase, vocab_size: int, target_fingerprint: str, progress: Progress
) -> tuple[BuildJob, list[UnitSpec]]:
    """What there is to build, without building anything.

    Raises:
        StorageError: a source file is missing.
        TargetError: the mask token is not usable.
        DataError: the same file comes twice.
    """
    job = open_job(config, tokenizer=tokenizer, vocab_size=vocab_size, target_fingerprint=target_fingerprint)
    return job, plan_units(config.data, describe_sources(config.data, progress=progress), job.recipe)


def open_job(config: Config, *, tokenizer: PreTrainedTokenizerBase, vocab_size: int, target_fingerprint: str) -> BuildJob:
    """What all units of a data set share, before its sources are known.

    Raises:
        TargetError: the mask token is not usable.
    """
    mask_token_id = resolve_mask_token_id(config.target, tokenizer, vocab_size=vocab_size)
    recipe = make_recipe(
        config, tokenizer=tokenizer, target_fingerprint=target_fingerprint, vocab_size=vocab_size, mask_token_id=mask_token_id
    )
    local = Path(config.run.root) / "data"
    answers = answers_fingerprint(config, tokenizer=tokenizer, target_fingerprint=target_fingerprint)
    return BuildJob(
        config=config,
        recipe=recipe,
        location=f"{open_store(config.data.store or local).uri}/{recipe.fingerprint[:16]}",
        journals=str((local / "answers" / answers[:16]).absolute()),
    )


def find_data(job: BuildJob, units: Sequence[UnitSpec]) -> PreparedData | None:
    """The data set of these units if it is there, complete and undamaged; None if it must be built (or mended).

    Raises:
        SchemaVersionError: it was written with another schema version.
        DataError: it was built under policies on bad rows that were milder than the present ones.
    """
    store, edges = job.store, known_edges(job)
    if edges is None:
        return None
    fingerprint = data_set_fingerprint(job.recipe.fingerprint, edges=edges, units=[spec.unit for spec in units])
    if store.size(manifest_name(fingerprint)) is None:
        return None
    try:
        manifest = read_manifest(store, fingerprint=fingerprint, verify=reuse_policy(store, job.config))
    except SchemaVersionError:
        raise
    except DataError as error:
        logger.warning("%s; the data set is mended", error.what)
        return None
    judge(manifest, job)
    point_to(store, manifest)
    logger.info("data set %s is unchanged and complete: reused", store.uri)
    return PreparedData(store.uri, fingerprint, manifest, reused=True)


def exclusive(job: BuildJob) -> AbstractContextManager[None]:
    """Be the one builder of a job's data set, if its store is local; see `hold_store`."""
    return hold_store(job.store)


@contextmanager
def hold_store(store: Store) -> Iterator[None]:
    """Be the one builder of a data set in a local store; the kernel releases the lock however the process ends.

    What killed builds left unfinished goes first: nobody else can be at work on it. Remote stores have no lock.
    """
    folder = store.local_root
    if folder is None:
        yield
        return
    with _lock_file(folder.parent) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process builds data in %s: waiting for it", folder.parent)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_scratch(folder)
        yield
        _remove_scratch(folder)
        staging = folder / STAGING
        if staging.exists() and not any(staging.glob("units/*.json")):
            shutil.rmtree(staging)


def _lock_file(root: Path) -> TextIO:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return (root / ".lock").open("w")
    except OSError as error:
        raise StorageError(
            f"cannot keep data sets in {root}: {error.strerror}", remedy="give data.store or run.root a folder that can be written"
        ) from error


def _remove_scratch(folder: Path) -> None:
    for scratch in (folder / SCRATCH_FOLDER, folder / STAGING / SCRATCH_FOLDER):
        if scratch.exists():
            shutil.rmtree(scratch)


def check_before_asking(job: BuildJob, units: Sequence[UnitSpec]) -> None:
    """Read all sources and judge their bad rows before the target works for hours on the good ones.

    Raises:
        BadRowError: a bad row, where none is tolerated.
        DataError: too many of them.
    """
    surveys = [survey_source(job.config.data, spec.source, limit=spec.limit) for spec in units]
    example = next((survey.first_bad for survey in surveys if survey.first_bad is not None), None)
    if example is not None:
        refuse_if_forbidden(example, job.config.data)
    counts: Counter[str] = Counter()
    for survey in surveys:
        counts.update(survey.quarantined)
    rows = sum(survey.rows for survey in surveys)
    check_share(
        dict(sorted(counts.items())), rows=rows, data=job.config.data, example=example, listed_in="nothing was asked or built yet"
    )


def _with_progress(units: Sequence[UnitSpec], progress: Progress) -> Iterator[tuple[UnitSpec, Progress]]:
    """Each unit with a progress that counts rows through all units."""
    total, before = sum(spec.rows_expected for spec in units), 0
    for spec in units:

        def own(label: str, done: int, of: int, *, before: int = before) -> None:
            if label == "answers":  # counted in answers, for which the rows of other units mean nothing
                progress(label, done, of)
            else:
                progress(label, min(before + done, total), total)

        yield spec, own
        before += spec.rows_expected
    progress("tokenize", total, total)
