"""The replica's supply under thousands of seeded schedules: order, exactly once, bounded bytes, its own error, no deadlock.

Stages are fakes whose delays are turns given away, so that nothing depends on a clock; `DFLASH_SCHEDULES` sets how many seeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

from dflash.config import QueueConfig
from dflash.train import pipeline as pipeline_module
from dflash.train import queues as queues_module
from dflash.train import replica as replica_module
from dflash.train.pipeline import Pipeline
from dflash.train.queues import ByteQueue, PipelineStopped, QueueClosed, ReorderWindow
from dflash.train.replica import FeatureSupply
from tests.support.schedules import DeadlockError, SeededThreads

SCHEDULES = int(os.environ.get("DFLASH_SCHEDULES", "1600"))
CHUNKS = 4


class PlantedError(Exception):
    """The failure that a stage was told to have."""


@dataclass(frozen=True)
class Item:
    number: int
    nbytes: int


@dataclass(frozen=True)
class Case:
    """What one seed tries.

    Attributes:
        fails: stage and batch at which it fails, None for a run without a failure.
        leaves_at: batch after which the consumer shuts down, None to take everything.

    """

    sizes: tuple[int, ...]
    targets: int
    ready_bytes: int
    feature_bytes: int
    delays: tuple[tuple[int, ...], ...]
    fails: tuple[str, int] | None
    leaves_at: int | None


def case_of(seed: int) -> Case:
    draw = random.Random(f"case {seed}")
    batches, targets = draw.randrange(13), draw.randint(1, 4)
    slow = [draw.choice([0, 0, 1, 5]) for _ in range(targets + 2)]
    fate = draw.choice(["end", "end", "fail", "leave"]) if batches else "end"
    return Case(
        sizes=tuple(draw.choice([0, 1, 1, 2, 3, 9]) for _ in range(batches)),
        targets=targets,
        ready_bytes=draw.randint(1, 6),
        feature_bytes=draw.randint(1, 6),
        delays=tuple(tuple(draw.randint(0, most) for _ in range(batches)) for most in slow),
        fails=(draw.choice(["reader", "target"]), draw.randrange(batches)) if fate == "fail" else None,
        leaves_at=draw.randrange(batches) if fate == "leave" else None,
    )


class Simulation:
    """One case under one schedule, with its own account of the bytes that are alive."""

    def __init__(self, case: Case, threads: SeededThreads) -> None:
        self.case, self.threads = case, threads
        self.alive_bytes = self.peak_bytes = 0
        self.made: list[int] = []
        self.reader_closed = False
        self.supply: FeatureSupply[Item, Item] = FeatureSupply(
            self._read(),
            makers=[self._maker(index) for index in range(case.targets)],
            threads=1,
            queues=QueueConfig(ready_bytes=case.ready_bytes, feature_bytes=case.feature_bytes, log_records=1),
        )

    def consume(self) -> list[int]:
        """Take batches as the case says; always shuts down."""
        taken: list[int] = []
        self.supply.start()
        try:
            for number in range(len(self.case.sizes)):
                if self.case.leaves_at == number:
                    break
                item, _ = self.supply.next()
                self.threads.pause(self.case.delays[-1][number])
                self.alive_bytes -= item.nbytes
                taken.append(item.number)
            if self.case.leaves_at is None:
                with pytest.raises(QueueClosed):
                    self.supply.next()
        finally:
            self.supply.shut_down()
        return taken

    def _read(self) -> Generator[Item, None, None]:
        try:
            for number, nbytes in enumerate(self.case.sizes):
                self.threads.pause(self.case.delays[-2][number])
                self._maybe_fail("reader", number)
                self.alive_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
                yield Item(number, nbytes)
        finally:
            self.reader_closed = True

    def _maker(self, index: int) -> Callable[[Item], Item]:
        def make(item: Item) -> Item:
            self.threads.pause(self.case.delays[index][item.number])
            self._maybe_fail("target", item.number)
            self.made.append(item.number)
            return item

        return make

    def _maybe_fail(self, stage: str, number: int) -> None:
        if self.case.fails == (stage, number):
            raise PlantedError(f"{stage} {number}")

    @property
    def bound_bytes(self) -> int:
        """What the configuration promises: both queues, the expected batch beyond the window, one batch a thread."""
        largest = max(self.case.sizes, default=0)
        return max(self.case.ready_bytes, largest) + self.case.feature_bytes + largest * (self.case.targets + 2) + largest


def use(threads: SeededThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (queues_module, pipeline_module, replica_module):
        monkeypatch.setattr(module, "threading", threads)


def run_seed(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    case, threads = case_of(seed), SeededThreads(seed)
    use(threads, monkeypatch)
    simulation = Simulation(case, threads)
    batches = len(case.sizes)
    if case.fails is None:
        taken = simulation.consume()
        assert taken == list(range(batches if case.leaves_at is None else case.leaves_at))
    else:
        with pytest.raises(PlantedError, match=f"^{case.fails[0]} {case.fails[1]}$"):
            simulation.consume()
        taken = []
    if case.fails is None and case.leaves_at is None:
        assert sorted(simulation.made) == list(range(batches)), "every batch is made once"
        assert sum(simulation.supply.finished) == batches
        assert simulation.alive_bytes == 0
    assert len(set(simulation.made)) == len(simulation.made), "no batch is made twice"
    assert simulation.peak_bytes <= simulation.bound_bytes
    assert simulation.supply.counters["ready"]["peak_bytes"] <= max(case.ready_bytes, *case.sizes, 0)
    assert simulation.supply.counters["features"]["peak_bytes"] <= case.feature_bytes + max(case.sizes, default=0)
    assert threads.unfinished == [], "every thread has ended"
    return simulation.made, threads.switches


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_order_bounds_or_the_end(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = set()
    for seed in range(chunk * SCHEDULES // CHUNKS, (chunk + 1) * SCHEDULES // CHUNKS):
        try:
            made, _ = run_seed(seed, monkeypatch)
        except (AssertionError, DeadlockError) as error:
            raise AssertionError(f"seed {seed}, {case_of(seed)}: {error}") from error
        orders.add(tuple(made))
    assert len(orders) >= min(100, SCHEDULES // CHUNKS // 10), "the schedules differ"


def test_a_seed_repeats_itself_to_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(40)
    assert [run_seed(seed, monkeypatch) for seed in seeds] == [run_seed(seed, monkeypatch) for seed in seeds]


def test_a_deadlock_is_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = SeededThreads(1)
    use(threads, monkeypatch)
    first: ByteQueue[int] = ByteQueue(limit_bytes=1)
    second: ByteQueue[int] = ByteQueue(limit_bytes=1)
    pipeline = Pipeline([])
    pipeline.start("left", lambda: second.put(first.get(), nbytes=1))
    with pytest.raises(DeadlockError, match=r"main waits for .*left waits for "):
        second.get()


def test_a_window_that_admits_by_room_alone_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(window: ReorderWindow[Item], number: int, item: Item, *, nbytes: int) -> None:
        with window._changed:
            window._wait_for_room(lambda: not window._items or window._held_bytes + nbytes <= window._limit_bytes)
            window._items[number] = (item, nbytes)
            window._account(nbytes)

    def try_all() -> None:
        for seed in range(400):
            run_seed(seed, monkeypatch)

    monkeypatch.setattr(ReorderWindow, "put", put)
    with pytest.raises(DeadlockError):
        try_all()


def test_a_failure_reaches_a_consumer_that_waits_already(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        threads = SeededThreads(seed)
        use(threads, monkeypatch)
        queue: ByteQueue[int] = ByteQueue(limit_bytes=1)
        pipeline = Pipeline([queue])

        def explode(threads: SeededThreads = threads) -> None:
            threads.pause(5)
            raise PlantedError

        pipeline.start("stage", explode)
        with pytest.raises(PipelineStopped):
            queue.get()
        with pytest.raises(PlantedError):
            pipeline.raise_error()
        pipeline.shut_down()
        assert threads.unfinished == []
