"""Training, loss and checkpoint sections of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section


class LossConfig(Section):
    """The training objective over the slots of a block."""

    objective: Literal["decay", "dpace", "acceptance"] = Field(
        "decay",
        description="Cross-entropy with static decay, or with D-PACE's weights (arXiv 2605.18810), or `acceptance`: "
        "KL and direct acceptance against the target's distribution (arXiv 2602.23881; the target then runs all its layers).",
    )
    gamma: float = Field(
        4.0, gt=0, description="Decay length of `decay` and `acceptance`, in slots (7 / 5 / 4 for K = 16 / 10 / 8)."
    )
    alpha: float = Field(0.5, ge=0, le=1, description="Smoothing of `dpace`.")
    eta: float = Field(3.0, ge=0, description="`acceptance`: the share of KL is exp(-eta * A) at acceptance A.")
    head_chunk_rows: int = Field(384, ge=1, description="Supervised slots that go through the head together.")


class AnchorConfig(Section):
    """How many blocks a sequence trains."""

    per_supervised_token: float = Field(0.34, gt=0, le=1, description="Anchors for each supervised token.")
    max_per_sequence: int = Field(12, ge=1, description="Cap a sequence.")
    max_per_batch: int = Field(256, ge=1, description="Cap a micro-batch.")


class OptimizerConfig(Section):
    """The optimizer of the fp32 master weights."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`muon`: torch.optim.Muon for the matrices (arXiv 2502.16982), AdamW for the norms; one moment, not two; "
        "on the demo clearly better at twice the learning rate (benchmarks/optimizers.py), never tried on a large drafter.",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="`muon`: decay of its one moment.")
    beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Second-moment decay.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")


class QueueConfig(Section):
    """Bounds of the queues between the stages of a replica."""

    ready_bytes: int = Field(16 * 2**20, ge=1, description="Collated batches waiting for a target.")
    feature_bytes: int = Field(256 * 2**20, ge=1, description="Target features waiting for the drafter (reorder window).")
    log_records: int = Field(1024, ge=1, description="Log lines waiting for the writer; a drop is counted and is a finding.")


class TrainConfig(Section):
    """The drafter's training."""

    init_from: str | None = Field(None, description="Folder of a published drafter (any layout) that the weights start from.")
    epochs: int = Field(4, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps; whole epochs if absent.")
    lr: float = Field(6e-3, gt=0, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; `wsd` (warm-up, stable, decay) stays at the peak until its decay."
    )
    warmup_frac: float = Field(0.04, ge=0, lt=1, description="Share of the steps spent warming up: lr*(step+1)/warmup.")
    decay_frac: float = Field(
        0.2, gt=0, le=1, description="`wsd`: share of the steps that decay at the end, by 1 - sqrt(progress) (arXiv 2405.18392)."
    )
    min_lr_frac: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    clip_norm: float = Field(1.0, gt=0, description="Gradient norm that larger ones are clipped to.")
    accumulation_steps: int = Field(1, ge=1, description="Micro-batches an optimizer step and replica.")
    skip_update_if_grad_over: float | None = Field(
        None,
        gt=1,
        description="Skip an update whose gradient norm is over this many times the median of its bucket's accepted updates; "
        "at most three in a row. Off if absent: clipping alone.",
    )
    recompute_layers: bool = Field(
        False, description="Activation checkpointing: each drafter layer is computed again in the backward pass, to save memory."
    )
    compile: bool = Field(False, description="torch.compile of the drafter; GPU only.")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="`auto`: float32 on a CPU, bfloat16 on a GPU."
    )
    attention: Literal["auto", "flex", "chunked"] = Field(
        "auto", description="Attention of the training step: flex on a GPU where its probe passes, else chunks; the log says why."
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="Optimizer.")
    loss: LossConfig = Field(LossConfig(), description="Objective.")
    anchors: AnchorConfig = Field(AnchorConfig(), description="Anchors.")
    feature_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Disk below `run.root`/features for what the target makes of samples, for later epochs and runs on the same "
        "data; 0 computes it every time.",
    )
    queues: QueueConfig = Field(QueueConfig(), description="Queue bounds.")
    max_nonfinite_in_row: int = Field(
        3, ge=1, description="Non-finite updates in a row that end the process with its own exit code."
    )
    heartbeat_s: float = Field(2.0, gt=0, description="Period of the heartbeat file, in seconds.")
    log_heartbeat_s: float = Field(30.0, gt=0, description="Seconds without any log record after which a `heartbeat` is logged.")
    max_restarts: int = Field(2, ge=0, description="Times a crashed trainer is started again from the last durable checkpoint.")
    restart_wait_s: float = Field(2.0, ge=0, description="Wait before the first restart; it doubles with each further crash ...")
    restart_max_wait_s: float = Field(120.0, ge=0, description="... up to this many seconds.")
    stall_s: float = Field(
        1800.0,
        gt=0,
        description="A trainer without a new step for so long is ended and started again; must exceed its start and a save.",
    )
    restart_heal_steps: int = Field(500, ge=1, description="New steps after which earlier crashes no longer count.")


class CheckpointConfig(Section):
    """Checkpoints: how often, and which are kept."""

    interval_steps: int = Field(200, ge=1, description="Optimizer steps between saves.")
    keep_clean: int = Field(3, ge=1, description="Newest clean checkpoints that are never deleted.")
    keep_other: int = Field(2, ge=0, description="Older other checkpoints that are kept besides.")
    window_steps: int = Field(200, ge=1, description="Steps before a checkpoint that must be free of critical training findings.")
    soak_steps: int = Field(200, ge=1, description="Steps after a checkpoint that must be free of critical onsets.")
    norm_jump_factor: float = Field(
        2.0, gt=1, description="Change of a stored weight tensor's norm between two checkpoints that `checkpoint verify` reports."
    )
    store: str | None = Field(
        None, description="Folder or `s3://bucket/prefix` that durable checkpoints are copied to in the background; none if absent."
    )
    keep_remote: int = Field(2, ge=1, description="Newest copies there that stay, besides the newest clean one.")
    upload_wait_s: float = Field(600.0, ge=0, description="Longest wait for the last copy when the run has finished.")
    retry_s: float = Field(30.0, gt=0, description="Wait before a failed write (a full disk) is tried again from its snapshot.")
    hung_factor: float = Field(10.0, gt=1, description="A write this many times the median of its predecessors hangs ...")
    hung_min_s: float = Field(60.0, ge=0, description="... but never before this many seconds ...")
    hung_max_s: float = Field(1800.0, gt=0, description="... and always after this many.")

    @model_validator(mode="after")
    def _soak_is_reachable(self) -> Self:
        if self.soak_steps > 100 * self.interval_steps:
            raise ValueError(f"soak_steps {self.soak_steps} is over 100 save intervals: nothing would ever become clean")
        return self
