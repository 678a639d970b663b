"""The data set built by many workers: the same steps as `prepare_data`, each one's pieces carried out wherever workers are.

Invariant: the manifest is the local one, byte for byte: a piece of work gives the same bytes in any process, and the order of
the results is that of the sources, never that in which workers finish.

This module knows no engine: who carries the pieces out comes in as an argument. Only the builder commits, and it alone holds
the lock of a local store. The price: files are hashed by the workers, but bad rows are counted, lengths gathered and the
preview drawn by the builder alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from dflash.config import Config
from dflash.data.commit import commit, fix_edges, known_edges
from dflash.data.prepare import PreparedData, check_before_asking, exclusive, find_data, open_job
from dflash.data.sources import Progress, SourceFile, describe_generator, plan_units, source_uris
from dflash.data.tokenizer import load_tokenizer
from dflash.data.work import HashWork, UnitWork, Work
from dflash.model.target_info import check_drafter_fits, read_target_info
from dflash.records import UnitRecord
from dflash.stages.answerer import open_answerer
from dflash.stages.prepare import DataStage, bind_data
from dflash.stages.run import Run

ResultT = TypeVar("ResultT")


class Spread(Protocol):
    """Whoever carries pieces of work out."""

    def __call__(self, work: Sequence[Work[ResultT]]) -> Iterator[tuple[int, ResultT]]:
        """Give (place in `work`, result) of each piece as it is finished; raise what a piece raises."""


def spread_stage(run: Run, *, spread: Spread, progress: Progress) -> DataStage:
    """`prepare_stage`, the data set's files shared out over workers."""
    return bind_data(run, build_spread(run.config, spread=spread, progress=progress))


def build_spread(config: Config, *, spread: Spread, progress: Progress) -> PreparedData:
    """Build (or find) the data set that a configuration describes, its files shared out over workers.

    Args:
        config: the whole configuration. Workers need the same paths: sources, store and target must be within their reach.
        spread: carries the pieces of work out.
        progress: called with (label, done, total).

    Raises:
        DflashError: as `prepare_data`; units that were finished are kept.
    """
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    tokenizer = load_tokenizer(config.target)
    job = open_job(config, tokenizer=tokenizer, vocab_size=info.vocab_size, target_fingerprint=info.fingerprint)
    units = plan_units(config.data, _describe(config, spread, progress), job.recipe)
    worker_job = replace(job, config=_for_workers(config))
    opens = open_answerer if config.data.answers.regenerate else None

    def over_units(label: str, edges: tuple[int, ...] | None) -> list[UnitRecord]:
        work = [UnitWork(worker_job, spec, edges, opens) for spec in units]
        return _in_order(spread, work, label=label, progress=progress)

    with exclusive(job):
        found = find_data(job, units)
        if found is not None:
            return found
        if config.data.answers.regenerate:
            check_before_asking(job, units)
        edges, staged = known_edges(job), False
        if edges is None:
            edges, staged = fix_edges(job, over_units("tokenize", None)), True
        records = over_units("bucket" if staged else "tokenize", edges)
        manifest = commit(records, job=job, tokenizer=tokenizer)
    return PreparedData(job.store.uri, manifest.fingerprint, manifest, reused=False)


def _describe(config: Config, spread: Spread, progress: Progress) -> list[SourceFile]:
    uris = [_reachable(uri) for uri in source_uris(config.data)]
    if not uris:
        return [describe_generator(config.data)]
    return _in_order(spread, [HashWork(uri) for uri in uris], label="hash files", progress=progress)


def _in_order(spread: Spread, work: Sequence[Work[ResultT]], *, label: str, progress: Progress) -> list[ResultT]:
    done, total = 0, sum(piece.rows for piece in work)
    results: dict[int, ResultT] = {}
    progress(label, 0, total)
    for place, result in spread(work):
        results[place] = result
        done += work[place].rows
        progress(label, done, total)
    return [results[place] for place in range(len(work))]


def _for_workers(config: Config) -> Config:
    """The configuration that a worker works by: one process, and paths that do not hang on its working directory."""
    data = config.data.model_copy(update={"runner": "local", "runner_address": None, "workers": 1})
    path = config.target.path
    target = config.target.model_copy(update={"path": _reachable(path) if Path(path).exists() else path})
    return config.model_copy(update={"data": data, "target": target})


def _reachable(uri: str) -> str:
    return uri if "://" in uri else str(Path(uri).absolute())
