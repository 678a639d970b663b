"""Plain words: what a verdict means, and what to do about a finding. Text only."""

from __future__ import annotations

from dflash.health.decision import is_damage
from dflash.records import Finding, Verdict

VERDICT_MEANS: dict[Verdict, str] = {
    "healthy": "Training goes as it should. Nothing needs doing.",
    "watch": "Nothing is damaged, but something is worth a look. The run may go on meanwhile.",
    "unhealthy": "The weights are, or will be, damaged. Stop the run and go back to a saved state from before the damage.",
    "blind": "The log says too little to judge the run. Not knowing is not the same as healthy.",
}

STOP = "Stop the run, go back to a clean checkpoint, and leave out these batches."

WHAT_TO_DO: dict[str, str] = {
    "non-finite": "Look at these batches; lower the learning rate, or the precision is too low, if it comes again.",
    "gradient spike": "Clipping absorbs a lone one. If a loss spike follows, look at these batches.",
    "loss spike": "One that settles needs nothing. If the same batches do it again, take their samples out.",
    "sustained rise": "Look at the batches at its onset and at what changed there.",
    "divergence": "Lower the learning rate or go back: the bucket has been getting worse for a long time.",
    "accuracy drop": "The loss tells whether it is real; if the loss is calm, look at how accuracy is measured.",
    "gradient explosion": "Lower the learning rate, and look at the batches where it began.",
    "dead metric": "The sensor is broken, not the run: look at how this number is measured.",
    "save correlation": "Look at what a save does to the trainer: buffers, random states, threads.",
    "save stall": "Look at the disk and at how long the snapshot blocks training; a save that hangs needs a restart.",
    "bucket mix": "Nothing: judge each bucket by itself.",
    "simple rules": "Nothing: these are counted, and never acted on.",
    "short window": "Nothing: too few samples for the height to mean anything.",
    "share drift": "Compare the plan with what is consumed: a bucket runs out, or batches are skipped.",
    "target imbalance": "Look at the slow target's device: clocks, temperature, another process.",
    "throughput": "Look at the devices, the reader's storage and the queues: which stage starves?",
    "bad resume": "The state that was loaded is not the one that was saved: optimizer, schedule or weights.",
    "repeated data": "The plan position was not restored: the same samples are trained on again.",
    "lr mismatch": "Compare the trainer's schedule with the configuration: the run is not training as configured.",
    "bucket run": "Interleave the buckets of the plan better, or allow a shorter longest run.",
    "queue decline": "A producer is losing ground: add target workers, or look at the reader's storage.",
    "save failure": "Look at the disk: until a save is durable, a crash loses everything since the last one.",
    "step integrity": "Make sure that one trainer writes this log, and that every restart begins a new segment.",
    "stale log": "See whether the trainer is still alive; its output is in trainer.out.",
}


def what_to_do(finding: Finding) -> str:
    """One sentence for the person who reads about `finding`."""
    return STOP if is_damage(finding) else WHAT_TO_DO[finding.detector]


def is_settled(finding: Finding) -> bool:
    """Whether a finding is over by itself, or was never more than a note."""
    return finding.severity == "info" or "resolved_step" in finding.values


def batches_in_words(finding: Finding) -> str:
    """The plan positions that a finding names, as a range where they are one."""
    ids = finding.batch_ids
    if not ids:
        return ""
    if len(ids) == 1:
        return f"batch {ids[0]} of the plan"
    if ids[-1] - ids[0] == len(ids) - 1:
        return f"batches {ids[0]} to {ids[-1]} of the plan"
    shown = ", ".join(map(str, ids[:12]))
    return f"batches {shown}{f' and {len(ids) - 12} more' if len(ids) > 12 else ''} of the plan"
