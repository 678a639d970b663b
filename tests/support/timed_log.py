"""Log records at given seconds, for tests of timelines: one replica, steps of a tenth of a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.records import EventRecord, MicroBatchRecord, StepRecord, to_json

WALL_S = 1_800_000_000.0
Record = StepRecord | EventRecord


def micro(batch_id: int, *, epoch: int = 0, rank: int = 0) -> MicroBatchRecord:
    return MicroBatchRecord(
        batch_id=batch_id, bucket=batch_id % 3, epoch=epoch, rows=(batch_id,), padded_length_tokens=8, length_min_tokens=8,
        length_max_tokens=8, length_sum_tokens=8, n_seqs=1, n_tokens=4, n_blocks=1, supervised_tokens=4, covered_tokens=4,
        ce_sum=4.0, objective_sum=4.0, objective_weight=4.0, accepted_sum=1.0, correct=(1,), valid=(4,), rank=rank,
    )  # fmt: skip


def step(number: int, at_s: float, *, lasts_s: float = 0.1, wait_s: float = 0.0, segment: int = 0, **more: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "segment": segment, "step": number, "wall_time_s": WALL_S + at_s, "mono_time_s": 500.0 + at_s, "ce": 2.0, "objective": 2.0,
        "accuracy": 0.1, "accepted_length": 0.5, "coverage_frac": 1.0, "grad_norm": 1.0, "clip_coef": 1.0, "lr": 1e-3,
        "warmup_factor": 1.0, "skipped": False, "nonfinite": (), "micro_batches": (micro(number),), "plan_position": number + 1,
        "padding_frac": 0.0, "step_time_s": lasts_s, "wait_time_s": wait_s, "tokens_per_s": 80.0, "ready_depth": 7,
        "feature_depth": 3, "target_depths": (number + 2,), "rank_wait_s": (wait_s,),
    }  # fmt: skip
    return StepRecord(**(fields | more))


def event(name: Any, number: int, at_s: float, *, segment: int = 0, mono_from: float = 500.0, **details: Any) -> EventRecord:
    return EventRecord(segment, number, WALL_S + at_s, mono_from + at_s, name, details)


def written(folder: Path, records: Sequence[Record], *, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train_log.jsonl"
    log.write_text("".join(to_json(record) + "\n" for record in records) + tail)
    return log


def rolled_back() -> list[Record]:
    """Ten steps with a save at 4, damage at 8, back to 4, and on."""
    first: list[Record] = [event("start", 0, 0.0, total_steps=20)]
    first += [step(number, 1.0 + 0.2 * number, wait_s=0.05 if number == 3 else 0.0) for number in range(5)]
    first += [
        event("save_begin", 4, 2.01),
        event("save_staged", 4, 2.03, blocked_s=0.02, bytes=7),
        step(5, 2.1),
        event("save_durable", 4, 2.5, write_s=0.4, bytes=9, finite=True),
    ]
    first += [step(number, 2.5 + 0.2 * (number - 6)) for number in range(6, 10)]
    first += [
        event("stop_requested", 9, 3.4),
        event("rollback_begin", 9, 4.0, key="k", rung=1, target_step=4),
        event("rollback_end", 4, 4.25, segment=1, key="k", rung=1, target_step=4, skipped=[[8, 10]]),
        event("resume", 4, 6.0, segment=1, total_steps=20),
    ]
    # A micro-batch of epoch 1 from step 6 on.
    second = [
        step(number, 6.5 + 0.2 * (number - 4), segment=1, micro_batches=(micro(number, epoch=int(number >= 6)),))
        for number in range(4, 8)
    ]
    return [*first, *second, event("finish", 8, 8.0, segment=1)]
