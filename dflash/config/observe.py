"""Health, evaluation and tracking sections of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section
from dflash.config.prompt_sets import PromptSetConfig
from dflash.config.sweep import SweepConfig


class SpikeConfig(Section):
    """Thresholds of the per-bucket loss and gradient detectors (z-scores of logarithms)."""

    baseline_points: int = Field(64, ge=8, description="Accepted points that a bucket's spread is taken from.")
    level_points: int = Field(16, ge=4, description="Newest of them, whose median is the usual value.")
    min_points: int = Field(24, ge=4, description="Points before a bucket is judged (its warm-up).")
    loss_floor: float = Field(
        0.03, gt=0, description="Smallest scale of log-loss: a spike of 20 % in a very quiet curve is still one."
    )
    grad_floor: float = Field(0.15, gt=0, description="Smallest scale of the log gradient norm.")
    loss_z: float = Field(6.0, gt=0, description="Loss spike alone.")
    loss_z_with_grad: float = Field(4.0, gt=0, description="Loss spike beside a gradient spike within 2 steps before.")
    grad_z: float = Field(6.0, gt=0, description="Gradient spike ...")
    grad_factor: float = Field(10.0, gt=1, description="... or this many times its bucket's median, in any noise.")
    grad_least_factor: float = Field(5.0, gt=1, description="Under this many times the median an outlier alone is only noted.")
    recover_z: float = Field(2.0, gt=0, description="A spike is over once z is back under this.")
    recover_steps: int = Field(50, ge=1, description="Steps after which an unrecovered spike is critical.")
    recover_points: int = Field(
        3, ge=1, description="Calm points in a row that separate two spikes; least evidence that one is unrecovered."
    )
    cluster_spikes: int = Field(3, ge=2, description="Spikes inside `cluster_steps` that are critical.")
    cluster_steps: int = Field(20, ge=1, description="Window of `cluster_spikes`.")
    chance_p: float = Field(
        1e-3, gt=0, lt=1, description="Chance of such a cluster anywhere in the run so far, at the run's own rate of spikes, under "
        "which it is critical.",
    )  # fmt: skip
    grad_usual_p: float = Field(1e-5, gt=0, lt=1, description="Likewise of a gradient outlier.")
    usual_p: float = Field(
        5e-6,
        gt=0,
        lt=1,
        description="Chance of one loss together with its gradient, by the run's own tails, over which a spike is only noted.",
    )


class RiseConfig(Section):
    """Thresholds of what rises and stays up: CUSUM, divergence, and what a planned change may explain."""

    cusum_drift: float = Field(1.0, gt=0, description="Deviations taken off every point: rises smaller than this never add up.")
    cusum_limit: float = Field(15.0, gt=0, description="Sum of the clipped deviations that calls for a confirmation.")
    cusum_clip: float = Field(
        4.0, gt=0, description="Largest share of one point in the sum, so that outliers cannot make it alone."
    )
    confirm_steps: int = Field(50, ge=1, description="Steps from the onset on after which a rise must still be there.")
    confirm_points: int = Field(24, ge=3, description="Newest points whose median confirms it ...")
    confirm_z: float = Field(2.5, gt=0, description="... in deviations ...")
    confirm_grad_z: float = Field(4.0, gt=0, description="A gradient outlier this far out, a step or two before, dates the onset.")
    min_rise_frac: float = Field(0.15, gt=0, description="... and as a share of the loss: smaller settled rises damage nothing.")
    divergence_points: int = Field(100, ge=10, description="Points of a bucket whose median is compared with its best.")
    divergence_frac: float = Field(0.25, gt=0, description="Rise over the best median that is a strike.")
    divergence_checks: int = Field(3, ge=1, description="Strikes in a row that are divergence.")
    planned_steps: int = Field(12, ge=0, description="Distance between a declared change and an onset that it may explain.")
    planned_max_frac: float = Field(1.0, gt=0, description="A declared change never explains a larger rise than this.")
    alone_points: int = Field(8, ge=1, description="Raised points in a row that prove it for a single bucket.")


class WatchConfig(Section):
    """Thresholds of the detectors that look at accuracy, gradients, saves, the order of the data, and speed."""

    accuracy_z: float = Field(6.0, gt=0, description="Accuracy this many deviations under its bucket's is a drop ...")
    accuracy_in_row: int = Field(3, ge=1, description="... if it happens this often in a row in one bucket.")
    accuracy_expected: float = Field(10.0, gt=0, description="No hit at all counts where at least this many were expected.")
    clip_frac: float = Field(0.05, gt=0, lt=1, description="Clip coefficient under which next to nothing of an update is left ...")
    clip_steps: int = Field(20, ge=1, description="... which is critical after this many steps in a row.")
    dead_records: int = Field(50, ge=2, description="Records with one and the same value: the metric is frozen.")
    save_p: float = Field(0.01, gt=0, lt=1, description="Chance of that many spikes near saves under which they are linked ...")
    save_min_saves: int = Field(5, ge=2, description="... from this many saves on (two can never prove it) ...")
    save_ratio: float = Field(3.0, gt=1, description="... and at this many times the usual rate.")
    save_near_steps: int = Field(10, ge=1, description="Steps from the beginning of a save on that count as near it.")
    stall_factor: float = Field(1.5, gt=1, description="Slowest steps during saves over the median step that are a stall.")
    hung_factor: float = Field(10.0, gt=1, description="A save this many times its usual length hangs ...")
    hung_min_s: float = Field(60.0, gt=0, description="... but never before this many seconds.")
    mix_z: float = Field(6.0, gt=0, description="Deviations from the pooled median that a pooled rule would cry at.")
    share_z: float = Field(5.0, gt=0, description="Deviations of a bucket's share from the plan or from the run's beginning ...")
    share_frac: float = Field(0.08, gt=0, lt=1, description="... and the least difference of the share that matters.")
    share_batches: int = Field(256, ge=32, description="Micro-batches that a share is taken over.")
    imbalance_frac: float = Field(0.5, gt=0, description="Spread of the targets' batches over their mean that is an imbalance ...")
    imbalance_batches: int = Field(60, ge=10, description="... over a window of this many batches.")
    slow_frac: float = Field(0.85, gt=0, lt=1, description="Throughput against its usual value that is slow ...")
    very_slow_frac: float = Field(0.5, gt=0, lt=1, description="... and that is critical (for operations) ...")
    slow_steps: int = Field(16, ge=2, description="... in windows of at least this many steps ...")
    slow_s: float = Field(10.0, ge=0, description="... and seconds ...")
    slow_windows: int = Field(3, ge=1, description="... this many in a row; steps beside a save left out.")
    resume_steps: int = Field(100, ge=1, description="Steps after a resume that are compared with those before it.")
    resume_points: int = Field(30, ge=3, description="Least micro-batches of that comparison.")
    resume_z: float = Field(2.0, gt=0, description="Mean deviation that makes a resume a bad one.")
    artefact_z: float = Field(
        4.0, gt=0, description="A record of few samples under this, once scaled by their number, is no spike."
    )


class HealthConfig(Section):
    """What the health check judges and how often."""

    check_interval_s: float = Field(5.0, gt=0, description="Seconds between checks while a run trains.")
    report_interval_s: float = Field(60.0, ge=0, description="Seconds between drawings of report.html while nothing new is found.")
    spike: SpikeConfig = Field(SpikeConfig(), description="Spike thresholds.")
    rise: RiseConfig = Field(RiseConfig(), description="Sustained rises.")
    watch: WatchConfig = Field(WatchConfig(), description="Everything else.")
    simple_loss: float = Field(3.0, gt=0, description="The simple rule `loss above`, counted for comparison, never acted on.")
    simple_accuracy_drop: float = Field(0.05, gt=0, description="The simple rule `accuracy fell by`, likewise.")
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


class EvaluateServerConfig(Section):
    """A server (vLLM, SGLang) that is evaluated; its address is said where the evaluation is started."""

    model: str | None = Field(None, description="Name of the target at the server; the target's own path if absent.")
    api_key_env: str = Field("OPENAI_API_KEY", description="Environment variable that holds the key, if one is needed.")
    concurrency: int = Field(
        8, ge=1, description="Prompts under way at once; 1 compares speeds, and gives figures a prompt from counters alone."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Longest wait for one answer.")
    max_retries: int = Field(4, ge=0, description="Tries after the first for one request.")
    backoff_s: float = Field(1.0, gt=0, description="Wait before the first retry; it doubles each time, with jitter.")
    settle_s: float = Field(30.0, ge=0, description="Longest wait for counters that lag behind the answers.")
    judge_differences: bool = Field(
        False, description="Load the target here too, to tell near-ties where speculative and plain answers of the server differ."
    )


class EvaluateConfig(Section):
    """Held-out prompts and decoding."""

    source: Literal["synthetic", "files", "sets"] = Field("synthetic", description="Where held-out prompts come from.")
    files: tuple[str, ...] = Field((), description="JSONL prompts for `source: files`.")
    sets: tuple[PromptSetConfig, ...] = Field(
        (), description="Prompt sets for `source: sets`, with figures for each and for all: `[gsm8k, {name: mine, file: p.jsonl}]`."
    )
    num_prompts: int = Field(48, ge=1, description="Prompts decoded; of each set, if there are sets.")
    seed: int = Field(11, ge=0, description="Seed of the synthetic held-out prompts and of the bootstrap.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    block_size: int | None = Field(None, ge=2, description="Block size at decode; the trained one if absent.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy; otherwise keyed sampling, plain and speculative alike.")
    batch_size: int = Field(1, ge=1, description="Prompts decoded together, plainly and with the drafter alike.")
    near_tie_factor: float = Field(4.0, gt=0, description="Accepted top-2 gap, in teacher-forced differences.")
    bootstrap_samples: int = Field(2000, ge=100, description="Bootstrap resamples over prompts.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the intervals.")
    untrained_prompts: int = Field(16, ge=1, description="Prompts that the untrained drafter is measured on.")
    baselines: tuple[str, ...] = Field(
        (),
        description="Decoded beside the trained drafter, on the same prompts: `prompt_lookup`, `untrained`, or the folder of a "
        "published drafter, a checkpoint or a run.",
    )
    sweep: SweepConfig = Field(SweepConfig(), description="Sweep over decoding settings.")
    server: EvaluateServerConfig = Field(EvaluateServerConfig(), description="A server that is evaluated.")

    @model_validator(mode="after")
    def _files_named(self) -> Self:
        if self.source == "files" and not self.files:
            raise ValueError("source is `files` but files is empty")
        if bool(self.sets) != (self.source == "sets"):
            raise ValueError(f"source is `{self.source}` but sets is {'given' if self.sets else 'empty'}")
        names = [each.name for each in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"sets names one set twice: {', '.join(names)}")
        return self


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = Field(True, description="Log to MLflow.")
    uri: str | None = Field(None, description="Store; `sqlite:///<run.root>/mlflow.db` if absent. MLFLOW_TRACKING_URI wins.")
    experiment: str = Field("dflash", min_length=1, description="Experiment name.")
