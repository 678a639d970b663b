"""Changes of a run's configuration that a person accepts: what may change, what is noted, what a checkpoint may come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflash.config import Config, load_config, parse_config
from dflash.errors import RunStateError
from dflash.records import RunPaths
from dflash.train.changes import accept_changes, accepted_since, read_changes
from dflash.train.inputs import Inputs, initial_state, open_inputs, replanned
from dflash.train.runs import hold_run, prepare_run, training_hash
from tests.support.tiny_run import build_tiny_run


def config_of(*overrides: str) -> Config:
    text = "target: {mask_token_id: 3}\ndata: {num_conversations: 5}"
    return parse_config(text, origin="test", overrides=overrides)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path / "runs" / "demo-001")
    prepare_run(config_of(), made, location=tmp_path, fingerprint="f")
    return made


def test_an_accepted_change_is_noted_and_then_the_run_is_the_changed_one(paths: RunPaths, tmp_path: Path) -> None:
    changed = config_of("cluster.replicas=4", "train.lr=0.5", "health.stale_factor=20")
    with pytest.raises(RunStateError, match="--accept-changes"):
        prepare_run(changed, paths, location=tmp_path, fingerprint="f")
    assert accept_changes(changed, paths) == ("cluster.replicas: 1 -> 4", "train.lr: 0.006 -> 0.5")
    assert load_config(paths.config) == changed
    prepare_run(changed, paths, location=tmp_path, fingerprint="f")
    [note] = read_changes(paths)
    assert (note.from_sha256, note.to_sha256) == (training_hash(config_of()), training_hash(changed))
    assert accept_changes(changed, paths) == (), "nothing is left to accept"
    assert len(read_changes(paths)) == 1


@pytest.mark.parametrize(
    "override", ["plan.tokens_per_batch=2048", "run.seed=4", "drafter.block_size=4", "train.optimizer.kind=muon"]
)
def test_what_gives_positions_and_tensors_their_meaning_never_changes(paths: RunPaths, override: str) -> None:
    before = paths.config.read_text()
    with pytest.raises(RunStateError, match=override.split("=", maxsplit=1)[0]):
        accept_changes(config_of(override, "train.lr=0.5"), paths)
    assert paths.config.read_text() == before
    assert read_changes(paths) == []


def test_a_live_or_finished_run_is_left_alone(paths: RunPaths) -> None:
    with hold_run(paths), pytest.raises(RunStateError, match="being trained right now"):
        accept_changes(config_of("train.lr=0.5"), paths)
    paths.summary.write_text("{}")
    with pytest.raises(RunStateError, match="finished"):
        accept_changes(config_of("train.lr=0.5"), paths)
    assert read_changes(paths) == []


def test_a_checkpoint_may_come_from_any_configuration_that_accepted_changes_lead_on_from(paths: RunPaths) -> None:
    first, second, third = (config_of(*override) for override in ((), ("train.lr=0.5",), ("train.clip_norm=2",)))
    accept_changes(second, paths)
    accept_changes(first, paths)
    accept_changes(third, paths)
    paths.changes.write_bytes(paths.changes.read_bytes() + b'{"from_sha256": "to')
    hashes = [training_hash(config) for config in (first, second, third)]
    for saved in hashes[:2]:
        found = accepted_since(paths, saved_sha256=saved, now_sha256=hashes[2])
        assert found
        assert found[-1].to_sha256 == hashes[2]
    assert accepted_since(paths, saved_sha256=hashes[2], now_sha256=hashes[2]) == ()
    assert accepted_since(paths, saved_sha256="unknown", now_sha256=hashes[2]) is None
    accept_changes(second, paths)
    assert accepted_since(paths, saved_sha256=hashes[2], now_sha256=hashes[1]), "a torn line takes no later one with it"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    run = build_tiny_run(tmp_path_factory.mktemp("changes"))
    return open_inputs(run.config, run.paths)


@pytest.mark.parametrize(("replicas", "accumulation", "max_steps"), [(2, 1, None), (3, 2, None), (1, 1, None), (2, 1, 5)])
def test_what_is_left_of_the_plan_makes_as_many_steps_as_the_new_ranks_take(
    inputs: Inputs, replicas: int, accumulation: int, max_steps: int | None
) -> None:
    overrides = {"cluster": {"replicas": replicas}, "train": {"accumulation_steps": accumulation, "max_steps": max_steps}}
    sections = {name: getattr(inputs.config, name).model_copy(update=update) for name, update in overrides.items()}
    changed = dataclasses.replace(inputs, config=inputs.config.model_copy(update=sections))
    state = dataclasses.replace(initial_state(inputs, segment=3), step=4, plan_position=4, skipped_positions=(1, 6))
    found = replanned(state, changed)
    left = [position for position in range(4, len(inputs.plan)) if position != 6]
    whole = 4 + -(-len(left) // (replicas * accumulation))
    assert found.total_steps == (whole if max_steps is None else max_steps)
    assert (found.step, found.plan_position, found.segment) == (4, 4, 3)
    assert found.config_sha256 == training_hash(changed.config)
