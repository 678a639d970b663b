"""What the pipeline of a replica is worth: who is busy, how the supply scales, claims against round-robin, overlap.

The first four questions are put to the real queues, reorder window and threads with sleeping stages (a sleep holds neither
a core nor the interpreter lock, so T of them stand for T devices). The last one, overlap, runs a real target and a real
drafter, one torch thread each, in turns with the same work done one after the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.overlap_pair import OverlapPair
from benchmarks.report import benchmark_parser, publish
from dflash.config import QueueConfig
from dflash.train.pipeline import Pipeline
from dflash.train.queues import ByteQueue, QueueClosed, ReorderWindow
from dflash.train.replica import FeatureSupply

NAME = "pipeline"
ITEM_BYTES = 1
QUEUES = QueueConfig(ready_bytes=8, feature_bytes=8, log_records=1)
"""Eight batches on each side, so that an empty queue means a starved stage and nothing else."""


@dataclass(frozen=True, slots=True)
class Item:
    """A batch of which only the size matters."""

    nbytes: int = ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Timing:
    """One simulated run: its wall time, and what every target did."""

    wall_s: float
    stepping_s: float
    working_s: tuple[float, ...]
    finished: tuple[int, ...]


class SleepingTarget:
    """A target that takes `cost_s` for every batch and notes how long it really took."""

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self.working_s = 0.0
        self.finished = 0

    def __call__(self, item: Item) -> Item:
        """Make the features of one batch."""
        begin_s = time.perf_counter()
        time.sleep(self._cost_s)
        self.working_s += time.perf_counter() - begin_s
        self.finished += 1
        return item


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    batches, rounds = (60, 1) if arguments.quick else (240, 3)
    figures: dict[str, Any] = _busy(batches) | _scaling(batches, rounds) | _claims(batches, rounds)
    with tempfile.TemporaryDirectory() as folder:
        figures |= _overlap(Path(folder), steps=6 if arguments.quick else 16, rounds=1 if arguments.quick else 3)
    publish(NAME, figures, arguments)
    return 0


def _busy(batches: int) -> dict[str, Any]:
    fast = simulate([0.005], batches=batches, step_s=0.010)
    slow = simulate([0.040, 0.040], batches=batches // 2, step_s=0.002)
    return {
        "drafter_busy_frac_with_fast_features": round(fast.stepping_s / fast.wall_s, 4),
        "targets_busy_frac_with_slow_targets": [round(busy / slow.wall_s, 4) for busy in slow.working_s],
    }


def _scaling(batches: int, rounds: int) -> dict[str, Any]:
    shares: dict[int, list[float]] = {2: [], 4: [], 8: []}
    for _ in range(rounds):
        one_s = simulate([0.020], batches=batches // 4, step_s=0.0).wall_s / (batches // 4)
        for targets, found in shares.items():
            many_s = simulate([0.020] * targets, batches=batches, step_s=0.0).wall_s / batches
            found.append(one_s / many_s / targets)
    return {f"supply_of_{targets}_over_linear": round(statistics.median(found), 4) for targets, found in shares.items()}


def _claims(batches: int, rounds: int) -> dict[str, Any]:
    costs = [0.010, 0.020]
    ratios, claimed = [], None
    for _ in range(rounds):
        claimed = simulate(costs, batches=batches, step_s=0.0)
        ratios.append(round_robin(costs, batches=batches).wall_s / claimed.wall_s)
    assert claimed is not None
    return {
        "claims_over_round_robin": round(statistics.median(ratios), 3),
        "claims_over_round_robin_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "claims_batches_of_fast_and_slow_target": list(claimed.finished),
        "claims_busy_frac_of_fast_and_slow_target": [round(busy / claimed.wall_s, 4) for busy in claimed.working_s],
    }


def simulate(costs_s: Sequence[float], *, batches: int, step_s: float) -> Timing:
    """Run `batches` through targets of these costs and a drafter that takes `step_s`."""
    targets = [SleepingTarget(cost_s) for cost_s in costs_s]
    supply: FeatureSupply[Item, Item] = FeatureSupply(_items(batches), makers=targets, threads=1, queues=QUEUES)
    begin_s = time.perf_counter()
    supply.start()
    stepping_s = 0.0
    for _ in range(batches):
        supply.next()
        step_begin_s = time.perf_counter()
        if step_s:
            time.sleep(step_s)
        stepping_s += time.perf_counter() - step_begin_s
    wall_s = time.perf_counter() - begin_s
    supply.shut_down()
    return _timing(wall_s, stepping_s, targets)


def round_robin(costs_s: Sequence[float], *, batches: int) -> Timing:
    """The same with a queue a target, filled in turn: what a launcher without coordination does."""
    targets = [SleepingTarget(cost_s) for cost_s in costs_s]
    queues: list[ByteQueue[int]] = [ByteQueue(limit_bytes=QUEUES.ready_bytes // len(costs_s)) for _ in costs_s]
    window: ReorderWindow[Item] = ReorderWindow(limit_bytes=QUEUES.feature_bytes, first=0)
    pipeline = Pipeline([*queues, window])

    def read() -> None:
        for number in range(batches):
            queues[number % len(queues)].put(number, nbytes=ITEM_BYTES)
        for queue in queues:
            queue.close()

    def work(index: int) -> Callable[[], None]:
        def run() -> None:
            with suppress(QueueClosed):
                while True:
                    number = queues[index].get()
                    window.put(number, targets[index](Item()), nbytes=ITEM_BYTES)

        return run

    begin_s = time.perf_counter()
    pipeline.start("reader", read)
    for index in range(len(targets)):
        pipeline.start(f"target-{index}", work(index))
    for _ in range(batches):
        window.get()
    wall_s = time.perf_counter() - begin_s
    pipeline.shut_down()
    return _timing(wall_s, 0.0, targets)


def _timing(wall_s: float, stepping_s: float, targets: Sequence[SleepingTarget]) -> Timing:
    return Timing(
        wall_s=wall_s,
        stepping_s=stepping_s,
        working_s=tuple(target.working_s for target in targets),
        finished=tuple(target.finished for target in targets),
    )


def _items(count: int) -> Generator[Item, None, None]:
    for _ in range(count):
        yield Item()


def _overlap(folder: Path, *, steps: int, rounds: int) -> dict[str, Any]:
    pair = OverlapPair(folder)
    target_s, drafter_s = pair.calibrate()
    ratios, busy = [], []
    for _ in range(rounds):
        sequential_s = pair.sequential(steps)
        pipelined_s, waited_s = pair.pipelined(steps)
        ratios.append(pipelined_s / sequential_s)
        busy.append(1.0 - waited_s / pipelined_s)
    return {
        "overlap_target_s": round(target_s, 3),
        "overlap_drafter_s": round(drafter_s, 3),
        "overlap_over_sequential": round(statistics.median(ratios), 3),
        "overlap_over_sequential_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "overlap_drafter_busy_frac": round(statistics.median(busy), 3),
        "overlap_steps": steps,
        "overlap_rounds": rounds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
