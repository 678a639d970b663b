"""Stages 1 and 2: the data set (with answers written by the target) and the batch plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from dflash.config import Config
from dflash.data.manifest import PREVIEW_FILE
from dflash.data.plan import load_plan, prepare_plan
from dflash.data.plan_picture import draw_plan
from dflash.data.plan_stats import PlanStats, plan_stats
from dflash.data.prepare import PreparedData, find_data, plan_build, prepare_data
from dflash.data.reader import SampleStore
from dflash.data.tokenizer import load_tokenizer
from dflash.errors import ConfigError
from dflash.model.target_info import check_drafter_fits, read_target_info
from dflash.records import BucketStats, PlanManifest
from dflash.stages.answerer import open_answerer
from dflash.stages.run import Run, note_reused
from dflash.storage import atomic_write_bytes
from dflash.train.runs import prepare_run

Progress = Callable[[str, int, int], None]

PICTURE_FILE = "plan.png"
"""In the plan's folder."""


@dataclass(frozen=True, slots=True)
class DataStage:
    """What the data stage produced.

    Attributes:
        location: folder of the data set, an absolute path or `s3://...`.
        fingerprint: which version of it.
        buckets: what each length bucket holds.
        preview: address of the page that shows samples.
        reused: an identical data set was there already.
    """

    location: str
    fingerprint: str
    samples: int
    tokens: int
    supervised_tokens: int
    buckets: tuple[BucketStats, ...]
    quarantined: int
    preview: str
    reused: bool


@dataclass(frozen=True, slots=True)
class PlanStage:
    """What the plan stage produced."""

    manifest: PlanManifest
    reused: bool


@dataclass(frozen=True, slots=True)
class PlanView:
    """One epoch of a run's plan, for people.

    Attributes:
        png: its picture; `file`: where that is kept.
    """

    stats: PlanStats
    png: bytes
    file: str


def prepare_stage(run: Run, *, progress: Progress) -> DataStage:
    """Build (or find) the data set of a run and bind the run to it.

    The cheap check comes first: the target's shape against the drafter's.
    """
    return bind_data(run, build_data(run.config, progress=progress))


def bind_data(run: Run, prepared: PreparedData) -> DataStage:
    """Let a run train on a data set from now on."""
    prepare_run(run.config, run.paths, location=prepared.location, fingerprint=prepared.fingerprint)
    if prepared.reused and not run.paths.log.exists():  # a resumed run finds its own data set again: nothing to tell
        note_reused(run.paths, f"data set {prepared.fingerprint[:16]} ({prepared.manifest.samples} samples)")
    return describe_data(prepared)


def build_data(config: Config, *, progress: Progress) -> PreparedData:
    """Build (or find) the data set that a configuration describes, in this process and its own; needs no run.

    Raises:
        ConfigError: the data set is not there yet, and the configuration wants it built on a cluster.
        DflashError: as `prepare_data`.
    """
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    tokenizer = load_tokenizer(config.target)
    if config.data.runner != "local":
        job, units = plan_build(
            config, tokenizer=tokenizer, vocab_size=info.vocab_size, target_fingerprint=info.fingerprint, progress=progress
        )
        found = find_data(job, units)
        if found is None:
            raise ConfigError(
                f"data.runner is {config.data.runner!r}, the data set is not built yet, and only the flow reaches the workers",
                remedy="run `python -m flows.prepare --config ...` first, or build it here with data.runner=local "
                "(the result is the same, byte for byte)",
            )
        return found
    with ExitStack() as stack:
        answerer = stack.enter_context(open_answerer(config, tokenizer)) if config.data.answers.regenerate else None
        return prepare_data(
            config,
            tokenizer=tokenizer,
            vocab_size=info.vocab_size,
            target_fingerprint=info.fingerprint,
            answerer=answerer,
            progress=progress,
        )


def describe_data(prepared: PreparedData) -> DataStage:
    """The data set in numbers."""
    manifest = prepared.manifest
    return DataStage(
        location=prepared.location,
        fingerprint=manifest.fingerprint,
        samples=manifest.samples,
        tokens=manifest.tokens,
        supervised_tokens=manifest.supervised_tokens,
        buckets=manifest.buckets,
        quarantined=sum(manifest.quarantined.values()),
        preview=f"{prepared.location}/{PREVIEW_FILE}",
        reused=prepared.reused,
    )


def plan_stage(run: Run, data: DataStage) -> PlanStage:
    """Pack the batch plan of a run, or keep the one it has."""
    with SampleStore(data.location, fingerprint=data.fingerprint, reader=run.config.data.reader) as samples:
        planned = prepare_plan(run.config, samples, run.paths.plan_dir, data_fingerprint=data.fingerprint)
    return PlanStage(manifest=planned.plan.manifest, reused=planned.reused)


def view_plan(run: Run, data: DataStage) -> PlanView:
    """Look at the first epoch of a run's plan, and keep the picture beside the plan.

    Raises:
        DataError: there is no plan, or it is damaged.
    """
    plan = load_plan(run.paths.plan_dir)
    with SampleStore(data.location, fingerprint=data.fingerprint, reader=run.config.data.reader) as samples:
        stats = plan_stats(samples.lengths, plan.epochs[0], edges=samples.manifest.edges_tokens)
    png, file = draw_plan(stats, plan.manifest), run.paths.plan_dir / PICTURE_FILE
    atomic_write_bytes(file, png)
    return PlanView(stats, png, str(file))
