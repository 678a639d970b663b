"""What each field of the run log and each metric in MLflow means: words only, joined with the records by `metrics_reference`.

Invariant: a test keeps the keys equal to the fields of the records, to the events and to the metrics that the code really writes.
"""

from __future__ import annotations

from typing import Final

COMMON: Final = {
    "kind": "`step` or `event`",
    "schema_version": "version of the line's layout; another one is refused, never guessed at",
    "segment": "stretch between two starts of the trainer; every resume and every rollback begins the next one",
    "step": "record s is the update from state s to state s+1; `step-N` is the state after N updates",
    "wall_time_s": "seconds since 1970 when the step began, or the event happened",
    "mono_time_s": "the same on the machine's monotonic clock, which nobody sets",
}

STEP: Final = {
    "ce": "mean plain cross-entropy (nats) over the supervised slots of the step; null if not finite. The health series, whatever "
    "the objective",
    "objective": "mean of the training objective (`train.loss`); its height depends on its own weights: compare runs by `ce`",
    "accuracy": "share of the supervised slots whose most likely token was the label",
    "accepted_length": "mean over the blocks of the longest correct prefix: drafts that would have been accepted, without the "
    "target's own token",
    "coverage_frac": "share of the supervised tokens that some block was trained to predict",
    "grad_norm": "norm of the whole gradient before clipping; null if not finite",
    "clip_coef": "factor that clipping applied, 1 = none",
    "lr": "learning rate of the update, a rollback's overlay included",
    "warmup_factor": "share of the learning rate that the warm-up lets through, 1 after it",
    "skipped": "the update was not applied: something was not finite, or its norm was over `train.skip_update_if_grad_over`",
    "nonfinite": "names of what was not finite; such numbers are null, because JSON has no NaN",
    "micro_batches": "one object a micro-batch, of all replicas, in plan order (next table)",
    "plan_position": "micro-batches of the plan that are consumed when the step is done",
    "padding_frac": "share of the step's tokens that were padding",
    "step_time_s": "wall time of the step, the wait for features included",
    "wait_time_s": "of it, the longest time that a replica's drafter waited for features",
    "tokens_per_s": "real tokens (no padding) of the step by `step_time_s`",
    "ready_depth": "batches that waited for a target when the step began, of all replicas",
    "feature_depth": "batches whose features waited for the drafter when the step began, of all replicas",
    "target_depths": "batches that each target worker has finished since its process began, replica after replica",
    "rank_wait_s": "each replica's own wait for features",
}

MICRO_BATCH: Final = {
    "batch_id": "position in the plan",
    "bucket": "length bucket, 0 the shortest",
    "epoch": "pass over the data",
    "rows": "samples: row numbers in the data set",
    "padded_length_tokens": "length to which every sequence was padded",
    "length_min_tokens": "shortest sequence, without padding",
    "length_max_tokens": "longest sequence, without padding",
    "length_sum_tokens": "all sequences together, without padding",
    "n_seqs": "sequences",
    "n_tokens": "supervised slots that entered the loss",
    "n_blocks": "anchors (blocks) that were trained",
    "supervised_tokens": "tokens of the answers",
    "covered_tokens": "of them, those that some block was trained to predict",
    "ce_sum": "summed cross-entropy over `n_tokens`; null if not finite",
    "objective_sum": "numerator of the objective; null if not finite",
    "objective_weight": "its denominator; null if not finite",
    "accepted_sum": "sum over the blocks of the longest correct prefix",
    "correct": "correct predictions at slot 1, 2, ... K-1",
    "valid": "supervised slots at slot 1, 2, ... K-1",
    "rank": "replica that consumed it",
}

EVENT: Final = {
    "event": "which one (next table)",
    "details": "what there is to say about it",
}

EVENTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "start": ("the trainer begins from nothing", ("plan_position", "total_steps", "overlay", "rank_wait_expected_frac")),
    "resume": (
        "the trainer goes on from a checkpoint; `bucket_run_joins`: where left-out batches let two runs of a bucket meet",
        ("plan_position", "total_steps", "overlay", "bucket_run_joins"),
    ),
    "config": (
        "what was decided before the first step: hashes of configuration, plan, data set and target, seed, device, versions",
        (
            "config_sha256",
            "plan_sha256",
            "seed",
            "accepted_changes",
            "replicas",
            "targets",
            "parameters",
            "compute_dtype",
            "device",
        ),
    ),
    "epoch": ("the first batch of an epoch comes next", ("epoch", "batch_id")),
    "lr_change": ("the schedule enters another phase, as planned", ("from", "to", "lr")),
    "save_begin": ("a checkpoint begins", ()),
    "save_staged": ("its snapshot is taken, training goes on", ("blocked_s", "bytes")),
    "save_durable": ("it is complete under its final name, on disk", ("write_s", "bytes", "finite")),
    "save_failed": (
        "it is not; `retry_in_s` if it will be tried again, `hung` if the write does not end",
        ("error", "hung", "retry_in_s"),
    ),
    "save_skipped": (
        "none was begun: one is under way, or it would not fit the time",
        ("in_flight_step", "reason", "durable_step"),
    ),
    "skip": (
        "an update was not applied: something was not finite, or `grad_norm` was over `limit`",
        ("batch_ids", "nonfinite", "in_row", "grad_norm", "limit", "kind"),
    ),
    "stop_requested": ("the trainer was asked to stop and saves its state", ()),
    "finish": (
        "the training is done: shares of busy, starved and blocked time of each stage, and what split of devices would be better",
        ("queues", "stages", "replica_times", "advice"),
    ),
    "rollback_begin": ("the supervisor goes back (written while no trainer runs)", ("key", "rung", "target_step")),
    "rollback_end": ("the next segment goes on from there", ("key", "rung", "target_step", "skipped", "overlay")),
    "heartbeat": ("nothing was logged for a while, but the process lives", ()),
    "log_drops": (
        "the log's queue was full and step records were lost: a finding in itself",
        ("dropped", "first_step", "last_step"),
    ),
    "acceptance_probe": (
        "a checkpoint's acceptance on a few held-out prompts, or why there is none",
        ("outcome", "checkpoint_segment", "reason", "acceptance_length", "acceptance_ci", "survival_per_position", "decode_s"),
    ),
}
"""Event -> (meaning, what its details hold)."""

EVALUATION: Final = {
    "acceptance_length": "tokens committed per target verification, pooled; 1 is plain decoding",
    "acceptance_length_macro": "the same, first of each prompt, then the mean",
    "acceptance_length_untruncated": "drafts behind a stop token or the length limit counted too, as others print it",
    "accepted_length": "accepted drafts per verification, without the target's own token",
    "acceptance_ci_low": "lower end of the bootstrap interval over prompts",
    "acceptance_ci_high": "upper end",
    "speedup": "plain time a token by speculative time a token, prefill excluded",
    "speedup_ci_low": "lower end of its bootstrap interval",
    "speedup_ci_high": "upper end",
    "plain_s_per_token": "seconds a token, plain decoding",
    "speculative_s_per_token": "seconds a token with the drafter",
    "plain_tokens_per_s": "its reciprocal",
    "speculative_tokens_per_s": "its reciprocal",
    "target_frac": "share of the speculative time in the target",
    "drafter_frac": "in the drafter",
    "other_frac": "elsewhere",
    "differing_prompts": "prompts whose tokens are not those of plain decoding",
    "near_tie_prompts": "of them, those explained by two nearly equal logits",
    "divergence_frac": "share of the prompts that differ",
    "lossless": "1 if every prompt is equal, or differs by a near tie alone",
    "batch_size": "prompts decoded together",
    "survival_at_N": "share of the verifications whose first N drafts were all accepted",
    "conditional_at_N": "accepted at position N, of those that reached it",
    "SET/acceptance_length": "of one prompt set, where there are several",
    "SET/acceptance_length_macro": "likewise",
    "SET/speedup": "likewise",
    "SET/speculative_tokens_per_s": "likewise",
}
"""Metric under `eval/<drafter>/`; N is a position, SET the name of a prompt set."""

OTHERS: Final = {
    "train/bucket_loss/N": "mean cross-entropy of the step's micro-batches of bucket N",
    "probe/acceptance_length": "acceptance length of a checkpoint on the probe's prompts, at the checkpoint's step",
    "probe/acceptance_ci_low": "lower end of its interval",
    "probe/acceptance_ci_high": "upper end",
    "sweep/best/block_size": "setting with the most tokens a second in `evaluate --sweep`: drafted block",
    "sweep/best/batch_size": "prompts decoded together",
    "sweep/best/temperature": "sampling temperature",
    "sweep/best/tokens_per_s": "of all rows together",
    "sweep/best/speedup": "over plain decoding in the same setting",
    "summary/acceptance_length": "closing table: acceptance length of the trained drafter, on the last evaluation",
    "summary/acceptance_length_untrained": "the same before training",
    "summary/speedup": "over plain decoding",
    "summary/padding_efficiency": "share of the trained tokens that were real",
    "summary/longest_bucket_run": "batches of one bucket in a row, at most",
    "summary/feature_wait_frac": "share of its time that the drafter waited for features",
    "summary/train_time_s": "time of all live steps",
    "compare/acceptance_difference": "this run's acceptance length minus the reference run's, in the run that was compared last",
}

TAGS: Final = {
    "group": "`run.name` of the configuration: what belongs together",
    "run": "name of the run's folder",
    "segment": "number of the segment: one MLflow run each, so that no step has two values",
    "parent_run": "MLflow run of the segment before",
    "rolled_back_to_step": "checkpoint that this segment began from",
    "rung": "rung of the rollback's ladder",
    "abandoned_for_segment": "in a segment that a rollback left: the one that goes on instead",
    "health": "last verdict of the health check",
    "ended_by": "class of the error that ended the training, if one did",
    "compared_with": "reference run of the last comparison",
    "compare_verdict": "its outcome",
}

VERSION_TAGS: Final = {
    "drafter_sha256": "hash of configuration and weights: a drafter is registered once",
    "artifact_path": "where its files lie among the artifacts of the MLflow run that trained it",
    "run": "name of the run's folder",
    "step": "checkpoint",
    "segment": "segment that wrote it",
    "target_fingerprint": "target that it was trained for",
    "prompts_sha256": "prompts on which it was measured",
    "acceptance_length": "measured on them",
    "acceptance_ci": "its interval",
    "champion_verdict": "whether it took the place of the champion",
    "champion_reason": "why, or why not",
    "champion_gain": "interval of the difference to the champion before it, on the same prompts",
    "champion_before": "version that was the champion when it was challenged",
}
"""Tags of a version of the registered model."""
