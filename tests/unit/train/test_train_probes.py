"""The supervisor's view of probes: what verdicts wait for, what they make of outcomes, and that the best one stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.checkpoint import BEST, Evidence, clean_steps, hold_probes, list_checkpoints, point_to
from dflash.config import Config, RollbackConfig, parse_config
from dflash.records import ProbeFigures, ProbeOutcome, ProbeRecord, RunPaths
from dflash.train.book import CheckpointBook
from dflash.train.memory import memory_plan
from dflash.train.probes import ProbeReader
from tests.support.checkpoints import save_at

TEXT = """
run: {root: x}
target: {mask_token: x, expected: {hidden_size: 128, num_hidden_layers: 4, vocab_size: 9, num_parameters: 9}}
data: {num_conversations: 3}
checkpoint: {interval_steps: 10, window_steps: 10, soak_steps: 10, keep_clean: 1, keep_other: 0}
"""


def config_of(*overrides: str) -> Config:
    return parse_config(TEXT, origin="test", overrides=("probe.every_steps=20", *overrides))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.checkpoints_dir.mkdir()
    return paths


def opened(paths: RunPaths, config: Config) -> tuple[CheckpointBook, ProbeReader]:
    book = CheckpointBook(paths, config.checkpoint, RollbackConfig())
    book.reconcile()
    return book, ProbeReader(paths, config, book)


def tell(paths: RunPaths, step: int, outcome: ProbeOutcome, length: float = 2.0) -> None:
    figures = ProbeFigures(length, (length, length), (2,), (1,), (0.5,), 1.0) if outcome == "measured" else None
    with hold_probes(paths) as writer:
        writer.append(ProbeRecord(step, 0, "p", outcome, "", "", figures))


def judge(book: CheckpointBook, probes: ProbeReader, *, records: int = 1000, ended: bool = False) -> None:
    view = probes.view(ended=ended)
    book.judge(Evidence((), records, lambda _first, _end: 1.0, 0.99, ended=ended, probes=view))


def test_a_verdict_waits_for_its_probe_and_comes_with_it(paths: RunPaths) -> None:
    for step in (0, 10, 20, 30):
        save_at(paths.checkpoints_dir, step)
    book, probes = opened(paths, config_of())
    judge(book, probes)
    assert clean_steps(paths.ledger) == (0, 10, 30), "only step-20 is due for a probe"
    assert not book.is_due(records=1000), "and nothing is judged over and over meanwhile"
    assert probes.awaits()
    tell(paths, 20, "begun")
    assert probes.poll()
    assert not probes.poll(), "nothing new"
    assert probes.awaits()
    tell(paths, 20, "measured")
    assert probes.poll()
    book.reconsider()
    assert book.is_due(records=1000)
    judge(book, probes)
    assert clean_steps(paths.ledger) == (0, 10, 20, 30)
    assert not probes.awaits()


def test_at_the_end_the_last_one_is_due_too(paths: RunPaths) -> None:
    save_at(paths.checkpoints_dir, 17)
    book, probes = opened(paths, config_of())
    assert not probes.view(ended=False).awaited
    assert probes.view(ended=True).awaited == {(17, 0)}
    judge(book, probes, records=17, ended=True)
    assert clean_steps(paths.ledger) == ()
    tell(paths, 17, "failed")
    probes.poll()
    judge(book, probes, records=17, ended=True)
    assert clean_steps(paths.ledger) == (17,), "a probe that failed holds up nothing"


def test_without_probes_nothing_is_read_or_awaited(paths: RunPaths) -> None:
    save_at(paths.checkpoints_dir, 20)
    tell(paths, 20, "measured")
    _, probes = opened(paths, config_of("probe.every_steps=0"))
    assert not probes.poll()
    assert not probes.awaits()
    assert probes.view(ended=True).lengths == {}


def test_retention_spares_the_best_and_the_disk_is_planned_for_it(paths: RunPaths) -> None:
    for step in range(0, 70, 10):
        save_at(paths.checkpoints_dir, step)
    book, probes = opened(paths, config_of("probe.every_steps=0"))
    point_to(paths.checkpoints_dir, BEST, 20)
    judge(book, probes)
    book.prune(spare=())
    assert list_checkpoints(paths.checkpoints_dir) == [0, 20, 60]
    without = memory_plan(config_of("probe.every_steps=0")).checkpoints
    assert memory_plan(config_of()).checkpoints == without + 1
