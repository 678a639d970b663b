"""The pipeline's stages: one function each, wiring the rooms; called by Prefect tasks and by the command line.

Each is imported when it is first used: the health check starts every few minutes and must not pay for the training's packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.lazy import import_on_use

if TYPE_CHECKING:
    from dflash.stages.compare import CompareStage, compare_stage
    from dflash.stages.doctor import doctor_stage
    from dflash.stages.evaluate import EvaluationBench, evaluate_stage, load_result, open_bench
    from dflash.stages.health import health_pictures, health_stage, load_report
    from dflash.stages.prepare import (
        DataStage,
        PlanStage,
        PlanView,
        build_data,
        describe_data,
        plan_stage,
        prepare_stage,
        view_plan,
    )
    from dflash.stages.published import evaluate_published
    from dflash.stages.regenerate import RegenerateStage, regenerate_stage
    from dflash.stages.revive import FlowRuns, Given, Known, Revival, revive_stage
    from dflash.stages.run import Run, list_runs, open_run, reopen_run
    from dflash.stages.spread import Spread, build_spread, spread_stage
    from dflash.stages.summary import closing_text, export_checkpoint, load_summary, summarise_stage
    from dflash.stages.train import TrainStage, train_stage

_HOMES = {
    "DataStage": "prepare",
    "EvaluationBench": "evaluate",
    "PlanStage": "prepare",
    "PlanView": "prepare",
    "RegenerateStage": "regenerate",
    "FlowRuns": "revive",
    "Given": "revive",
    "Known": "revive",
    "Revival": "revive",
    "Run": "run",
    "Spread": "spread",
    "TrainStage": "train",
    "build_data": "prepare",
    "build_spread": "spread",
    "CompareStage": "compare",
    "closing_text": "summary",
    "compare_stage": "compare",
    "describe_data": "prepare",
    "doctor_stage": "doctor",
    "evaluate_published": "published",
    "evaluate_stage": "evaluate",
    "export_checkpoint": "summary",
    "health_pictures": "health",
    "health_stage": "health",
    "list_runs": "run",
    "load_report": "health",
    "load_result": "evaluate",
    "load_summary": "summary",
    "open_bench": "evaluate",
    "open_run": "run",
    "plan_stage": "prepare",
    "prepare_stage": "prepare",
    "regenerate_stage": "regenerate",
    "reopen_run": "run",
    "revive_stage": "revive",
    "spread_stage": "spread",
    "summarise_stage": "summary",
    "train_stage": "train",
    "view_plan": "prepare",
}
"""Module of each name."""

__all__ = [
    "CompareStage",
    "DataStage",
    "EvaluationBench",
    "PlanStage",
    "PlanView",
    "RegenerateStage",
    "FlowRuns",
    "Given",
    "Known",
    "Revival",
    "Run",
    "Spread",
    "TrainStage",
    "build_data",
    "build_spread",
    "closing_text",
    "compare_stage",
    "describe_data",
    "doctor_stage",
    "evaluate_published",
    "evaluate_stage",
    "export_checkpoint",
    "health_pictures",
    "health_stage",
    "list_runs",
    "load_report",
    "load_result",
    "load_summary",
    "open_bench",
    "open_run",
    "plan_stage",
    "prepare_stage",
    "regenerate_stage",
    "reopen_run",
    "revive_stage",
    "spread_stage",
    "summarise_stage",
    "train_stage",
    "view_plan",
]

__getattr__ = import_on_use(__name__, _HOMES)
