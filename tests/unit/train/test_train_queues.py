"""Queues, reorder window and the supply: order, exactly once, bounded memory, no hang whatever fails."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import QueueConfig
from dflash.train.pipeline import Pipeline
from dflash.train.queues import ByteQueue, PipelineStopped, QueueClosed, ReorderWindow
from dflash.train.replica import FeatureSupply

JOIN_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def _switch_threads_often() -> Iterator[None]:
    """Let the interpreter change threads every few bytecodes, so that small examples interleave."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


THREADED = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Item:
    position: int
    nbytes: int


def run_threads(*bodies: Callable[[], None]) -> None:
    """Run the bodies at once and require that all of them end; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def waiting(channel: ByteQueue[int] | ReorderWindow[int]) -> Callable[[], bool]:
    """Whether some thread waits inside the channel."""
    return lambda: len(channel._changed._waiters) > 0  # type: ignore[attr-defined]


def spin_until(condition: Callable[[], bool], *, thread: threading.Thread) -> None:
    while not condition():
        assert thread.is_alive()


@THREADED
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 60), st.integers(1, 3), st.integers(1, 3))
def test_the_queue_hands_over_every_item_once_within_its_bound(
    sizes: list[int], limit: int, producers: int, consumers: int
) -> None:
    queue: ByteQueue[int] = ByteQueue(limit_bytes=limit)
    taken: list[list[int]] = [[] for _ in range(consumers)]
    left = threading.Semaphore(producers - 1)

    def produce(index: int) -> None:
        for number in range(index, len(sizes), producers):
            queue.put(number, nbytes=sizes[number])
        if not left.acquire(blocking=False):
            queue.close()

    def consume(index: int) -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                taken[index].append(queue.get())

    run_threads(
        *(lambda index=index: produce(index) for index in range(producers)),  # type: ignore[misc]
        *(lambda index=index: consume(index) for index in range(consumers)),  # type: ignore[misc]
    )
    assert sorted(number for numbers in taken for number in numbers) == list(range(len(sizes)))
    if producers == 1:
        assert all(numbers == sorted(numbers) for numbers in taken)
    assert queue.counters.puts == queue.counters.gets == len(sizes)
    assert queue.counters.peak_bytes <= max([limit, *sizes])


@THREADED
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 60), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_window_restores_the_order_within_its_bound(sizes: list[int], limit: int, producers: int, random: object) -> None:
    window: ReorderWindow[int] = ReorderWindow(limit_bytes=limit, first=0)
    owners = [random.randrange(producers) for _ in sizes]  # type: ignore[attr-defined]
    taken: list[int] = []

    def produce(index: int) -> None:
        for number, owner in enumerate(owners):
            if owner == index:
                window.put(number, number, nbytes=sizes[number])

    def consume() -> None:
        taken.extend(window.get() for _ in sizes)

    run_threads(consume, *(lambda index=index: produce(index) for index in range(producers)))  # type: ignore[misc]
    assert taken == list(range(len(sizes)))
    # The one item beyond the bound is the expected one.
    assert window.counters.peak_bytes <= limit + max([0, *sizes])
    window.close()
    with pytest.raises(QueueClosed):
        window.get()


def test_the_expected_item_is_admitted_into_a_full_window_and_others_are_not() -> None:
    window: ReorderWindow[str] = ReorderWindow(limit_bytes=10, first=5)
    window.put(6, "b", nbytes=10)
    blocked = threading.Thread(target=lambda: window.put(7, "c", nbytes=1), daemon=True)
    blocked.start()
    spin_until(waiting(window), thread=blocked)  # type: ignore[arg-type]
    window.put(5, "a", nbytes=10)
    assert [window.get(), window.get(), window.get()] == ["a", "b", "c"]
    blocked.join(JOIN_S)
    assert window.counters.blocked_puts == 1


def test_a_number_that_comes_twice_is_a_defect_and_not_silently_lost() -> None:
    window: ReorderWindow[str] = ReorderWindow(limit_bytes=10, first=0)
    window.put(0, "a", nbytes=1)
    with pytest.raises(RuntimeError, match="came twice"):
        window.put(0, "a", nbytes=1)
    window.get()
    with pytest.raises(RuntimeError, match="came twice"):
        window.put(0, "a", nbytes=1)


@pytest.mark.parametrize("kind", ["full queue", "empty queue", "full window", "empty window"])
def test_fail_wakes_whoever_waits_and_refuses_whoever_comes(kind: str) -> None:
    queue: ByteQueue[int] = ByteQueue(limit_bytes=1)
    window: ReorderWindow[int] = ReorderWindow(limit_bytes=1, first=0)
    queue_is_meant = kind.endswith("queue")
    channel = queue if queue_is_meant else window
    if kind == "full queue":
        queue.put(1, nbytes=1)
    if kind == "full window":
        window.put(1, 1, nbytes=1)

    def use() -> None:
        if kind == "full queue":
            queue.put(2, nbytes=1)
        elif kind == "full window":
            window.put(2, 2, nbytes=1)
        else:
            channel.get()

    stopped: list[bool] = []

    def body() -> None:
        with pytest.raises(PipelineStopped):
            use()
        stopped.append(True)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    spin_until(waiting(channel), thread=thread)
    channel.fail()
    thread.join(JOIN_S)
    assert stopped == [True]
    with pytest.raises(PipelineStopped):
        use()


def test_counters_tell_which_side_waited() -> None:
    queue: ByteQueue[int] = ByteQueue(limit_bytes=1)
    consumer = threading.Thread(target=queue.get, daemon=True)
    consumer.start()
    spin_until(waiting(queue), thread=consumer)
    queue.put(1, nbytes=1)
    consumer.join(JOIN_S)
    assert (queue.counters.starved_gets, queue.counters.blocked_puts) == (1, 0)
    assert queue.counters.starved_s > 0
    assert len(queue) == 0


def supply_of(
    positions: list[int],
    *,
    read: Callable[[int], Item],
    makers: list[Callable[[Item], Item]],
    ready_bytes: int = 3,
    feature_bytes: int = 5,
) -> FeatureSupply[Item, Item]:
    queues = QueueConfig(ready_bytes=ready_bytes, feature_bytes=feature_bytes, log_records=1)
    return FeatureSupply((read(position) for position in positions), makers=makers, threads=1, queues=queues)


@THREADED
@given(
    st.lists(st.integers(0, 500), unique=True, max_size=50).map(sorted),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_the_supply_is_in_plan_order_whatever_the_targets_speeds(
    positions: list[int], targets: int, ready_bytes: int, feature_bytes: int, random: object
) -> None:
    weights = {position: random.randrange(1, 9) for position in positions}  # type: ignore[attr-defined]

    def maker(index: int) -> Callable[[Item], Item]:
        def make(item: Item) -> Item:
            for _ in range(weights[item.position] * (1 + 20 * index)):  # unequal speeds without a clock
                threading.get_ident()
            return item

        return make

    supply = supply_of(
        positions,
        read=lambda position: Item(position, weights[position]),
        makers=[maker(index) for index in range(targets)],
        ready_bytes=ready_bytes,
        feature_bytes=feature_bytes,
    )
    supply.start()
    taken = [supply.next()[0].position for _ in positions]
    assert taken == positions
    with pytest.raises(QueueClosed):
        supply.next()
    supply.shut_down()
    assert sum(supply.finished) == len(positions)
    assert supply.depths == (0, 0)
    largest = max([0, *weights.values()])
    assert supply.counters["ready"]["peak_bytes"] <= max(ready_bytes, largest)
    assert supply.counters["features"]["peak_bytes"] <= feature_bytes + largest


@THREADED
@given(st.integers(0, 30), st.sampled_from(["reader", "target"]), st.integers(1, 3))
def test_a_failing_stage_raises_its_own_error_in_the_consumer(failing: int, stage: str, targets: int) -> None:
    def explode(item: Item | int) -> None:
        if (item if isinstance(item, int) else item.position) == failing:
            raise ValueError(f"bad batch {failing}")

    def read(position: int) -> Item:
        if stage == "reader":
            explode(position)
        return Item(position, 1)

    def make(item: Item) -> Item:
        if stage == "target":
            explode(item)
        return item

    supply = supply_of(list(range(31)), read=read, makers=[make] * targets)
    supply.start()
    taken: list[int] = []

    def consume() -> None:
        while True:
            taken.append(supply.next()[0].position)

    with pytest.raises(ValueError, match=f"bad batch {failing}") as raised:
        consume()
    assert taken == list(range(len(taken)))
    assert len(taken) <= failing
    assert "explode" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)], "its own traceback"
    supply.shut_down()


def test_shutting_down_ends_stages_that_nobody_consumes_from() -> None:
    supply = supply_of(list(range(1000)), read=lambda position: Item(position, 1), makers=[lambda item: item] * 2)
    supply.start()
    supply.next()
    supply.shut_down()
    assert sum(supply.finished) < 1000
    with pytest.raises(PipelineStopped):
        supply.next()


def test_the_first_error_wins_and_later_ones_do_not_replace_it() -> None:
    queue: ByteQueue[int] = ByteQueue(limit_bytes=1)
    pipeline = Pipeline([queue])
    first, second = ValueError("first"), ValueError("second")
    pipeline.raise_error()
    pipeline.fail(first)
    pipeline.fail(second)
    assert pipeline.error is first
    with pytest.raises(ValueError, match="first"):
        pipeline.raise_error()
    with pytest.raises(PipelineStopped):
        queue.get()
