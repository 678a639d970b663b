"""Acceptance probes of a run's durable checkpoints: what the probing process does.

Invariant: a checkpoint is probed once; its line in `probe/probes.jsonl` is durable before the next one is begun, and a probe that
took its process down three times has failed. Only the weights are read, on a device of their own choice. Low priority belongs to
a process that probes and does nothing else (`give_way`): nobody can take it back, so whoever calls the stage keeps his own.
The hard decision: while a run goes on, the newest due checkpoint comes first, and of those behind it only the next few get their
turn: a process that cannot keep up would tell late what is wanted now, and hold up the verdict on every checkpoint it owes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import torch

from dflash.checkpoint import (
    BEST,
    ProbeWriter,
    best_checkpoint,
    current_states,
    hold_probes,
    list_checkpoints,
    load_drafter,
    outcomes,
    point_to,
    read_ledger,
    read_manifest,
    read_pointer,
    read_probes,
    remove_pointer,
    tries,
)
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import load_data
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.errors import CheckpointError, DflashError, RunStateError
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.probe import probe_drafter, probe_identity, shown_better
from dflash.evaluate.prompts import EvalPrompt, load_eval_prompts
from dflash.model.drafter import Drafter
from dflash.model.target import Target, load_target
from dflash.records import ProbeFigures, ProbeOutcome, ProbeRecord, RunPaths
from dflash.stages.run import Run, reopen_run
from dflash.train.probes import due_steps
from dflash.train.processes import die_with_parent

logger = logging.getLogger(__name__)

POLL_S = 0.5
MAX_TRIES = 3
BACKLOG = 4
"""Newest due checkpoints that are probed; older ones are passed over."""


def probe_stage(run_dir: Path, *, parent_pid: int | None, on_probe: Callable[[ProbeRecord], None]) -> list[ProbeRecord]:
    """Probe the checkpoints of a run that are due.

    Args:
        run_dir: the run's folder.
        parent_pid: of the process to work for until it dies, newest checkpoints first; None probes all that are due, and ends.
        on_probe: called with every outcome.

    Returns:
        The outcomes of this call.

    Raises:
        RunStateError: probes are off, or another process is at it.
        DflashError: the run's data, prompts or target cannot be loaded.
    """
    run = reopen_run(run_dir)
    if not run.config.probe.every_steps:
        raise RunStateError(f"run {run.paths.root} has no probes", remedy="set probe.every_steps in its config.yaml")
    if parent_pid is not None and not die_with_parent(parent_pid):
        return []
    torch.set_num_threads(run.config.probe.torch_threads)
    found: list[ProbeRecord] = []
    with hold_probes(run.paths) as writer:
        try:
            prober = _Prober(run, writer)
        except DflashError as error:
            give_up(run, writer, reason=error.what)
            raise
        while parent_pid is None or os.getppid() == parent_pid:
            step = prober.newest() if parent_pid is not None else prober.oldest()
            if step is not None:
                found.append(prober.probe(step))
                on_probe(found[-1])
            elif parent_pid is None:
                break
            else:
                time.sleep(POLL_S)
    return found


def give_way(run_dir: str | Path) -> None:
    """Give this process the niceness of a run's probes, for good; only where it was started for them.

    A process that is nicer already stays so: without privileges it could not come back, and it was meant to be.
    """
    niceness = reopen_run(run_dir).config.probe.niceness
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def give_up(run: Run, writer: ProbeWriter, *, reason: str) -> None:
    """Note for every due checkpoint without an outcome that its probe cannot even begin: the run's verdicts wait no longer."""
    known = outcomes(read_probes(run.paths.probes))
    for step in due_steps(run.paths, run.config):
        key = checkpoint_key(run.paths, step)
        if key not in known:
            writer.append(_record(key, "", "failed", reason))


def checkpoint_key(paths: RunPaths, step: int) -> tuple[int, int]:
    """(step, segment) of a checkpoint in place; segment -1 if it is being removed or is damaged, which its probe will say."""
    try:
        return step, read_manifest(paths.checkpoint(step)).segment
    except CheckpointError:
        return step, -1


def best_by_probes(run: Run, records: Sequence[ProbeRecord]) -> int | None:
    """Step of the best checkpoint in place by its probe; the one that is pointed to stays unless another is shown to be better."""
    directory = run.paths.checkpoints_dir
    return best_checkpoint(
        records,
        current_states(read_ledger(run.paths.ledger)),
        in_place=list_checkpoints(directory),
        best=read_pointer(directory, BEST),
        is_better=lambda new, old: shown_better(new, old, evaluate=run.config.evaluate),
    )


def point_to_best(run: Run, records: Sequence[ProbeRecord]) -> int | None:
    """Let the pointer `best` say which one it is, and return its step; without one there is no pointer."""
    directory = run.paths.checkpoints_dir
    before, best = read_pointer(directory, BEST), best_by_probes(run, records)
    if best is not None and best != before:
        logger.info("step-%d is the best checkpoint by its probe", best)
        point_to(directory, BEST, best)
    elif best is None and before is not None:
        remove_pointer(directory, BEST)
    return best


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all probes of a run share."""

    target: Target
    stop_ids: tuple[int, ...]
    mask_token_id: int


def probe_prompts(run: Run) -> tuple[list[EvalPrompt], int]:
    """The prompts of a run's probes, and the data set's mask token.

    They are held-out prompts that the final evaluation does not use, or where there are no more, its last ones; each of them once,
    since two probes are compared prompt by prompt and a repetition proves nothing.
    """
    config, wanted = run.config, run.config.probe.num_prompts
    more = config.evaluate.model_copy(update={"num_prompts": config.evaluate.num_prompts + wanted})
    pointer = read_data_pointer(run.paths)
    data = load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes")
    prompts = load_eval_prompts(
        config.model_copy(update={"evaluate": more}),
        tokenizer=load_tokenizer(config.target),
        manifest=data.manifest,
        store=data.store,
    )
    distinct: dict[tuple[int, ...], EvalPrompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.prompt_ids, prompt)
    return list(distinct.values())[-wanted:], data.manifest.mask_token_id


class _Prober:
    """Probes one run; the target is loaded for the first probe."""

    def __init__(self, run: Run, writer: ProbeWriter) -> None:
        self._run = run
        self._writer = writer
        self._identity = probe_identity(run.config, self._prompts)

    def oldest(self) -> int | None:
        """The oldest checkpoint that waits for its probe."""
        waiting = self._waiting()
        return waiting[0] if waiting else None

    def newest(self) -> int | None:
        """The newest one; those too far behind it are noted as passed over."""
        waiting = self._waiting()
        for step in waiting[:-BACKLOG]:
            reason = f"{BACKLOG} newer checkpoints were there before it could begin"
            self._writer.append(_record(self._key(step), self._identity, "skipped", reason))
        return waiting[-1] if waiting else None

    def _waiting(self) -> list[int]:
        records = read_probes(self._run.paths.probes)
        known = {(r.step, r.segment) for r in records if r.outcome != "begun" and r.prompts_sha256 in ("", self._identity)}
        return [step for step in due_steps(self._run.paths, self._run.config) if self._key(step) not in known]

    def probe(self, step: int) -> ProbeRecord:
        """Probe one checkpoint; whatever is wrong with it becomes its outcome."""
        key = self._key(step)
        begun = tries(read_probes(self._run.paths.probes), key, prompts_sha256=self._identity)
        if begun >= MAX_TRIES:
            record = _record(key, self._identity, "failed", f"its process died {begun} times")
        else:
            self._writer.append(_record(key, self._identity, "begun", ""))
            record = self._outcome(key)
        self._writer.append(record)
        return record

    def _outcome(self, key: tuple[int, int]) -> ProbeRecord:
        step = key[0]
        try:
            return _record(key, self._identity, "measured", "", self._figures(step))
        except CheckpointError as error:
            gone = not self._run.paths.checkpoint(step).is_dir()
            return _record(key, self._identity, "skipped" if gone else "failed", "it was removed" if gone else error.what)
        except (DflashError, RuntimeError, OSError) as error:  # RuntimeError: what torch raises when memory is short
            logger.exception("the probe of step-%d failed", step)
            return _record(key, self._identity, "failed", f"{type(error).__name__}: {error}")

    def _figures(self, step: int) -> ProbeFigures:
        config, bench = self._run.config, self._bench
        _, weights = load_drafter(self._run.paths.checkpoint(step))
        drafter = Drafter(config.drafter, target_hidden_size=bench.target.info.hidden_size)
        drafter.load_state_dict(weights)
        candidate = drafter_candidate(
            bench.target,
            drafter.to(bench.target.device).eval(),
            block_size=config.evaluate.block_size,
            mask_token_id=bench.mask_token_id,
            label="probe",
            step=step,
        )
        return probe_drafter(
            bench.target,
            candidate.proposer,
            self._prompts,
            probe=config.probe,
            evaluate=config.evaluate,
            stop_ids=bench.stop_ids,
        )

    @cached_property
    def _prompts(self) -> list[EvalPrompt]:
        prompts, self._mask_token_id = probe_prompts(self._run)
        return prompts

    @cached_property
    def _bench(self) -> _Bench:
        config = self._run.config
        device = torch.device(config.probe.device)
        target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=device)
        return _Bench(target, stop_token_ids(load_tokenizer(config.target), config.target), self._mask_token_id)

    def _key(self, step: int) -> tuple[int, int]:
        return checkpoint_key(self._run.paths, step)


def _record(
    key: tuple[int, int], identity: str, outcome: ProbeOutcome, reason: str, figures: ProbeFigures | None = None
) -> ProbeRecord:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return ProbeRecord(key[0], key[1], identity, outcome=outcome, at=at, reason=reason, figures=figures)
