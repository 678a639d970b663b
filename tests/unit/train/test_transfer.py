"""Carrying features between devices: everything of it that host memory can show."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import QueueConfig
from dflash.errors import DataError
from dflash.train.queues import QueueClosed
from dflash.train.replica import FeatureSupply
from dflash.train.transfer import Plain, Staged, arrives, choose_courier, chunks

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 500), st.integers(1, 70))
def test_chunks_cover_everything_once_in_order(total: int, size: int) -> None:
    covered = [place for begin, end in chunks(total, size=size) for place in range(begin, end)]
    assert covered == list(range(total))
    assert all(0 < end - begin <= size for begin, end in chunks(total, size=size))


@pytest.mark.parametrize("buffer_bytes", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_staged_way_carries_every_byte_through_its_buffers(dtype: torch.dtype, buffer_bytes: int) -> None:
    tensor = torch.arange(3 * 5 * 4).reshape(3, 5, 4).to(dtype)
    staged = Staged(CPU, CPU, buffer_bytes=buffer_bytes)
    for sent in (tensor, tensor.transpose(0, 2), tensor[:0]):
        copy = staged.carry(sent)
        assert torch.equal(copy, sent)
        assert copy.dtype == dtype
        assert sent.numel() == 0 or copy.data_ptr() != sent.data_ptr()


def test_inside_one_device_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    courier = choose_courier(CPU, CPU)
    assert isinstance(courier, Plain)
    assert courier.carry(tensor) is tensor


def test_a_way_that_loses_bytes_is_found_out() -> None:
    class Broken:
        def carry(self, tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            copy[-1] = 0
            return copy

    assert arrives(Staged(CPU, CPU, buffer_bytes=1000), CPU)
    assert not arrives(Broken(), CPU)


class Item:
    nbytes = 10

    def __init__(self, number: int) -> None:
        self.number = number


def items(count: int) -> Iterator[Item]:
    for number in range(count):
        yield Item(number)


def test_with_two_threads_a_target_computes_one_batch_while_another_one_travels() -> None:
    computing = threading.Lock()
    next_computes = threading.Event()

    def make(item: Item) -> Item:
        with computing:
            if item.number == 1:
                next_computes.set()
        if item.number == 0:  # travels until the next batch computes: with one thread it would wait for ever
            assert next_computes.wait(30)
        return item

    queues = QueueConfig(ready_bytes=100, feature_bytes=100, log_records=1)
    supply: FeatureSupply[Item, Item] = FeatureSupply(items(6), makers=[make], threads=2, queues=queues)  # type: ignore[arg-type]
    supply.start()
    try:
        assert [supply.next()[0].number for _ in range(6)] == list(range(6))
        with pytest.raises(QueueClosed):
            supply.next()
        assert supply.finished == (6,), "both threads count as the one target that they are"
        assert supply.stage_times[1].workers == 1
    finally:
        supply.shut_down()


def test_a_failing_thread_of_a_target_ends_the_supply_with_its_error() -> None:
    def make(item: Item) -> Item:
        if item.number == 3:
            raise DataError("item 3", remedy="none")
        return item

    queues = QueueConfig(ready_bytes=100, feature_bytes=1000, log_records=1)
    supply: FeatureSupply[Item, Item] = FeatureSupply(items(50), makers=[make], threads=2, queues=queues)  # type: ignore[arg-type]
    supply.start()
    try:
        with pytest.raises(DataError, match="item 3"):
            [supply.next() for _ in range(50)]
    finally:
        supply.shut_down()
