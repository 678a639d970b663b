"""A run's plan: built once, kept, and never exchanged under a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_toys import data_set

from dflash.config import Config
from dflash.data.plan import load_plan, prepare_plan
from dflash.data.reader import SampleStore, collate
from dflash.errors import DataError

LENGTHS = ([8, 9, 12, 15, 16, 7] * 6, [20, 24, 31, 32] * 5, [40, 48, 63] * 4)


def config(*, seed: int = 5, epochs: int = 2, **plan: Any) -> Config:
    settings = {"tokens_per_batch": 256, "max_sequences": 12, "pad_multiple_tokens": 4, "max_bucket_run": 2, **plan}
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "target": {"path": "toy", "mask_token_id": 1},
            "data": {"num_conversations": 1, "bucket_edges_tokens": (16, 32, 64), "max_length_tokens": 64},
            "plan": settings,
            "train": {"epochs": epochs},
        }
    )


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    data_set(folder, LENGTHS)
    return folder


def test_the_manifest_describes_the_batches(data_dir: Path, tmp_path: Path) -> None:
    planned = prepare_plan(config(), data_dir, tmp_path / "plan")
    assert not planned.reused
    manifest, batches = planned.plan.manifest, planned.plan.batches
    lengths = np.concatenate(LENGTHS)
    assert manifest.batches == len(batches) == sum(manifest.batches_per_epoch)
    assert [b.epoch for b in batches] == [0] * manifest.batches_per_epoch[0] + [1] * manifest.batches_per_epoch[1]
    assert manifest.samples == len(lengths)
    assert manifest.tokens == 2 * lengths.sum()
    assert manifest.padded_tokens == sum(len(b.rows) * b.padded_length_tokens for b in batches)
    assert manifest.padding_efficiency == manifest.tokens / manifest.padded_tokens
    assert manifest.longest_bucket_run <= 2
    assert manifest.bucket_run_feasible
    assert manifest.data_fingerprint == "f" * 64
    assert (manifest.seed, manifest.epochs) == (5, 2)
    assert manifest.settings["max_sequences"] == 12
    assert load_plan(tmp_path / "plan") == planned.plan


def test_an_epoch_of_batches_reads_every_sample_once(data_dir: Path, tmp_path: Path) -> None:
    plan = prepare_plan(config(epochs=1), data_dir, tmp_path / "plan").plan
    with SampleStore(data_dir) as store:
        supervised = sum(int(collate(planned, store, pad_id=0).loss_mask.sum()) for planned in plan.batches)
        assert supervised == store.manifest.supervised_tokens


def test_a_run_keeps_the_plan_it_has(data_dir: Path, tmp_path: Path) -> None:
    first = prepare_plan(config(), data_dir, tmp_path / "plan")
    stamp = (tmp_path / "plan/plan.parquet").stat().st_mtime_ns
    second = prepare_plan(config(), data_dir, tmp_path / "plan")
    assert second.reused
    assert second.plan == first.plan
    assert (tmp_path / "plan/plan.parquet").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 6}, "seed"),
        ({"epochs": 3}, "epochs"),
        ({"max_bucket_run": 3}, "settings"),
        ({"pad_multiple_tokens": 8}, "settings"),
    ],
)
def test_a_plan_of_other_settings_is_never_exchanged(data_dir: Path, tmp_path: Path, changed: dict[str, int], name: str) -> None:
    first = prepare_plan(config(), data_dir, tmp_path / "plan").plan
    with pytest.raises(DataError, match=f"holds a plan with {name}") as caught:
        prepare_plan(config(**changed), data_dir, tmp_path / "plan")  # type: ignore[arg-type]
    assert "new run" in str(caught.value)
    assert load_plan(tmp_path / "plan") == first


def test_a_plan_without_a_manifest_was_not_finished_and_is_written_anew(data_dir: Path, tmp_path: Path) -> None:
    first = prepare_plan(config(), data_dir, tmp_path / "plan").plan
    (tmp_path / "plan/manifest.json").unlink()
    (tmp_path / "plan/plan.parquet").write_bytes(b"torn")
    again = prepare_plan(config(), data_dir, tmp_path / "plan")
    assert not again.reused
    assert again.plan == first


def test_an_infeasible_run_limit_is_declared_and_the_best_possible_kept(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data_set(tmp_path / "data", ([16] * 64, [32], []))
    plan = prepare_plan(config(max_sequences=8, epochs=1), tmp_path / "data", tmp_path / "plan").plan
    assert [b.bucket for b in plan.batches].count(0) == 8
    assert not plan.manifest.bucket_run_feasible
    assert plan.manifest.longest_bucket_run == 4


def test_data_of_one_bucket_is_one_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data_set(tmp_path / "data", ([], [20] * 30, []))
    manifest = prepare_plan(config(), tmp_path / "data", tmp_path / "plan").plan.manifest
    assert manifest.longest_bucket_run == manifest.batches
    assert not manifest.bucket_run_feasible
