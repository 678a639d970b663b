"""Reading ahead: in order, once each, errors in their place, no thread left behind, no hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.reader_prefetch import prefetch

WAIT_S = 30.0


def threads_now() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(0, 6), st.sets(st.integers(0, 40), max_size=3), st.integers(0, 45))
def test_results_come_in_order_up_to_the_first_error_or_the_close(
    count: int, threads: int, ahead: int, failing: set[int], taken: int
) -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item in failing:
            raise LookupError(item)
        for _ in range(item % 3 * 50):  # unequal speeds without a clock
            threading.get_ident()
        return item * item

    results = prefetch(range(count), work, threads=threads, ahead=ahead)
    assert begun == [] and not threads_now()
    found: list[int] = []
    failed: list[int] = []
    try:
        for _ in range(taken):
            found.append(next(results))
            assert len(begun) <= len(found) + max(ahead, 0), "bounded"
    except StopIteration:
        assert len(found) == count
    except LookupError as error:
        failed.append(error.args[0])
    finally:
        results.close()
    assert found == [item * item for item in range(len(found))]
    assert failed in ([], [min(failing, default=-1)])
    assert len(found) == min([taken, count, *failing]), "an error comes after everything before it"
    assert len(begun) == len(set(begun))
    assert not threads_now()


def test_work_of_several_threads_overlaps() -> None:
    meeting = threading.Barrier(3)

    def work(item: int) -> int:
        meeting.wait(WAIT_S)  # passes only if three items are in work at once
        return item

    assert list(prefetch(range(9), work, threads=3, ahead=3)) == list(range(9))


def test_no_more_is_read_than_the_window_while_the_consumer_is_slow() -> None:
    begun: list[int] = []
    filled = threading.Semaphore(0)

    def work(item: int) -> int:
        begun.append(item)
        filled.release()
        return item

    results = prefetch(range(100), work, threads=2, ahead=5)
    assert next(results) == 0
    for _ in range(6):  # the one that was taken, and the window behind it
        assert filled.acquire(timeout=WAIT_S)
    assert sorted(begun) == list(range(6))
    results.close()
    assert sorted(begun) == list(range(6))


def test_closing_waits_for_work_in_progress_and_drops_the_rest() -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item == 1:
            started.set()
            assert release.wait(WAIT_S)
            ended.set()
        return item

    results = prefetch(range(100), work, threads=1, ahead=4)
    assert next(results) == 0
    assert started.wait(WAIT_S)
    closing = threading.Thread(target=results.close)
    closing.start()
    release.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert ended.is_set()
    assert not threads_now()


def test_an_error_of_the_items_reaches_the_consumer() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("plan")

    results = prefetch(items(), lambda item: item, threads=2, ahead=3)
    with pytest.raises(KeyError, match="plan"):
        list(results)
    assert not threads_now()
