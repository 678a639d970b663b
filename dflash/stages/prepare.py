"""Stages 1 and 2: the data set (with answers written by the target) and the batch plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.config import Config
from dflash.data.plan import prepare_plan
from dflash.data.prepare import PreparedData, prepare_data
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.model.generate import generate_batch
from dflash.model.target import Target, load_target
from dflash.model.target_info import check_drafter_fits, read_target_info
from dflash.records import PlanManifest
from dflash.stages.run import Run, note_reused
from dflash.train.runs import prepare_run

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DataStage:
    """What the data stage produced.

    Attributes:
        dir: folder of the data set.
        reused: an identical data set was there already.

    """

    dir: Path
    fingerprint: str
    samples: int
    tokens: int
    supervised_tokens: int
    samples_per_bucket: tuple[int, ...]
    quarantined: int
    reused: bool


@dataclass(frozen=True, slots=True)
class PlanStage:
    """What the plan stage produced."""

    manifest: PlanManifest
    reused: bool


def prepare_stage(run: Run, *, progress: Progress) -> DataStage:
    """Build (or find) the data set of a run and bind the run to it.

    The cheap check comes first: the target's shape against the drafter's.
    """
    config = run.config
    prepared = build_data(config, progress=progress)
    prepare_run(config, run.paths, data_dir=prepared.dir, fingerprint=prepared.manifest.fingerprint)
    if prepared.reused and not run.paths.log.exists():  # a resumed run finds its own data set again: nothing to tell
        note_reused(run.paths, f"data set {prepared.dir.name} ({prepared.manifest.samples} samples)")
    return describe_data(prepared)


def build_data(config: Config, *, progress: Progress) -> PreparedData:
    """Build (or find) the data set that a configuration describes; needs no run."""
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    tokenizer = load_tokenizer(config.target)
    generate = None
    if config.data.answers.regenerate:
        generate = _LazyGenerator(config, stop_token_ids(tokenizer, config.target)).generate
    return prepare_data(
        config,
        tokenizer=tokenizer,
        vocab_size=info.vocab_size,
        target_fingerprint=info.fingerprint,
        generate=generate,
        progress=progress,
    )


def describe_data(prepared: PreparedData) -> DataStage:
    """The data set in numbers."""
    manifest = prepared.manifest
    return DataStage(
        dir=prepared.dir,
        fingerprint=manifest.fingerprint,
        samples=manifest.samples,
        tokens=manifest.tokens,
        supervised_tokens=manifest.supervised_tokens,
        samples_per_bucket=tuple(bucket.samples for bucket in manifest.buckets),
        quarantined=sum(manifest.quarantined.values()),
        reused=prepared.reused,
    )


def plan_stage(run: Run, data: DataStage) -> PlanStage:
    """Pack the batch plan of a run, or keep the one it has."""
    planned = prepare_plan(run.config, data.dir, run.paths.plan_dir)
    return PlanStage(manifest=planned.plan.manifest, reused=planned.reused)


class _LazyGenerator:
    """Loads the target only when an answer is really missing."""

    def __init__(self, config: Config, stop_ids: tuple[int, ...]) -> None:
        self._config = config
        self._stop_ids = stop_ids
        self._target: Target | None = None

    def generate(self, prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        if self._target is None:
            torch.set_num_threads(self._config.cluster.torch_threads)
            device = torch.device(self._config.cluster.device)
            layers = self._config.drafter.target_layer_ids
            self._target = load_target(self._config.target, target_layer_ids=layers, device=device)
            logger.info("the target writes the answers itself (%d at a time)", self._config.data.answers.batch_size)
        answers = self._config.data.answers
        return generate_batch(
            self._target,
            prompts,
            keys=keys,
            max_new_tokens=answers.max_new_tokens,
            temperature=answers.temperature,
            seed=self._config.data.seed,
            stop_ids=self._stop_ids,
        )
