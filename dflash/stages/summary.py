"""Stage 5: the exported drafter, `summary.json` and the closing table. The summary's presence marks a run as finished."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash.checkpoint import current_states, newest_durable, read_ledger
from dflash.data.plan_file import read_plan_manifest
from dflash.errors import RunStateError
from dflash.evaluate.table import closing_table
from dflash.model.export_fields import DtypeName
from dflash.records import RunPaths, RunSummary, from_json, to_json
from dflash.stages.evaluate import load_result
from dflash.stages.export import write_checkpoint
from dflash.stages.health import health_pictures, health_stage
from dflash.stages.rivals import load_rivals
from dflash.stages.run import Run, read_reused
from dflash.stages.sweep import load_sweep
from dflash.stages.tracking import description_of, forwarder_of
from dflash.storage import atomic_write_text
from dflash.train.follow import LogFollower
from dflash.train.progress import read_account


def summarise_stage(run: Run) -> RunSummary:
    """Judge the finished log once more, export the drafter, gather a run's results, log them and write `summary.json`.

    Raises:
        RunStateError: a stage is missing.
        CheckpointError: the newest checkpoint is damaged.
    """
    paths = run.paths
    step = newest_durable(paths.checkpoints_dir, current_states(read_ledger(paths.ledger)))
    if step is None:
        raise RunStateError(f"run {paths.root} was never trained", remedy="train first: python -m dflash train CONFIG")
    report = health_stage(paths.root, act=False, ended=True)
    export_checkpoint(run, paths.checkpoint(step))
    describe = description_of(run)
    forwarder = forwarder_of(run, describe=describe)
    forwarder.forward()  # what the store could not take during the training
    tracker = forwarder.tracker
    if tracker.connect():
        describe(tracker)  # once more: a store that was away all the time has heard of no parameters yet
    summary = _gather(paths, step, health_verdict=report.verdict, mlflow_run_id=tracker.run_id)
    atomic_write_text(paths.summary, to_json(summary, indent=2))
    for file in (paths.summary, paths.config, paths.health_dir / "report.html", paths.health_dir / "report.json"):
        tracker.log_artifact(file, "run")
    for file in health_pictures(paths):
        tracker.log_artifact(file, "run/health")
    tracker.log_metrics(_headline(summary), step=step)
    tracker.set_tags({"health": summary.health_verdict})
    tracker.finish("FINISHED")
    return summary


def export_checkpoint(run: Run, checkpoint: Path) -> Path:
    """Write a checkpoint's drafter into `export/` in the published layout, audited and re-imported."""
    dtype: DtypeName = "float32" if run.config.cluster.device == "cpu" else "bfloat16"
    target = run.config.target.path
    return write_checkpoint(
        run.config, checkpoint, output=run.paths.export_dir, layout="zlab", dtype=dtype, target_name=target
    )  # fmt: skip


def load_summary(run_dir: str | Path) -> RunSummary:
    """The summary of a finished run.

    Raises:
        RunStateError: the run is not finished.
    """
    file = RunPaths(Path(run_dir)).summary
    if not file.is_file():
        raise RunStateError(
            f"{file.parent} has no summary.json: the run is not finished", remedy=f"python -m dflash evaluate {file.parent}"
        )
    return from_json(RunSummary, file.read_bytes(), origin=str(file))


def closing_text(run: Run, summary: RunSummary) -> str:
    """The closing table, with the commands that open what the run left behind."""
    python = _python_command()
    commands = (
        "make ui        # Prefect on 127.0.0.1:4200, MLflow on 127.0.0.1:5000",
        "make ui-down   # stops them",
        f"{python} -m dflash health {run.paths.root}",
        f"{python} -m dflash compare {run.paths.root} OTHER_RUN",
    )
    return closing_table(summary, commands=commands)


def _python_command() -> str:
    """The interpreter as a person would type it here: the project's own environment is rarely activated."""
    executable, here = Path(sys.executable), Path.cwd()
    return str(executable.relative_to(here)) if executable.is_relative_to(here) else str(executable)


def _gather(paths: RunPaths, step: int, *, health_verdict: str, mlflow_run_id: str | None) -> RunSummary:
    trained, untrained = load_result(paths, "trained"), load_result(paths, "untrained")
    plan = read_plan_manifest(paths.plan_dir)
    follower = LogFollower(paths.log)
    follower.poll()
    busy, advice = read_account(paths)
    sweep = load_sweep(paths)
    survival = trained.survival_per_position
    if survival is None:
        raise RunStateError(
            f"the trained evaluation of {paths.root} lacks its positions",
            remedy=f"evaluate again: python -m dflash evaluate {paths.root}",
        )
    stale = (f"acceptance is that of step {trained.step}, the last checkpoint is step {step}",) if trained.step != step else ()
    return RunSummary(
        run=paths.root.name,
        acceptance_length=trained.acceptance_length,
        acceptance_length_untrained=untrained.acceptance_length,
        acceptance_ci95=trained.acceptance_ci,
        acceptance_per_position=survival,
        speedup=trained.speedup,
        lossless=bool(trained.lossless and untrained.lossless),
        padding_efficiency=plan.padding_efficiency,
        longest_bucket_run=plan.longest_bucket_run,
        feature_wait_frac=follower.wait_frac(),
        health_verdict=health_verdict,
        checkpoint=str(paths.checkpoint(step)),
        steps=step,
        train_time_s=follower.train_time_s(),
        reused=tuple(read_reused(paths)),
        mlflow_run_id=mlflow_run_id,
        stage_busy_frac=busy,
        split_advice=advice,
        warnings=(*stale, *trained.warnings),
        baselines=load_rivals(paths),
        confidence=trained.confidence,
        temperature=trained.temperature,
        best_setting=None if sweep is None or sweep.step != step else sweep.best,
    )


def _headline(summary: RunSummary) -> dict[str, float]:
    figures = {
        "summary/acceptance_length": summary.acceptance_length,
        "summary/acceptance_length_untrained": summary.acceptance_length_untrained,
        "summary/padding_efficiency": summary.padding_efficiency,
        "summary/longest_bucket_run": float(summary.longest_bucket_run),
        "summary/feature_wait_frac": summary.feature_wait_frac,
        "summary/train_time_s": summary.train_time_s,
    }
    return figures if summary.speedup is None else figures | {"summary/speedup": summary.speedup}
