"""Plain words: what a verdict means, and what to do about a finding. Text only."""

from __future__ import annotations

from dflash.records import Verdict

VERDICT_MEANS: dict[Verdict, str] = {
    "healthy": "Nothing needs doing.",
    "watch": "Nothing is damaged, but something is worth a look while the run goes on.",
    "unhealthy": "The weights are, or will be, damaged. Stop the run and go back to a clean checkpoint.",
    "blind": "The log says too little to judge the run. Not knowing is not the same as healthy.",
}

WHAT_TO_DO: dict[str, str] = {
    "non-finite": "Look at the batches named; lower the learning rate or check the loss in half precision if it comes again.",
    "gradient spike": "Clipping absorbs a lone one. If loss spikes follow, look at the batches named.",
    "loss spike": "One that settles needs nothing. If the same batches do it again, take their samples out.",
    "lr mismatch": "Compare the trainer's schedule with the configuration: the run is not training as configured.",
    "bucket run": "Interleave the buckets of the plan better, or allow a shorter longest run.",
    "queue decline": "A producer is losing ground: add target workers, or look at the reader's storage.",
    "save failure": "Look at the disk: until a save is durable, a crash loses everything since the last one.",
    "step integrity": "Make sure that one trainer writes this log, and that every restart begins a new segment.",
    "stale log": "See whether the trainer is still alive; its output is in trainer.out.",
}
