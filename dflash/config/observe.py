"""Health, evaluation and tracking sections of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section


class SpikeConfig(Section):
    """Thresholds of the per-bucket loss and gradient detectors (z-scores of logarithms)."""

    baseline_points: int = Field(64, ge=8, description="Accepted points that a bucket's spread is taken from.")
    level_points: int = Field(16, ge=4, description="Newest of them, whose median is the usual value.")
    min_points: int = Field(24, ge=4, description="Points before a bucket is judged (its warm-up).")
    loss_floor: float = Field(0.08, gt=0, description="Smallest scale of log-loss.")
    grad_floor: float = Field(0.15, gt=0, description="Smallest scale of the log gradient norm.")
    loss_z: float = Field(6.0, gt=0, description="Loss spike alone.")
    loss_z_with_grad: float = Field(4.0, gt=0, description="Loss spike beside a gradient spike within 2 steps before.")
    grad_z: float = Field(6.0, gt=0, description="Gradient spike.")
    recover_z: float = Field(2.0, gt=0, description="A spike is over once z is back under this.")
    recover_steps: int = Field(50, ge=1, description="Steps after which an unrecovered spike is critical.")
    recover_points: int = Field(
        3, ge=1, description="Calm points in a row that separate two spikes; least evidence that one is unrecovered."
    )
    cluster_spikes: int = Field(3, ge=2, description="Spikes inside `cluster_steps` that are critical.")
    cluster_steps: int = Field(20, ge=1, description="Window of `cluster_spikes`.")
    chance_p: float = Field(
        3e-4, gt=0, lt=1, description="Chance of a cluster, at the run's own rate of spikes, under which it is critical."
    )


class HealthConfig(Section):
    """What the health check judges and how often."""

    check_interval_s: float = Field(5.0, gt=0, description="Seconds between checks while a run trains.")
    report_interval_s: float = Field(60.0, ge=0, description="Seconds between drawings of report.html while nothing new is found.")
    spike: SpikeConfig = Field(SpikeConfig(), description="Spike thresholds.")
    nonfinite_skips: int = Field(3, ge=1, description="Skipped non-finite steps that are critical ...")
    nonfinite_window_steps: int = Field(100, ge=1, description="... inside this many steps.")
    bucket_run: int = Field(3, ge=1, description="Longest harmless run of one bucket in consumption order.")
    queue_window: int = Field(64, ge=8, description="Records that the queue detector looks back over.")
    queue_level_frac: float = Field(0.75, gt=0, le=1, description="Queue level against its settled level that is a finding.")
    queue_p: float = Field(0.01, gt=0, lt=1, description="Mann-Kendall p-value of a decline.")
    queue_min_level: float = Field(4.0, gt=0, description="Settled level under which a queue is too short to judge.")
    lr_tolerance_frac: float = Field(
        0.02, gt=0, lt=1, description="Share of the peak that the logged learning rate may be off the schedule."
    )
    stale_factor: float = Field(10.0, gt=1, description="No record for this many median step times: stale.")
    stale_min_s: float = Field(60.0, gt=0, description="A log is never stale before this many seconds.")
    min_coverage_frac: float = Field(0.99, gt=0, le=1, description="Share of steps the log must cover to be judged.")


class EvaluateConfig(Section):
    """Held-out prompts and decoding."""

    source: Literal["synthetic", "files"] = Field("synthetic", description="Where held-out prompts come from.")
    files: tuple[str, ...] = Field((), description="JSONL prompts for `source: files`.")
    num_prompts: int = Field(48, ge=1, description="Prompts decoded.")
    seed: int = Field(11, ge=0, description="Seed of the synthetic held-out prompts and of the bootstrap.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    block_size: int | None = Field(None, ge=2, description="Block size at decode; the trained one if absent.")
    near_tie_factor: float = Field(4.0, gt=0, description="Accepted top-2 gap, in teacher-forced differences.")
    bootstrap_samples: int = Field(2000, ge=100, description="Bootstrap resamples over prompts.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the intervals.")
    untrained_prompts: int = Field(16, ge=1, description="Prompts that the untrained drafter is measured on.")

    @model_validator(mode="after")
    def _files_named(self) -> Self:
        if self.source == "files" and not self.files:
            raise ValueError("source is `files` but files is empty")
        return self


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = Field(True, description="Log to MLflow.")
    uri: str | None = Field(None, description="Store; `sqlite:///<run.root>/mlflow.db` if absent. MLFLOW_TRACKING_URI wins.")
    experiment: str = Field("dflash", min_length=1, description="Experiment name.")
