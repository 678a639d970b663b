"""A run's plan: built once, kept, and never exchanged under a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_toys import Samples, samples_of

from dflash.config import Config
from dflash.data.plan import PlannedRun, load_plan, prepare_plan
from dflash.errors import DataError

LENGTHS = [8, 9, 12, 15, 16, 7] * 6 + [20, 24, 31, 32] * 5 + [40, 48, 63] * 4
SAMPLES = samples_of(LENGTHS, edges=(16, 32, 64))


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


def prepared(folder: Path, settings: Config | None = None, *, samples: Samples = SAMPLES, data: str = "f" * 64) -> PlannedRun:
    return prepare_plan(settings or config(), samples, folder / "plan", data_fingerprint=data)


def test_the_stored_plan_describes_itself(tmp_path: Path) -> None:
    planned = prepared(tmp_path)
    assert not planned.reused
    manifest, plan = planned.plan.manifest, planned.plan
    assert manifest.batches == len(plan) == sum(manifest.batches_per_epoch)
    assert [batch.epoch for batch in plan] == [0] * manifest.batches_per_epoch[0] + [1] * manifest.batches_per_epoch[1]
    assert manifest.samples == len(LENGTHS)
    assert manifest.tokens == 2 * sum(LENGTHS)
    assert manifest.longest_bucket_run <= 2
    assert manifest.bucket_run_feasible
    assert manifest.data_fingerprint == "f" * 64
    assert (manifest.seed, manifest.epochs) == (5, 2)
    assert manifest.settings["max_sequences"] == 12
    assert list(load_plan(tmp_path / "plan")) == list(plan)


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "plan").iterdir()}


def test_a_run_keeps_the_plan_it_has(tmp_path: Path) -> None:
    prepared(tmp_path)
    before = files_of(tmp_path)
    again = prepared(tmp_path)
    assert again.reused
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 6}, "seed"),
        ({"epochs": 3}, "epochs"),
        ({"max_bucket_run": 3}, "settings"),
        ({"pad_multiple_tokens": 8}, "settings"),
        ({"order": "shuffle"}, "settings"),
    ],
)
def test_a_plan_of_other_settings_is_never_exchanged(tmp_path: Path, changed: dict[str, Any], name: str) -> None:
    prepared(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(DataError, match=f"holds a plan with {name}") as caught:
        prepared(tmp_path, config(**changed))
    assert "new run" in str(caught.value)
    assert files_of(tmp_path) == before


def test_a_plan_of_other_data_is_never_exchanged(tmp_path: Path) -> None:
    prepared(tmp_path)
    with pytest.raises(DataError, match="data_fingerprint"):
        prepared(tmp_path, data="e" * 64)


def test_a_plan_without_a_manifest_was_not_finished_and_is_written_anew(tmp_path: Path) -> None:
    first = prepared(tmp_path).plan.manifest
    (tmp_path / "plan/manifest.json").unlink()
    (tmp_path / "plan/epoch-0001.rows.npy").write_bytes(b"torn")
    (tmp_path / "plan/epoch-0007.rows.npy").write_bytes(b"of a longer plan")
    again = prepared(tmp_path)
    assert not again.reused
    assert again.plan.manifest == first
    assert not (tmp_path / "plan/epoch-0007.rows.npy").exists()


def test_an_error_leaves_no_plan(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exceeds"):
        prepared(tmp_path, samples=samples_of([300], edges=(16, 32, 64)))
    assert not (tmp_path / "plan").exists()


def test_the_same_plan_whatever_type_lengths_and_buckets_have(tmp_path: Path) -> None:
    first = prepared(tmp_path / "a").plan.manifest
    wide = Samples(SAMPLES.lengths.astype(np.int64), SAMPLES.buckets.astype(np.int32))
    assert prepared(tmp_path / "b", samples=wide).plan.manifest == first
