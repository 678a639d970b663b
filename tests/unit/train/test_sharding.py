"""One word a save between rank 0 and the others, and tensors that are not sharded; real ranks are in the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import CheckpointWriter, WriterHooks, load_checkpoint
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError
from dflash.train.sharding import CalledOthers, GatheringSaver, JoiningSaver, fill, is_sharded, own_part, whole
from tests.support.checkpoints import IDENTITY, state_at


class Words:
    """A group that keeps what its first rank says, and answers with it."""

    rank = 0
    size = 2

    def __init__(self, answers: list[Any]) -> None:
        self.said: list[Any] = []
        self._answers = answers

    def sum_(self, tensor: torch.Tensor) -> None:
        raise AssertionError("a save sums nothing")

    def gather(self, word: Any) -> list[Any]:
        self.said.append(word)
        return [self._answers[len(self.said) - 1] if self._answers else word, None]


@contextmanager
def saver(directory: Path, words: Words, copied: list[int], operation: Callable[[str], None]) -> Iterator[GatheringSaver]:
    others = CalledOthers(words)
    live = {"a": torch.ones(3), "b": torch.zeros(2)}

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(len(words.said))
        return tensor + 1

    def defect(error: BaseException) -> None:
        raise error

    hooks = WriterHooks(
        before_snapshot=others.call,
        whole=gathered,
        before_commit=lambda: None,
        on_event=lambda *_: None,
        on_defect=defect,
        on_operation=operation,
    )
    rule = CheckpointConfig()
    writer = CheckpointWriter(directory, identity=IDENTITY, drafter=live, optimizer={}, rule=rule, hooks=hooks)
    try:
        yield GatheringSaver(writer, others)
    finally:
        writer.close()


def test_the_others_are_called_before_the_first_tensor_and_once_a_save(tmp_path: Path) -> None:
    words, copied = Words([]), list[int]()
    with saver(tmp_path, words, copied, lambda _name: None) as made:
        assert made.save(state_at(1), wait=True)
        assert made.save(state_at(1), wait=True), "it is durable already: no snapshot"
        assert made.save_within(state_at(2), budget_s=100.0)
    assert words.said == [True, False, True]
    assert copied == [1, 1, 3, 3]
    assert torch.equal(load_checkpoint(tmp_path / "step-2").drafter["a"], torch.full((3,), 2.0)), "what is whole is saved"


def test_the_others_hear_of_a_save_that_fails(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"no room to {name}")

    words = Words([])
    with saver(tmp_path, words, [], refuse) as made, pytest.raises(CheckpointError):
        made.save(state_at(1), wait=True)
    assert words.said == [True]
    with pytest.raises(ValueError, match="outside"), CalledOthers(words).told():
        raise ValueError("outside")
    assert words.said == [True, False]


def test_another_rank_gathers_only_when_it_is_called() -> None:
    words = Words([False, True, True])
    tensors = ({"a": torch.ones(1)}, {"a.step": torch.ones(())})
    joining = JoiningSaver(tensors, words)
    assert joining.save(state_at(1), wait=False)
    assert joining.save(state_at(2), wait=True)
    assert joining.save_within(state_at(3), budget_s=1.0)
    assert words.said == [None] * 3


def test_tensors_that_are_not_sharded_are_themselves() -> None:
    live, saved = torch.zeros(2, 3), torch.ones(2, 3)
    assert whole(live) is live
    assert own_part(live) is live
    fill(live, saved)
    assert torch.equal(live, saved)
    assert not is_sharded(torch.nn.Linear(2, 2))
