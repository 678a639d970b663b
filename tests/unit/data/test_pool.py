"""Work over processes: order, bounded look-ahead, errors with their traceback, and no process left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from pool_work import arrays, broken, counted, doubling, dying_at, failing_at

from dflash.data.pool import map_in_order
from dflash.data.quarantine import BadRowError
from dflash.errors import DataError
from tests.support.processes import command_of


def children() -> set[int]:
    """Processes of this one that work (the helper that tracks shared resources lives on)."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "spawn_main" in " ".join(command_of(child))}


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def test_one_worker_is_this_process_and_two_are_others() -> None:
    alone = list(map_in_order(doubling, 1, range(5), workers=1))
    assert alone == [(2 * item + 1, os.getpid()) for item in range(5)]
    spread = list(map_in_order(doubling, 1, range(40), workers=2))
    assert [value for value, _ in spread] == [2 * item + 1 for item in range(40)]
    assert os.getpid() not in {pid for _, pid in spread}


def test_arrays_come_back_and_input_is_read_only_a_little_ahead() -> None:
    taken: list[int] = []
    with closing(map_in_order(arrays, 3, counted(itertools.count(), taken), workers=2)) as results:
        for expected in range(20):
            assert np.array_equal(next(results), np.full(3, expected))
            assert len(taken) <= expected + 1 + 6, "at most three a worker are under way"


def test_an_error_keeps_its_kind_its_message_and_the_traceback_of_the_worker() -> None:
    results = map_in_order(failing_at, 7, range(100), workers=2)
    assert [next(results) for _ in range(7)] == list(range(7)), "what came before it is delivered"
    with pytest.raises(BadRowError, match="file:7: empty: no text") as caught:
        next(results)
    assert caught.value.row.origin == "file:7"
    assert caught.value.remedy
    shown = "".join(traceback.format_exception(caught.value))
    assert 'pool_work.py", line' in shown
    assert "in work" in shown


@pytest.mark.parametrize("make", [dying_at, broken])
def test_a_killed_worker_is_an_error_not_a_hang(make: object) -> None:
    with pytest.raises(DataError, match="a tokenizing process ended before its work was done") as caught:
        list(map_in_order(make, 5, range(1000), workers=2))  # type: ignore[arg-type]
    assert "out-of-memory" in caught.value.remedy


def test_an_error_of_the_input_ends_the_workers() -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(map_in_order(doubling, 0, items(), workers=2))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_parent_that_is_interrupted_or_killed(how: signal.Signals) -> None:
    script, root = Path(__file__).with_name("pool_work.py"), Path(__file__).parents[3]
    # A group of its own, as on a terminal: Ctrl-C reaches parent and workers alike.
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(root)},
        start_new_session=True,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids: set[int] = set()
        while len(pids) < 2:
            pids.add(int(parent.stdout.readline()))
        workers = [psutil.Process(pid) for pid in pids]
        if how is signal.SIGINT:
            os.killpg(parent.pid, how)
        else:
            parent.kill()
        parent.stdout.close()
        parent.wait(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
