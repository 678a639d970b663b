"""One bit of any file of a data set or a plan is another: noticed by whoever relies on the file, in words that name it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_toys import demo_lengths, plan_of
from workshop import GOOD, TOKENIZER, VOCAB_SIZE, Workshop

from dflash.config import Config
from dflash.data.commit import known_edges
from dflash.data.plan_file import load_plan
from dflash.data.prepare import PreparedData, load_data, plan_build
from dflash.data.units import find_unit
from dflash.errors import DataError
from tests.support.plans import write_plan


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workshop, Config, PreparedData]:
    """A data set with measured edges and a bad row."""
    folder = tmp_path_factory.mktemp("built")
    TOKENIZER.save_pretrained(str(folder / "target"))
    place = Workshop(folder, folder / "target")
    config = place.config(
        place.corpus(*GOOD, "{oops"), bad_rows="quarantine", max_bad_frac=0.5, bucket_edges_tokens="auto", num_buckets=2
    )
    return place, config, place.prepare(config)


@pytest.fixture
def copy(built: tuple[Workshop, Config, PreparedData], tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(built[2].location, folder)
    return folder


def flipped(file: Path, use: Callable[[], Any], *, stride: int) -> tuple[int, int]:
    """Use a file with one bit changed, for every `stride`-th byte, a different bit each time.

    Returns:
        How often the use was refused, and how often it gave what the intact file gives.
    """
    content, intact = file.read_bytes(), use()
    refused = harmless = 0
    for place in range(0, len(content), stride):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place // stride) % 7
        file.write_bytes(damaged)
        try:
            found = use()
        except DataError as error:
            refused += file.name in error.what and bool(error.remedy)
        else:
            assert found == intact, f"byte {place} of {file.name}: {content[max(0, place - 20) : place + 5]!r}"
            harmless += 1
    file.write_bytes(content)
    assert refused + harmless == len(range(0, len(content), stride)), "every refusal names the file"
    return refused, harmless


@pytest.mark.parametrize("newest", [True, False], ids=["newest", "by name"])
def test_a_manifest(built: tuple[Workshop, Config, PreparedData], copy: Path, newest: bool) -> None:
    fingerprint = built[2].fingerprint
    file = copy / ("manifest.json" if newest else f"manifests/{fingerprint[:16]}.json")
    refused, harmless = flipped(
        file, lambda: load_data(copy, fingerprint=None if newest else fingerprint, verify="sizes").manifest, stride=5
    )
    assert refused > 20 * harmless, "what is harmless is white space"


@pytest.mark.parametrize("pattern", ["bucket=0/*.parquet", "units/*.prompts-*.npy", "units/*.quarantine-*.jsonl"])
def test_a_file_that_the_manifest_names(built: tuple[Workshop, Config, PreparedData], copy: Path, pattern: str) -> None:
    [file] = copy.glob(pattern)
    _, harmless = flipped(file, lambda: load_data(copy, fingerprint=built[2].fingerprint, verify="full").manifest, stride=11)
    assert harmless == 0


def test_a_plan(tmp_path: Path) -> None:
    write_plan(plan_of(demo_lengths(30), epochs=1), tmp_path)
    refused, harmless = flipped(tmp_path / "manifest.json", lambda: load_plan(tmp_path).manifest, stride=4)
    assert refused > 20 * harmless


def test_the_record_of_a_unit_and_the_edges(
    built: tuple[Workshop, Config, PreparedData], copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A build does not stop at a damaged record: it says so and builds the unit again. Edges cannot be chosen again."""
    _, config, data = built
    job, [spec] = plan_build(config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t1", progress=lambda *_: None)
    assert job.location == data.location
    moved = type(job)(job.config, job.recipe, str(copy), job.journals)
    [record] = copy.glob("units/*.json")

    def find() -> Any:
        caplog.clear()
        found = find_unit(spec, job=moved, edges=data.manifest.edges_tokens)
        if found is None and record.name in caplog.text:
            raise DataError(caplog.text, remedy="as the log says")
        return found

    refused, harmless = flipped(record, find, stride=5)
    assert refused > 20 * harmless
    refused, harmless = flipped(copy / "edges.json", lambda: known_edges(moved), stride=1)
    assert refused > 5 * harmless
