"""Which evaluation is the newest, and that two never write at once."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from dflash.errors import StorageError
from dflash.evaluate.stored import LOCK_FILE, newest_evaluation, newest_sweep, writing_alone


def store(eval_dir: Path, *names: str, file: str = "result.json") -> None:
    for name in names:
        (eval_dir / name).mkdir(parents=True)
        (eval_dir / name / file).write_text("{}")


def test_the_newest_is_the_one_of_the_largest_step_and_no_copy_beside_it(tmp_path: Path) -> None:
    store(
        tmp_path,
        "trained-step-9",
        "trained-step-10",
        "trained-step-600-old",
        "trained-step-600.bak",
        "trained-step-",
        "other-step-99",
    )
    store(tmp_path, "trained-with-1a2b3c4d-step-700", "untrained-step-0")
    (tmp_path / "trained-step-800").mkdir()  # without its result: not whole
    assert newest_evaluation(tmp_path, "trained") == tmp_path / "trained-step-10"
    assert newest_evaluation(tmp_path, "untrained") == tmp_path / "untrained-step-0"
    assert newest_evaluation(tmp_path, "step") is None and newest_evaluation(tmp_path / "no", "trained") is None
    store(tmp_path, "sweep-step-5", file="sweep.json")
    assert newest_sweep(tmp_path) == tmp_path / "sweep-step-5"


def test_whoever_writes_evaluations_of_a_run_is_alone(tmp_path: Path) -> None:
    eval_dir = tmp_path / "eval"
    with writing_alone(eval_dir), (eval_dir / LOCK_FILE).open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (eval_dir / LOCK_FILE).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "eval").write_text("a file")
    with pytest.raises(StorageError, match=r"eval/\.lock cannot be locked"), writing_alone(tmp_path / "eval"):
        raise AssertionError("nothing may be written")
