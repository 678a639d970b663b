"""Curves of a log: what a rollback abandoned is gone, what cannot be read is counted, the axis is tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dflash.compare import curves as module
from dflash.compare.curves import loss_in, read_curves
from dflash.compare.pictures import POINTS, in_words, stretches
from dflash.errors import DataError
from dflash.records import MicroBatchRecord, StepRecord
from tests.support.compared_runs import step_line


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "train_log.jsonl"
    file.write_text("".join(lines))
    return file


def test_the_lines_name_fields_of_the_records() -> None:
    for line, record in ((module.Step, StepRecord), (module.MicroBatch, MicroBatchRecord)):
        assert {field.name for field in msgspec.structs.fields(line)} <= set(record.__dataclass_fields__)


def test_a_later_segment_takes_the_place_of_what_it_went_back_behind(tmp_path: Path) -> None:
    first = [step_line(step, loss=9.0 if step >= 6 else 2.0) for step in range(8)]
    second = [step_line(step, segment=1, loss=1.0, tokens=10) for step in range(6, 12)]
    found = read_curves(write(tmp_path, *first, *second))
    assert found.loss.tolist() == [2.0] * 6 + [1.0] * 6
    assert found.tokens.tolist() == [100.0 * n for n in range(1, 7)] + [600 + 10.0 * n for n in range(1, 7)]
    assert [(part.segment, part.first_step, part.last_step, part.live) for part in found.segments] == [(0, 0, 7, 6), (1, 6, 11, 6)]


def test_a_segment_that_never_came_to_a_step_abandons_what_it_went_back_behind(tmp_path: Path) -> None:
    """A run that is halted, or killed, right behind a rollback."""
    back = '{"kind":"event","segment":1,"step":6,"event":"rollback_end","details":{},"schema_version":1}\n'
    found = read_curves(write(tmp_path, *(step_line(step) for step in range(8)), back))
    assert found.loss.tolist() == [1.0] * 6
    assert [(part.segment, part.last_step, part.live) for part in found.segments] == [(0, 7, 6)]


def test_events_torn_lines_and_values_that_are_not_finite(tmp_path: Path) -> None:
    event = '{"kind":"event","segment":0,"step":1,"event":"heartbeat","details":{},"schema_version":1}\n'
    found = read_curves(
        write(tmp_path, step_line(0), event, step_line(1, loss=None), '{"kind":"step","seg\n', step_line(2, bucket=3))
    )
    assert found.torn == 1
    assert np.isnan(found.loss).tolist() == [False, True, False]
    assert found.bucket_count[0].tolist() == [50, 0, 0] and found.bucket_count[3].tolist() == [0, 0, 50]


def test_a_log_without_steps_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training step"):
        read_curves(write(tmp_path, ""))
    with pytest.raises(DataError, match="cannot be read"):
        read_curves(tmp_path / "none.jsonl")


def test_the_loss_of_a_stretch_weighs_steps_by_their_supervised_tokens(tmp_path: Path) -> None:
    found = read_curves(write(tmp_path, *(step_line(step, loss=float(step), bucket=step % 2) for step in range(10))))
    assert loss_in(found, from_tokens=500, to_tokens=1000, bucket=None) == pytest.approx(7.0)
    assert loss_in(found, from_tokens=500, to_tokens=1000, bucket=1) == pytest.approx((5 + 7 + 9) / 3)
    assert np.isnan(loss_in(found, from_tokens=500, to_tokens=1000, bucket=7))
    assert np.isnan(loss_in(found, from_tokens=1000, to_tokens=2000, bucket=None))


def test_a_drawn_curve_keeps_every_token_of_the_run() -> None:
    generator = np.random.default_rng(0)
    tokens = np.cumsum(generator.integers(1, 500, size=1000)).astype(float)
    sums, counts = generator.uniform(size=1000), generator.integers(0, 3, size=1000).astype(float)
    middle, value = stretches(tokens, sums, counts)
    assert len(middle) <= POINTS and (np.diff(middle) > 0).all()
    edges = np.linspace(0, tokens[-1], POINTS + 1)
    for x, y in zip(middle, value, strict=True):
        inside = [i for i in range(1000) if edges[edges < x][-1] < tokens[i] <= edges[edges > x][0]]
        assert y == pytest.approx(sum(sums[i] for i in inside) / sum(counts[i] for i in inside))


@pytest.mark.parametrize(("value", "words"), [(0, "0"), (950, "950"), (1500, "1.5 k"), (1_393_658, "1.39 M"), (2e9, "2 G")])
def test_counts_on_an_axis(value: float, words: str) -> None:
    assert in_words(value) == words
