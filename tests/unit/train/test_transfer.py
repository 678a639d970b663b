"""Carrying features between devices: everything of it that host memory can show."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import QueueConfig, parse_config
from dflash.errors import DataError
from dflash.model.target import load_target
from dflash.train.features import make_maker
from dflash.train.footprint import BatchShape
from dflash.train.measure import random_batch
from dflash.train.queues import QueueClosed
from dflash.train.replica import FeatureSupply
from dflash.train.transfer import Mark, Plain, Staged, arrives, choose_courier, chunks

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
        copy = staged.carry(sent, after=staged.mark())
        assert torch.equal(copy, sent)
        assert copy.dtype == dtype
        assert sent.numel() == 0 or copy.data_ptr() != sent.data_ptr()


def test_inside_one_device_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    courier = choose_courier(CPU, CPU)
    assert isinstance(courier, Plain)
    assert courier.carry(tensor, after=courier.mark()) is tensor


def test_a_way_that_loses_bytes_is_found_out() -> None:
    class Broken(Plain):
        def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
            copy = tensor.clone()
            copy[-1] = 0
            return copy

    assert arrives(Staged(CPU, CPU, buffer_bytes=1000), CPU)
    assert not arrives(Broken(CPU), CPU)


def test_the_threads_of_a_target_do_not_mix_what_they_stage() -> None:
    """Both carry at once as soon as computing only means to queue kernels; the two buffers belong to one of them at a time."""
    staged = Staged(CPU, CPU, buffer_bytes=64)
    wrong: list[int] = []

    def carry(value: int) -> None:
        sent = torch.full((4000,), value, dtype=torch.uint8)
        wrong.extend(value for _ in range(10) if not torch.equal(staged.carry(sent, after=None), sent))

    threads = [threading.Thread(target=carry, args=(value,)) for value in (1, 2, 3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not wrong


class Journal(Plain):
    """Where the maker is whenever it speaks to its courier."""

    def __init__(self, computing: threading.Lock) -> None:
        super().__init__(CPU)
        self.lock = computing
        self.said: list[tuple[str, bool]] = []
        self.marks: list[object] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.said.append(("begin", self.lock.locked()))
        yield
        self.said.append(("end", self.lock.locked()))

    def mark(self) -> Mark:
        self.said.append(("mark", self.lock.locked()))
        return "behind this batch"  # type: ignore[return-value]

    def carry(self, tensor: torch.Tensor, *, after: Mark) -> torch.Tensor:
        self.said.append(("carry", self.lock.locked()))
        self.marks.append(after)
        return super().carry(tensor, after=None)


def test_the_end_of_a_batch_is_marked_before_the_next_one_may_queue_and_all_of_it_waits_for_that() -> None:
    config = parse_config("{target: {mask_token_id: 3}, data: {num_conversations: 1}}", origin="test")
    target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=CPU)
    made = make_maker(target=target, target_index=0, config=config, mask_token_id=3, drafter_device=CPU, dtype=torch.bfloat16)
    journal = Journal(made.computing)
    shape = BatchShape(sequences=2, length_tokens=24, anchors=4, blocks=8)
    found = dataclasses.replace(made, courier=journal).make(random_batch(shape, vocab_size=512, seed=0))
    assert journal.said[:3] == [("begin", True), ("mark", True), ("end", True)]
    assert set(journal.said[3:]) == {("carry", False)}
    assert set(journal.marks) == {"behind this batch"}
    carried = [found.features, found.block_embeds, *found.anchors, *found.labels]
    assert len(journal.marks) == len(carried)
    assert found.features.dtype == found.block_embeds.dtype == torch.bfloat16


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
