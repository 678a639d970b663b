"""The pipeline's stages: one function each, wiring the rooms; called by Prefect tasks and by the command line."""

from dflash.stages.doctor import doctor_stage
from dflash.stages.evaluate import EvaluationBench, evaluate_stage, load_result, open_bench
from dflash.stages.evaluate_published import evaluate_published
from dflash.stages.health import health_pictures, health_stage, load_report
from dflash.stages.prepare import DataStage, PlanStage, PlanView, build_data, describe_data, plan_stage, prepare_stage, view_plan
from dflash.stages.regenerate import RegenerateStage, regenerate_stage
from dflash.stages.run import Run, list_runs, open_run, reopen_run
from dflash.stages.spread import Spread, build_spread, spread_stage
from dflash.stages.summary import closing_text, export_checkpoint, load_summary, summarise_stage
from dflash.stages.train import TrainStage, train_stage

__all__ = [
    "DataStage",
    "EvaluationBench",
    "PlanStage",
    "PlanView",
    "RegenerateStage",
    "Run",
    "Spread",
    "TrainStage",
    "build_data",
    "build_spread",
    "closing_text",
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
    "spread_stage",
    "summarise_stage",
    "train_stage",
    "view_plan",
]
