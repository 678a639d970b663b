"""Evaluation of a published drafter, of any layout, on a run's held-out prompts.

Invariant: the drafter is read with its own taps, block size and mask token, not the run's; only target, prompts and limits are
the run's, so its figures stand beside those of the run's own checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.run import Evaluation, evaluate_drafter, require_lossless
from dflash.evaluate.stored import writing_alone
from dflash.evaluate.write import write_evaluation
from dflash.model.export import import_drafter
from dflash.records import EvaluationResult
from dflash.stages.evaluate import label_with, open_bench, settings_of_call
from dflash.stages.export import check_same_target, stored_in, tables_of, target_at
from dflash.stages.run import Run

LABEL = "published"


def evaluate_published(run: Run, folder: Path, *, progress: Callable[[str, int, int], None]) -> EvaluationResult:
    """Measure a published drafter's acceptance on a run's held-out prompts.

    Args:
        run: an opened run; its data set must be prepared.
        folder: published drafter.
        progress: called with (label, done, total).

    Returns:
        The result; also written to `eval/published-<name of the folder>/`, or beside that with settings of this call alone.

    Raises:
        DrafterError, RunStateError: the folder is incomplete or belongs to another target.
        NotLosslessError: speculative and plain decoding disagree.
    """
    evaluation = measure_published(run, folder, progress=progress)
    label = label_with(f"{LABEL}-{folder.resolve().name}", settings_of_call(run))
    with writing_alone(run.paths.eval_dir):
        write_evaluation(evaluation, run.paths.eval_dir / label)
    require_lossless(evaluation.result)
    return evaluation.result


def measure_published(run: Run, folder: Path, *, progress: Callable[[str, int, int], None]) -> Evaluation:
    """The same without a trace: nothing is written, and what is not lossless is left to the caller."""
    info = target_at(run.config.target.location)
    published = import_drafter(folder, tables=tables_of(info, stored_in(folder)))
    check_same_target(published, info)
    alone = run.config.evaluate.model_copy(update={"baselines": ()})
    config = run.config.model_copy(update={"drafter": published.description.config, "evaluate": alone})
    bench = open_bench(dataclasses.replace(run, config=config))
    head = bench.target.head_weight
    candidate = drafter_candidate(
        bench.target,
        published.drafter.to(device=head.device, dtype=head.dtype).eval(),
        block_size=config.evaluate.block_size,
        mask_token_id=published.description.mask_token_id,
        label=LABEL,
        step=None,
    )
    return evaluate_drafter(
        bench.target, candidate, bench.prompts, evaluate=config.evaluate, stop_ids=bench.stop_ids, progress=progress
    )
