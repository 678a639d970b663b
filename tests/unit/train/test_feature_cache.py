"""The feature cache: what is read is what was stored, it stays within its bound, and a kill changes no number."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.reader import collate
from dflash.model.target import Target
from dflash.storage import sha256_file
from dflash.train.doctor.machine import judge_disk
from dflash.train.feature_cache import CHECKSUM_BYTES, FeatureCache
from dflash.train.features import FeatureBatch, FeatureMaker, make_maker, states_width
from dflash.train.group import Alone
from dflash.train.inputs import Inputs, open_inputs
from dflash.train.models import load_models
from dflash.train.segment import run_segment
from tests.support.tiny_run import MASK_TOKEN_ID, TinyRun, build_tiny_run

WIDTH = 5
CACHED = "train.feature_cache_gib=0.001"


def cache_of(folder: Path, lengths: list[int], *, max_bytes: int = 10**6, dtype: torch.dtype = torch.float32) -> FeatureCache:
    return FeatureCache(folder, lengths=np.array(lengths, np.int32), width=WIDTH, dtype=dtype, max_bytes=max_bytes)


def states_of(length: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = cache_of(tmp_path / "c", [7, 3], dtype=dtype)
    assert cache.load(0) is None
    wanted = states_of(7, dtype=dtype)
    cache.store(0, wanted)
    found = cache_of(tmp_path / "c", [7, 3], dtype=dtype).load(0)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert cache.load(1) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), max_bytes=st.integers(1, 4000))
def test_it_keeps_the_longest_beginning_that_fits_its_bound(
    lengths: list[int], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("bound")
    cache = cache_of(root, lengths, max_bytes=max_bytes)
    for row, length in enumerate(lengths):
        cache.store(row, states_of(length, seed=row))
    sizes = [length * WIDTH * 4 + CHECKSUM_BYTES for length in lengths]
    fitting = [count for count in range(len(lengths) + 1) if sum(sizes[:count]) <= max_bytes]
    assert cache.kept_rows == max(fitting)
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) == sum(sizes[: cache.kept_rows])
    assert [cache.load(row) is not None for row in range(len(lengths))] == [row < cache.kept_rows for row in range(len(lengths))]


@pytest.mark.parametrize("damage", ["byte", "short", "long", "empty"])
def test_a_damaged_file_is_told_and_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    cache = cache_of(tmp_path, [6])
    cache.store(0, states_of(6))
    file = next(tmp_path.rglob("*.states"))
    content = bytearray(file.read_bytes())
    content[11] ^= 1
    damaged = {"byte": bytes(content), "short": file.read_bytes()[:-9], "long": file.read_bytes() + b"x", "empty": b""}
    file.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert cache.load(0) is None
    assert "is damaged and computed again" in caplog.text
    cache.store(0, states_of(6))
    assert cache.load(0) is not None


def test_states_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, [4])
    states = states_of(4)
    states[2, 1] = torch.nan
    cache.store(0, states)
    assert cache.load(0) is None


def test_a_cache_that_cannot_be_written_is_told_once_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(tmp_path, [4, 4])
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        cache.store(0, states_of(4))
        cache.store(1, states_of(4))
    assert caplog.text.count("takes nothing more") == 1


def test_only_what_is_never_kept_is_computed_alone(tmp_path: Path) -> None:
    lengths = [3, 4, 2]
    cache = cache_of(tmp_path, lengths, max_bytes=2 * (4 * WIDTH * 4 + CHECKSUM_BYTES))
    assert cache.kept_rows == 2
    whole = torch.zeros(3, 4, WIDTH)
    for index, length in enumerate(lengths):
        whole[index, :length] = states_of(length, seed=index)
    asked: list[list[int]] = []

    def compute(rows: list[int]) -> torch.Tensor:
        asked.append(rows)
        return whole[rows].clone()

    for _ in range(2):
        visit = cache.visit(range(3), lengths)
        assert torch.equal(visit.complete(compute, tokens=4, device=torch.device("cpu")), whole)
        visit.keep()
    next(tmp_path.rglob("1.states")).unlink()
    assert torch.equal(cache.visit(range(3), lengths).complete(compute, tokens=4, device=torch.device("cpu")), whole)
    cache.visit([1, 0], [4, 3]).keep()  # nothing was computed
    assert asked == [[0, 1, 2], [2], [0, 1, 2]]


def counted_maker(run: TinyRun, inputs: Inputs) -> tuple[FeatureMaker, Counter[str]]:
    """A maker with a cache, and how often its target ran."""
    models = load_models(run.config)
    target: Target = models.targets[0]
    runs: Counter[str] = Counter()
    target.model.get_decoder().register_forward_pre_hook(lambda *_: runs.update(["decoder"]))
    cache = FeatureCache(
        Path(run.config.run.root) / "features" / "x",
        lengths=inputs.store.lengths,
        width=states_width(run.config, target),
        dtype=torch.float32,
        max_bytes=10**8,
    )
    maker = make_maker(
        target=target,
        target_index=0,
        config=run.config,
        mask_token_id=MASK_TOKEN_ID,
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )
    return dataclasses.replace(maker, cache=cache), runs


def tensors_of(batch: FeatureBatch) -> list[torch.Tensor]:
    tensors = [batch.features, batch.block_embeds, *batch.anchors, *batch.labels]
    return tensors if batch.target_states is None else [*tensors, batch.target_states.hidden]


@pytest.mark.parametrize("objective", ["decay", "acceptance"])
def test_features_from_the_cache_are_the_computed_ones_and_ask_no_target(tmp_path: Path, objective: str) -> None:
    run = build_tiny_run(tmp_path, overrides=[f"train.loss.objective={objective}"])
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        maker, runs = counted_maker(run, inputs)
        batch = collate(inputs.plan[0], inputs.store, pad_id=0)
        plain = dataclasses.replace(maker, cache=None).make(batch)
        made = [maker.make(batch) for _ in range(2)]
    assert runs["decoder"] == 2
    for other in made:
        for mine, wanted in zip(tensors_of(other), tensors_of(plain), strict=True):
            assert torch.equal(mine, wanted)


def train(run: TinyRun, *, resume_step: int | None, segment: int) -> str:
    """Train to the end; the hash of the last weights."""
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        state = run_segment(
            inputs,
            load_models(run.config),
            segment=segment,
            resume_step=resume_step,
            stop=threading.Event(),
            on_operation=lambda _: None,
            group=Alone(),
        )
    return sha256_file(run.paths.checkpoint(state.step) / "drafter.safetensors")


def test_a_resume_with_part_of_the_later_samples_changes_no_number(tmp_path: Path) -> None:
    overrides = [CACHED, "train.epochs=3", "checkpoint.keep_other=50"]
    run = build_tiny_run(tmp_path, overrides=overrides)
    wanted = train(run, resume_step=None, segment=0)
    records = [json.loads(line) for line in run.paths.log.read_text().splitlines()]
    reached = {record["step"]: record["plan_position"] for record in records if record["kind"] == "step"}
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        seen = {row for position in range(reached[4]) for row in inputs.plan[position].rows}
    files = {int(file.stem): file for file in (tmp_path / "runs" / "features").rglob("*.states")}
    assert sorted(files) == list(range(len(files)))
    assert len(seen) < len(files), "checkpoint 4 lies in the first epoch"
    later = sorted(files.keys() - seen)
    for row in random.Random(1).sample(later, len(later) // 2):
        files[row].unlink()
    assert train(run, resume_step=4, segment=1) == wanted
    assert len(list((tmp_path / "runs" / "features").rglob("*.states"))) == len(files)


def test_the_doctor_asks_for_room_and_does_not_insist() -> None:
    found = judge_disk("runs", 10_000_000_000, 11_000_000_000, cache_bytes=2_000_000_000)
    assert (found.status, found.message) == (
        "warn",
        "11.0 GB free, checkpoints need 10.00 GB, the feature cache may take 2.00 GB, if it is not there yet",
    )
