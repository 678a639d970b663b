"""What saving and logging cost the training loop: blocked time, slower steps while a save is written, records.

A drafter's step (of the shape of `overlap_pair`, one torch thread) runs in a loop beside the real checkpoint writer, which
has 300 MB to save. Phases alternate, so that other work on the machine meets all of them: 50 steps without a save, 50 steps
with one. Logging is timed by itself: the caller's share of one record, and the CPU time of record and writer together.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.overlap_pair import OverlapPair
from benchmarks.report import benchmark_parser, publish
from dflash.checkpoint import CheckpointWriter, RunIdentity, WriterHooks
from dflash.config import CheckpointConfig
from dflash.records import StepRecord, TrainerState
from dflash.train.features import FeatureBatch
from dflash.train.metrics import BatchFacts, RankReport, StepContext, step_record
from dflash.train.run_log import RunLog

NAME = "checkpoint_stall"
STATE_BYTES = 300_000_000
SAVE_EVERY_STEPS = 50
RECORDS = 2000
IDENTITY = RunIdentity(data_fingerprint="d" * 64, target_fingerprint="t" * 64, mask_token_id=1)


class SaveClock:
    """Collects what the writer reports."""

    def __init__(self) -> None:
        self.blocked_s: list[float] = []
        self.write_s: list[float] = []
        self.done = threading.Event()

    def on_event(self, name: str, _step: int, details: Mapping[str, Any]) -> None:
        """Note the two durations of a save."""
        if name == "save_staged":
            self.blocked_s.append(details["blocked_s"])
        elif name == "save_durable":
            self.write_s.append(details["write_s"])
            self.done.set()


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as cleanup:
        folder = Path(name)
        pair = OverlapPair(folder)
        clock = SaveClock()
        writer = _writer(folder / "checkpoints", clock)
        cleanup.callback(writer.close)
        figures: dict[str, Any] = {"state_mb": round(writer.buffer_bytes / 1e6)}
        figures |= _stalls(pair, writer, clock, rounds=2 if arguments.quick else 3, steps=15 if arguments.quick else 50)
        figures |= _logging(pair, folder / "log.jsonl", step_s=figures["step_s"])
    publish(NAME, figures, arguments)
    return 0


def _writer(directory: Path, clock: SaveClock) -> CheckpointWriter:
    """A writer of 300 MB: weights, and two moments of the same size."""
    rows = STATE_BYTES // (3 * 4 * 1000 * 10)
    weights = {f"layer.{index}": torch.randn(rows, 1000) for index in range(10)}
    moments = {f"{name}.{kind}": torch.randn_like(tensor) for name, tensor in weights.items() for kind in ("m", "v")}

    def defect(error: BaseException) -> None:
        raise error

    hooks = WriterHooks(
        before_snapshot=lambda: None,
        whole=lambda tensor: tensor,
        before_commit=lambda: None,
        on_event=clock.on_event,
        on_defect=defect,
        on_operation=lambda _name: None,
    )
    rule = CheckpointConfig()
    return CheckpointWriter(directory, identity=IDENTITY, drafter=weights, optimizer=moments, rule=rule, hooks=hooks)


def _stalls(pair: OverlapPair, writer: CheckpointWriter, clock: SaveClock, *, rounds: int, steps: int) -> dict[str, Any]:
    plain, saving, slowed = [], [], []
    step = pair.repeated_step()
    for number in range(rounds):
        plain.append(_mean_step_s(step, steps))
        begin_s = time.perf_counter()
        clock.done.clear()
        writer.save(_state(number), wait=False)
        during: list[float] = []
        for _ in range(steps):
            step_begin_s = time.perf_counter()
            step()
            if not clock.done.is_set():
                during.append(time.perf_counter() - step_begin_s)
        saving.append((time.perf_counter() - begin_s) / steps)
        clock.done.wait()
        slowed.extend(during)
    step_s = statistics.median(plain)
    overhead_s = statistics.median(after - before for before, after in zip(plain, saving, strict=True)) * steps
    return {
        "step_s": round(step_s, 4),
        "blocked_ms": round(1000 * statistics.median(clock.blocked_s), 1),
        "blocked_ms_spread": [round(1000 * min(clock.blocked_s), 1), round(1000 * max(clock.blocked_s), 1)],
        "write_s": round(statistics.median(clock.write_s), 2),
        "slowdown_while_writing": round(statistics.median(slowed) / step_s, 3) if slowed else None,
        "steps_while_writing": len(slowed),
        "save_every_50_steps_costs_frac": round(overhead_s / (SAVE_EVERY_STEPS * step_s), 4),
        "rounds": rounds,
    }


def _mean_step_s(step: Any, steps: int) -> float:
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin_s) / steps


def _logging(pair: OverlapPair, path: Path, *, step_s: float) -> dict[str, Any]:
    context = StepContext(
        segment=0, step=0, wall_time_s=0.0, mono_time_s=0.0, lr=1e-3, warmup_factor=1.0, plan_position=1, step_time_s=step_s
    )  # fmt: skip
    update, batches = pair.one_update()
    begin_s = time.perf_counter()
    records: list[StepRecord] = [step_record(context, update, [_report(batches)]) for _ in range(RECORDS)]
    metrics_s = (time.perf_counter() - begin_s) / RECORDS

    def defect(error: BaseException) -> None:
        raise error

    log = RunLog(path, segment=0, capacity_records=RECORDS, heartbeat_s=60.0, on_defect=defect)
    call_s, written_s = [], time.process_time()
    for record in records:
        begin_s = time.perf_counter()
        log.step(record)
        call_s.append(time.perf_counter() - begin_s)
        time.sleep(0)  # a trainer computes between two records; the writer gets its turn then
    log.close()
    written_s = (time.process_time() - written_s) / RECORDS
    return {
        "log_call_us": round(1e6 * statistics.median(call_s), 1),
        "log_call_us_p99": round(1e6 * sorted(call_s)[int(0.99 * RECORDS)], 1),
        "metrics_us": round(1e6 * metrics_s, 1),
        "log_and_metrics_cpu_frac_of_step": round((metrics_s + written_s) / step_s, 5),
    }


def _report(batches: Sequence[FeatureBatch]) -> RankReport:
    facts = tuple(BatchFacts.of(batch) for batch in batches)
    return RankReport(batches=facts, wait_time_s=0.0, depths=(1, 1), finished=(1,), stop=False)


def _state(step: int) -> TrainerState:
    return TrainerState(
        step=step, plan_position=step, segment=0, plan_sha256="p" * 64, config_sha256="c" * 64, seed=0, total_steps=10**6,
        skipped_positions=(), overlay=None, nonfinite_in_row=0,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
