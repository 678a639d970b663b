"""A drafter spread over real ranks (FSDP2 on gloo) trains like a replicated one, and its checkpoints are anyone's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.checkpoint import list_checkpoints, load_checkpoint
from dflash.errors import EXIT_INTERRUPTED, EXIT_NONFINITE
from dflash.model.drafter import Drafter
from dflash.train.runs import training_hash
from tests.support.same_training import assert_close_steps, assert_same_numbers, assert_same_training, new_run, trained_by_ranks
from tests.support.tiny_run import TinyRun, rewrite_config
from tests.support.trainer_process import KillAt, end_of, live_steps, log_lines, start_ranks, train_ranks_to_end, wait_until_logged

# One micro-batch a rank and step: the last step of the plan leaves a rank without one.
TWO = (
    "train.epochs=5", "train.lr=0.003", "checkpoint.interval_steps=3", "cluster.replicas=2", "drafter.num_hidden_layers=2",
)  # fmt: skip
SHARDED = (*TWO, "cluster.shard=true", "train.recompute_layers=true")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def sharded(root: Path) -> TinyRun:
    return trained_by_ranks(root, *SHARDED)


@pytest.fixture(scope="module")
def replicated(root: Path) -> TinyRun:
    return trained_by_ranks(root, *TWO)


def assert_close(found: TinyRun, wanted: TinyRun, *, tolerance: float) -> None:
    fields = ("ce", "objective", "grad_norm", "clip_coef", "accuracy", "lr")
    assert_close_steps(found, wanted, fields=fields, tolerance=tolerance)
    last = len(live_steps(wanted.paths))
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        one, other = (load_file(run.paths.checkpoint(last) / name) for run in (found, wanted))
        assert {key: (value.shape, value.dtype) for key, value in one.items()} == {
            key: (value.shape, value.dtype) for key, value in other.items()
        }
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=tolerance, atol=tolerance)


def test_sharded_and_replicated_ranks_train_alike_and_save_the_same_files(sharded: TinyRun, replicated: TinyRun) -> None:
    steps = live_steps(sharded.paths)
    assert len(steps) > 10
    assert len(steps[max(steps)]["micro_batches"]) == 1, "the last step shall leave a rank without a batch"
    assert any(record["clip_coef"] < 1 for record in steps.values()), "clipping shall have acted"
    assert_close(sharded, replicated, tolerance=2e-5)
    config = next(line for line in log_lines(sharded.paths) if line.get("event") == "config")
    assert config["details"]["shard"] is True
    cluster = sharded.config.cluster.model_copy(update={"shard": False})
    assert training_hash(sharded.config) == training_hash(sharded.config.model_copy(update={"cluster": cluster}))


def test_a_checkpoint_of_sharded_ranks_is_a_plain_drafter(sharded: TinyRun) -> None:
    loaded = load_checkpoint(sharded.paths.checkpoint(len(live_steps(sharded.paths))))
    drafter = Drafter(sharded.config.drafter, target_hidden_size=16)
    drafter.load_state_dict(loaded.drafter)
    assert loaded.manifest.finite
    assert loaded.manifest.weights_norm > 0


def test_a_killed_sharded_run_resumes_exactly(root: Path, sharded: TinyRun) -> None:
    run = new_run(root, *SHARDED)
    codes = [end_of(process) for process in start_ranks(run, kill_at=KillAt("manifest", 3))]
    assert codes[0] < 0 != codes[1]
    train_ranks_to_end(run)
    assert_same_training(run, sharded)


@pytest.mark.parametrize(("before", "after"), [("true", "false"), pytest.param("false", "true", marks=pytest.mark.full)])
def test_a_run_goes_on_from_the_other_kinds_checkpoint(root: Path, replicated: TinyRun, before: str, after: str) -> None:
    run = new_run(root, *TWO, f"cluster.shard={before}")
    for process in start_ranks(run, kill_at=KillAt("manifest", 3)):
        assert end_of(process) != 0
    changed = rewrite_config(run, overrides=[f"cluster.shard={after}"])
    train_ranks_to_end(changed)
    assert_close(changed, replicated, tolerance=2e-5)


@pytest.mark.full
def test_a_stopped_sharded_run_saves_what_all_ranks_hold(root: Path, sharded: TinyRun) -> None:
    run = new_run(root, *SHARDED)
    processes = start_ranks(run)
    wait_until_logged(run, 4, process=processes[0])
    processes[1].terminate()
    assert [end_of(process) for process in processes] == [EXIT_INTERRUPTED] * 2
    assert max(list_checkpoints(run.paths.checkpoints_dir)) == max(live_steps(run.paths)) + 1
    train_ranks_to_end(run)
    assert_same_numbers(run, sharded)


@pytest.mark.full
def test_a_non_finite_gradient_is_skipped_by_all_sharded_ranks(root: Path) -> None:
    run = new_run(root, *SHARDED, "train.lr=1e30", "train.warmup_frac=0.0", "train.clip_norm=1e30")
    assert [end_of(process) for process in start_ranks(run)] == [EXIT_NONFINITE] * 2
    assert sum(record["skipped"] for record in live_steps(run.paths).values()) == run.config.train.max_nonfinite_in_row


@pytest.mark.full
def test_muon_on_sharded_matrices_resumes_exactly(root: Path) -> None:
    settings = (*SHARDED, "train.optimizer.kind=muon", "train.epochs=3")
    whole, run = trained_by_ranks(root, *settings), new_run(root, *settings)
    for process in start_ranks(run, kill_at=KillAt("manifest", 3)):
        assert end_of(process) != 0
    train_ranks_to_end(run)
    assert_same_numbers(run, whole)
    assert any(name.endswith("momentum_buffer") for name in load_file(run.paths.checkpoint(3) / "optimizer.safetensors"))
