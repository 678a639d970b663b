"""The pipeline's stages: one function each, wiring the rooms; called by Prefect tasks and by the command line.

Each is imported when it is first used: the health check starts every few minutes and must not pay for the training's packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.lazy import import_on_use

if TYPE_CHECKING:
    from dflash.stages.champion_folder import Champion, champion_of
    from dflash.stages.compare import CompareStage, compare_stage
    from dflash.stages.doctor import doctor_stage
    from dflash.stages.evaluate import EvaluationBench, baselines_of, evaluate_stage, load_result, open_bench, settings_of_call
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
    from dflash.stages.probe import give_way
    from dflash.stages.publish import Published, PublishRequest, publish_stage
    from dflash.stages.published import evaluate_published
    from dflash.stages.reference import ReferenceStage, reference_stage
    from dflash.stages.regenerate import RegenerateStage, regenerate_stage
    from dflash.stages.revive import FlowRuns, Given, Known, Revival, revive_stage
    from dflash.stages.run import Run, list_runs, open_run, reopen_run
    from dflash.stages.select import SelectStage, select_stage
    from dflash.stages.served import evaluate_served_stage, serve_command_stage
    from dflash.stages.spread import Spread, build_spread, spread_stage
    from dflash.stages.summary import closing_text, export_checkpoint, load_summary, summarise_stage
    from dflash.stages.sweep import load_sweep, open_sweep_bench, sweep_stage, sweep_text
    from dflash.stages.train import TrainStage, train_stage

_HOMES = {
    "Champion": "champion_folder",
    "champion_of": "champion_folder",
    "DataStage": "prepare",
    "EvaluationBench": "evaluate",
    "PlanStage": "prepare",
    "PlanView": "prepare",
    "Published": "publish",
    "PublishRequest": "publish",
    "ReferenceStage": "reference",
    "RegenerateStage": "regenerate",
    "FlowRuns": "revive",
    "Given": "revive",
    "Known": "revive",
    "Revival": "revive",
    "Run": "run",
    "SelectStage": "select",
    "Spread": "spread",
    "TrainStage": "train",
    "baselines_of": "evaluate",
    "build_data": "prepare",
    "build_spread": "spread",
    "CompareStage": "compare",
    "closing_text": "summary",
    "compare_stage": "compare",
    "describe_data": "prepare",
    "doctor_stage": "doctor",
    "evaluate_published": "published",
    "evaluate_served_stage": "served",
    "evaluate_stage": "evaluate",
    "export_checkpoint": "summary",
    "give_way": "probe",
    "health_pictures": "health",
    "health_stage": "health",
    "list_runs": "run",
    "load_report": "health",
    "load_result": "evaluate",
    "load_sweep": "sweep",
    "load_summary": "summary",
    "open_bench": "evaluate",
    "open_run": "run",
    "open_sweep_bench": "sweep",
    "plan_stage": "prepare",
    "prepare_stage": "prepare",
    "publish_stage": "publish",
    "reference_stage": "reference",
    "regenerate_stage": "regenerate",
    "reopen_run": "run",
    "revive_stage": "revive",
    "select_stage": "select",
    "serve_command_stage": "served",
    "settings_of_call": "evaluate",
    "spread_stage": "spread",
    "summarise_stage": "summary",
    "sweep_stage": "sweep",
    "sweep_text": "sweep",
    "train_stage": "train",
    "view_plan": "prepare",
}
"""Module of each name."""

__all__ = [
    "Champion",
    "champion_of",
    "CompareStage",
    "DataStage",
    "EvaluationBench",
    "PlanStage",
    "PlanView",
    "Published",
    "PublishRequest",
    "ReferenceStage",
    "RegenerateStage",
    "FlowRuns",
    "Given",
    "Known",
    "Revival",
    "Run",
    "SelectStage",
    "Spread",
    "TrainStage",
    "baselines_of",
    "build_data",
    "build_spread",
    "closing_text",
    "compare_stage",
    "describe_data",
    "doctor_stage",
    "evaluate_published",
    "evaluate_served_stage",
    "evaluate_stage",
    "export_checkpoint",
    "give_way",
    "health_pictures",
    "health_stage",
    "list_runs",
    "load_report",
    "load_result",
    "load_sweep",
    "load_summary",
    "open_bench",
    "open_run",
    "open_sweep_bench",
    "plan_stage",
    "prepare_stage",
    "publish_stage",
    "reference_stage",
    "regenerate_stage",
    "reopen_run",
    "revive_stage",
    "select_stage",
    "serve_command_stage",
    "settings_of_call",
    "spread_stage",
    "summarise_stage",
    "sweep_stage",
    "sweep_text",
    "train_stage",
    "view_plan",
]

__getattr__ = import_on_use(__name__, _HOMES)
