"""Trainings that must come to the same end: runs of the same samples, and the comparison of what they logged and saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.tiny_run import TinyRun, build_tiny_run
from tests.support.trainer_process import final_hashes, live_steps, numbers_of, train_ranks_to_end, train_to_end

SAMPLES = 40


def new_run(root: Path, *overrides: str) -> TinyRun:
    """A run that nobody has trained yet."""
    return build_tiny_run(root, samples=SAMPLES, overrides=overrides)


def trained_run(root: Path, *overrides: str) -> TinyRun:
    """A run that one trainer has trained to its end."""
    run = new_run(root, *overrides)
    train_to_end(run)
    return run


def trained_by_ranks(root: Path, *overrides: str) -> TinyRun:
    """A run that all its ranks have trained to its end."""
    run = new_run(root, *overrides)
    train_ranks_to_end(run)
    return run


def assert_same_numbers(run: TinyRun, wanted: TinyRun) -> None:
    """The live records of both are equal to the bit."""
    assert numbers_of(run.paths) == numbers_of(wanted.paths)


def assert_same_training(run: TinyRun, wanted: TinyRun) -> None:
    """The live records and the last checkpoints of both are equal to the bit."""
    assert_same_numbers(run, wanted)
    steps = len(live_steps(wanted.paths))
    assert final_hashes(run.paths, steps) == final_hashes(wanted.paths, steps)


def assert_close_steps(found: TinyRun, wanted: TinyRun, *, fields: Sequence[str], tolerance: float) -> None:
    """Both have the same live steps, and the named fields of each are as close as rounding leaves them."""
    ours, theirs = live_steps(found.paths), live_steps(wanted.paths)
    assert list(ours) == list(theirs)
    for step, record in ours.items():
        for field in fields:
            assert record[field] == pytest.approx(theirs[step][field], rel=tolerance, abs=tolerance), (step, field)
