"""What the reader does ahead changes nothing that is trained."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dflash.errors import DataError
from dflash.records import RunPaths
from dflash.storage import sha256_file
from dflash.train.group import Alone
from dflash.train.inputs import open_inputs
from dflash.train.models import load_models
from dflash.train.segment import run_segment
from tests.support.tiny_run import TinyRun, build_tiny_run


def train(run: TinyRun) -> None:
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        models = load_models(run.config)
        run_segment(inputs, models, segment=0, resume_step=None, stop=threading.Event(), on_operation=lambda _: None, group=Alone())


def result_of(paths: RunPaths) -> tuple[list[list[float]], str]:
    """Losses of every step, and the hash of the last drafter."""
    records = [json.loads(line) for line in paths.log.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    numbers = [[record["ce"], record["grad_norm"], record["plan_position"]] for record in steps]
    last = max(paths.checkpoints_dir.glob("step-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    return numbers, sha256_file(last / "drafter.safetensors")


def test_reading_ahead_changes_no_number(tmp_path: Path) -> None:
    results = []
    for ahead, threads, cache_mib in ((0, 1, 1), (8, 4, 64)):
        run = build_tiny_run(
            tmp_path,
            overrides=[
                f"data.reader.prefetch_batches={ahead}",
                f"data.reader.threads={threads}",
                f"data.reader.cache_mib={cache_mib}",
                "data.reader.verify=full",
            ],
        )
        train(run)
        results.append(result_of(run.paths))
    assert len(results[0][0]) > 3
    assert results[0] == results[1]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_a_shard_that_is_damaged_while_training_ends_the_segment_with_its_name(tmp_path: Path) -> None:
    run = build_tiny_run(tmp_path, overrides=["data.reader.verify=sizes"])
    shard = next(run.data_dir.rglob("*.parquet"))
    content = bytearray(shard.read_bytes())
    for place in range(4, len(content) // 2):  # the pages, which lie before the index
        content[place] ^= 0xFF
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        models = load_models(run.config)
        shard.write_bytes(content)
        with pytest.raises(DataError, match=shard.name):
            run_segment(
                inputs, models, segment=0, resume_step=None, stop=threading.Event(), on_operation=lambda _: None, group=Alone()
            )
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
