"""Stage 4: decode held-out prompts with a checkpoint's drafter, beside plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dflash.checkpoint import current_states, load_checkpoint, newest_durable, read_ledger
from dflash.config import load_config, section_hash
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import load_data
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.errors import CheckpointError, RunStateError
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.hardware import describe_machine
from dflash.evaluate.prompts import EvalPrompt, load_eval_prompts, renderer_of
from dflash.evaluate.rivals import rival_table
from dflash.evaluate.run import evaluate_candidates, require_lossless
from dflash.evaluate.stored import RESULT_FILE, newest_evaluation, writing_alone
from dflash.evaluate.turns import with_later_turns
from dflash.evaluate.write import write_evaluation
from dflash.model.drafter import Drafter
from dflash.model.target import Target, load_target
from dflash.records import DataManifest, EvaluationResult, RivalTable, RunPaths, from_json
from dflash.stages.rivals import check_names, read_rivals, with_baselines, write_rivals
from dflash.stages.run import Run
from dflash.stages.tracking import close_again, tracker_of
from dflash.tracking import evaluation_metrics

Which = Literal["trained", "untrained"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EvaluationBench:
    """Everything that evaluations of one run share: the target is loaded once."""

    target: Target
    prompts: list[EvalPrompt]
    manifest: DataManifest
    stop_ids: tuple[int, ...]


def open_bench(run: Run) -> EvaluationBench:
    """Load the run's target and its held-out prompts.

    Raises:
        EvaluationError: a prompt was trained on, template flags differ from the data set's, or a baseline is none.
    """
    config = run.config
    check_names(config.evaluate.baselines)
    torch.set_num_threads(config.cluster.torch_threads)
    pointer = read_data_pointer(run.paths)
    data = load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes")
    tokenizer = load_tokenizer(config.target)
    prompts = load_eval_prompts(config, tokenizer=tokenizer, manifest=data.manifest, store=data.store)
    target = load_target(
        config.target, target_layer_ids=config.drafter.target_layer_ids, device=torch.device(config.cluster.device)
    )
    stop_ids = stop_token_ids(tokenizer, config.target)
    renderer = renderer_of(config, tokenizer)
    prompts = with_later_turns(target, prompts, renderer=renderer, evaluate=config.evaluate, stop_ids=stop_ids)
    return EvaluationBench(target, prompts, data.manifest, stop_ids)


def evaluate_stage(
    run: Run, bench: EvaluationBench, *, which: Which, progress: Progress, checkpoint: Path | None = None
) -> EvaluationResult:
    """Measure a checkpoint's acceptance on the run's held-out prompts.

    Args:
        run: an opened run.
        bench: target and prompts.
        which: `trained` takes the newest durable checkpoint, `untrained` takes `step-0` on fewer prompts.
        progress: called with (label, done, total).
        checkpoint: folder to evaluate instead.

    Returns:
        The result; also written to `eval/<which>-step-N/` and logged to MLflow. With settings of this call alone it is written
        beside that, to `eval/<which>-with-<settings>-step-N/`, and only its files are logged: nothing of the run's is replaced.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        RunStateError: it is another run's.
        NotLosslessError: speculative and plain decoding disagree.
    """
    folder = checkpoint or _checkpoint_of(run.paths, which)
    loaded = load_checkpoint(folder)
    if folder.resolve() != run.paths.checkpoint(loaded.manifest.step).resolve():
        raise RunStateError(  # its result would take the place of the run's own
            f"{folder} is no checkpoint of run {run.paths.root}",
            remedy=f"evaluate it in its own run, or beside this one: --baseline {folder}",
        )
    config = run.config
    drafter = Drafter(config.drafter, target_hidden_size=bench.target.info.hidden_size)
    drafter.load_state_dict(loaded.drafter)
    candidate = drafter_candidate(
        bench.target,
        drafter.to(bench.target.device).eval(),
        block_size=config.evaluate.block_size,
        mask_token_id=bench.manifest.mask_token_id,
        label=which,
        step=loaded.manifest.step,
    )
    prompts = bench.prompts[: config.evaluate.untrained_prompts] if which == "untrained" else bench.prompts
    names = config.evaluate.baselines if which == "trained" else ()
    target, candidates = with_baselines(run, bench.target, candidate, names=names)
    evaluation, *baselines = evaluate_candidates(
        target, candidates, prompts, evaluate=config.evaluate, stop_ids=bench.stop_ids, progress=progress
    )
    rivals = rival_table(evaluation, baselines, evaluate=config.evaluate, machine=describe_machine()) if baselines else None
    asked = settings_of_call(run)
    folder = _folder_of(run, which, loaded.manifest.step)
    with writing_alone(run.paths.eval_dir):
        files = [*write_evaluation(evaluation, folder), *write_rivals(rivals, folder)]
    tracker = tracker_of(run)
    for each in () if asked else (evaluation, *baselines):
        tracker.log_metrics(evaluation_metrics(each.result), step=loaded.manifest.step)
    for file in files:
        tracker.log_artifact(file, f"eval/{folder.name}")
    close_again(run, tracker)
    require_lossless(evaluation.result)
    return evaluation.result


def baselines_of(run: Run, result: EvaluationResult) -> RivalTable | None:
    """The table beside a trained drafter's result of this call's settings; None if it had no baselines."""
    return None if result.step is None else read_rivals(_folder_of(run, "trained", result.step))


def _folder_of(run: Run, which: Which, step: int) -> Path:
    return run.paths.eval_dir / f"{label_with(which, settings_of_call(run))}-step-{step}"


def settings_of_call(run: Run, *, counted: Literal["sweep", "server"] | None = None) -> str:
    """Name (hex) of the settings that this call measures with, empty if they are those of the run's own configuration.

    Baselines have files of their own; settings of sweeps and servers count only for what one of them measures (`counted`).
    """
    own, asked = load_config(run.paths.config).evaluate, run.config.evaluate
    aside = {name: getattr(own, name) for name in ("baselines", "sweep", "server") if name != counted}
    return "" if asked.model_copy(update=aside) == own else section_hash(asked.model_copy(update=aside))[:8]


def label_with(label: str, settings: str) -> str:
    """What a result of these settings (see `settings_of_call`) is called beside that of the run's own."""
    return f"{label}-with-{settings}" if settings else label


def load_result(paths: RunPaths, which: Which) -> EvaluationResult:
    """The newest stored evaluation of a run.

    Raises:
        RunStateError: there is none.
    """
    folder = newest_evaluation(paths.eval_dir, which)
    if folder is None:
        raise RunStateError(f"run {paths.root} has no {which} evaluation", remedy=f"python -m dflash evaluate {paths.root}")
    return from_json(EvaluationResult, (folder / RESULT_FILE).read_bytes(), origin=str(folder / RESULT_FILE))


def _checkpoint_of(paths: RunPaths, which: Which) -> Path:
    step = 0 if which == "untrained" else newest_durable(paths.checkpoints_dir, current_states(read_ledger(paths.ledger)))
    if step is None:
        raise CheckpointError(
            f"run {paths.root} has no durable checkpoint yet", remedy="train first: python -m dflash train CONFIG"
        )
    return paths.checkpoint(step)
