"""The sweep of a run's newest drafter over decoding settings, and the setting that it found to be the best on this machine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from dflash.checkpoint import load_drafter
from dflash.errors import EvaluationError, NotLosslessError
from dflash.evaluate.candidates import Candidate, drafter_candidate
from dflash.evaluate.hardware import describe_machine
from dflash.evaluate.stored import SWEEP_FILE, SWEEP_PICTURE, SWEEP_TEXT, newest_sweep, writing_alone
from dflash.evaluate.sweep import best_cell, run_sweep, swept_block_sizes
from dflash.evaluate.sweep_plot import draw_sweep
from dflash.evaluate.sweep_text import setting_text, sweep_table
from dflash.model.drafter import Drafter
from dflash.records import RunPaths, SweepResult, from_json, to_json
from dflash.stages.evaluate import EvaluationBench, label_with, open_bench, settings_of_call
from dflash.stages.export import newest_checkpoint
from dflash.stages.rivals import check_names
from dflash.stages.run import Run
from dflash.stages.tracking import close_again, tracker_of
from dflash.storage import atomic_write_bytes, atomic_write_text
from dflash.tracking import sweep_metrics

logger = logging.getLogger(__name__)


def open_sweep_bench(run: Run) -> EvaluationBench:
    """Load a run's target and held-out prompts for a sweep.

    It decodes no baselines: what the run's configuration says of them stops the evaluation, not this, and is told.

    Raises:
        EvaluationError: a prompt was trained on, or template flags differ from the data set's.
    """
    config = run.config
    try:
        check_names(config.evaluate.baselines)
    except EvaluationError as error:
        logger.warning("the sweep decodes no baselines and goes on, an evaluation would stop: %s", error.what)
    alone = config.evaluate.model_copy(update={"baselines": ()})
    return open_bench(dataclasses.replace(run, config=config.model_copy(update={"evaluate": alone})))


def sweep_stage(run: Run, bench: EvaluationBench, *, progress: Callable[[str, int, int], None]) -> SweepResult:
    """Measure a run's newest durable checkpoint with every block size, temperature and batch size of `evaluate.sweep`.

    Args:
        run: an opened run.
        bench: target and prompts.
        progress: called with (label, done, total).

    Returns:
        The sweep; also written to `eval/sweep-step-N/` and logged to MLflow, or with settings of this call alone written beside
        that, and only its files logged.

    Raises:
        CheckpointError: there is no durable checkpoint, or it is damaged.
        EvaluationError: a block size that the drafter was not trained for, or too few prompts.
        NotLosslessError: a cell's speculative and plain decoding disagree (everything is written nevertheless).
    """
    evaluate = run.config.evaluate
    manifest, weights = load_drafter(newest_checkpoint(run.paths))
    drafter = Drafter(run.config.drafter, target_hidden_size=bench.target.info.hidden_size)
    drafter.load_state_dict(weights)
    drafter.to(bench.target.device).eval()
    trained = run.config.drafter.block_size
    candidates: list[Candidate] = [
        drafter_candidate(
            bench.target,
            drafter,
            block_size=block_size,
            mask_token_id=bench.manifest.mask_token_id,
            label=f"block size {block_size}",
            step=manifest.step,
        )
        for block_size in swept_block_sizes(evaluate, trained=trained)
    ]
    cells = run_sweep(bench.target, candidates, bench.prompts, evaluate=evaluate, stop_ids=bench.stop_ids, progress=progress)
    asked = bench.prompts[: evaluate.sweep.num_prompts]
    result = SweepResult(
        drafter=run.name,
        step=manifest.step,
        dataset="+".join(dict.fromkeys(prompt.dataset for prompt in asked)),
        prompts=len(asked),
        max_new_tokens=evaluate.sweep.max_new_tokens,
        trained_block_size=trained,
        confidence=evaluate.confidence,
        machine=describe_machine(),
        cells=cells,
        best=best_cell(cells),
    )
    settings = settings_of_call(run, counted="sweep")
    folder = run.paths.eval_dir / f"{label_with('sweep', settings)}-step-{manifest.step}"
    with writing_alone(run.paths.eval_dir):
        files = write_sweep(result, folder)
    tracker = tracker_of(run)
    if not settings:
        tracker.log_metrics(sweep_metrics(result), step=manifest.step)
    for file in files:
        tracker.log_artifact(file, f"eval/{folder.name}")
    close_again(run, tracker)
    _require_lossless(result)
    return result


def write_sweep(result: SweepResult, folder: Path) -> list[Path]:
    """Write a sweep as picture, text and JSON, the JSON last: a folder that has it is whole.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP_FILE).unlink(missing_ok=True)
    atomic_write_bytes(folder / SWEEP_PICTURE, draw_sweep(result))
    atomic_write_text(folder / SWEEP_TEXT, sweep_table(result) + "\n")
    atomic_write_text(folder / SWEEP_FILE, to_json(result, indent=2) + "\n")
    return [folder / name for name in (SWEEP_FILE, SWEEP_TEXT, SWEEP_PICTURE)]


def load_sweep(paths: RunPaths) -> SweepResult | None:
    """The newest sweep of a run, whose `best` is the setting to decode with on that machine; None if there is none."""
    folder = newest_sweep(paths.eval_dir)
    if folder is None:
        return None
    return from_json(SweepResult, (folder / SWEEP_FILE).read_bytes(), origin=str(folder / SWEEP_FILE))


def sweep_text(result: SweepResult) -> str:
    """The sweep as text for a terminal."""
    return sweep_table(result)


def _require_lossless(result: SweepResult) -> None:
    wrong = [cell for cell in result.cells if not cell.lossless]
    if wrong:
        raise NotLosslessError(
            f"{len(wrong)} of {len(result.cells)} settings are not lossless, first {setting_text(wrong[0])}: "
            f"{wrong[0].differing_prompts} of {result.prompts} answers differ",
            remedy="do not use their speeds; evaluate with that setting to see which prompts differ, and why",
        )
