"""A stored plan comes back as it was, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plan_toys import demo_lengths, plan_of

from dflash.data.plan_arrays import ARRAY_NAMES, BatchPlan, EpochArrays, describe_array, plan_sha256, row_dtype
from dflash.data.plan_file import PlanWriter, load_plan, read_plan_manifest
from dflash.errors import DataError, SchemaVersionError
from tests.support.plans import write_plan
from tests.support.sealing import rewrite, values_of


@pytest.fixture
def plan() -> BatchPlan:
    return plan_of(demo_lengths(60))


@pytest.fixture
def folder(tmp_path: Path, plan: BatchPlan) -> Path:
    write_plan(plan, tmp_path / "plan")
    return tmp_path / "plan"


def test_it_comes_back_as_it_was(plan: BatchPlan, folder: Path) -> None:
    loaded = load_plan(folder)
    assert loaded.manifest == plan.manifest == read_plan_manifest(folder)
    assert list(loaded) == list(plan)
    assert loaded.manifest.plan_sha256 == plan_sha256(plan.manifest.arrays)


def test_the_arrays_are_mapped_not_read(folder: Path) -> None:
    for arrays in load_plan(folder).epochs:
        for _, array in arrays.named():
            base = array
            while not isinstance(base, np.memmap):
                assert base.base is not None
                base = base.base
            assert not array.flags.writeable


def test_plain_numpy_reads_the_arrays(plan: BatchPlan, folder: Path) -> None:
    rows = np.load(folder / "epoch-0001.rows.npy", allow_pickle=False)
    assert np.array_equal(np.sort(rows), np.arange(60))
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", *(f"epoch-{epoch:04d}.{name}.npy" for epoch in (0, 1) for name in ARRAY_NAMES)]
    )


@pytest.mark.parametrize("name", ARRAY_NAMES)
def test_the_hash_covers_every_array_and_its_type(plan: BatchPlan, name: str) -> None:
    array = getattr(plan.epochs[0], name)
    changed = array.copy()
    changed[3] += 1
    entry = describe_array(array, epoch=0, name=name)
    assert describe_array(changed, epoch=0, name=name).sha256 != entry.sha256
    assert describe_array(array.astype(array.dtype.newbyteorder(">")), epoch=0, name=name) == entry
    hashes = [plan_sha256([entry]), plan_sha256([describe_array(array, epoch=1, name=name)]), plan_sha256([])]
    assert len(set(hashes)) == 3


def test_a_plan_that_was_swapped_is_refused(folder: Path) -> None:
    manifest = (folder / "manifest.json").read_bytes()
    write_plan(plan_of(demo_lengths(60), seed=99), folder)
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(DataError, match="is not the array that the manifest describes"):
        load_plan(folder)


def test_two_arrays_that_changed_places_are_refused(folder: Path) -> None:
    one, other = folder / "epoch-0000.rows.npy", folder / "epoch-0001.rows.npy"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(DataError, match=r"epoch-0000\.rows\.npy"):
        load_plan(folder)


@pytest.mark.parametrize("name", ["rows", "bucket"])
def test_a_flipped_byte_anywhere_is_refused_or_harmless(plan: BatchPlan, folder: Path, name: str) -> None:
    file = folder / f"epoch-0000.{name}.npy"
    content = file.read_bytes()
    refused = 0
    for place in range(0, len(content), 3):
        for bit in (0x01, 0x10):
            file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            try:
                assert list(load_plan(folder)) == list(plan)
            except DataError:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_cut_file_is_refused(folder: Path, cut: int) -> None:
    file = folder / "epoch-0001.start.npy"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"epoch-0001\.start\.npy"):
        load_plan(folder)


def test_an_array_of_objects_is_never_unpickled(folder: Path) -> None:
    np.save(folder / "epoch-0000.rows.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="no array of a batch plan"):
        load_plan(folder)


@pytest.mark.parametrize("name", ["manifest.json", "epoch-0000.size.npy"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match="plan"):
        load_plan(folder)


def edit(folder: Path, **changed: object) -> None:
    rewrite(folder / "manifest.json", **changed)


def test_another_manifest_version_is_refused_by_name(folder: Path) -> None:
    edit(folder, schema_version=1)
    with pytest.raises(SchemaVersionError, match="schema version 1, this code reads 2"):
        load_plan(folder)


def test_a_manifest_that_does_not_list_its_own_arrays_is_refused(folder: Path) -> None:
    arrays = values_of(folder / "manifest.json")["arrays"]
    for changed in ({"arrays": arrays[:-1]}, {"plan_sha256": "0" * 64}, {"epochs": 3}):
        write_plan(plan_of(demo_lengths(60)), folder)
        edit(folder, **changed)
        with pytest.raises(DataError, match="do not make the plan"):
            load_plan(folder)


def test_a_file_outside_the_folder_is_never_opened(folder: Path) -> None:
    arrays = values_of(folder / "manifest.json")["arrays"]
    edit(folder, arrays=[{**arrays[0], "path": "../elsewhere.npy"}, *arrays[1:]])
    with pytest.raises(DataError, match="outside its folder"):
        load_plan(folder)


def test_a_writer_begins_by_removing_what_an_interrupted_one_left(plan: BatchPlan, tmp_path: Path) -> None:
    writer = PlanWriter(tmp_path / "plan")
    writer.add(plan.epochs[0])
    writer.add(plan.epochs[1])
    with pytest.raises(DataError, match="no batch plan"):
        load_plan(tmp_path / "plan")
    shorter = plan_of(demo_lengths(60), epochs=1)
    write_plan(shorter, tmp_path / "plan")
    assert len(load_plan(tmp_path / "plan")) == len(shorter)
    assert not list((tmp_path / "plan").glob("epoch-0001*"))


def test_row_numbers_are_as_small_as_they_can_be() -> None:
    assert row_dtype(2**32) == np.dtype("<u4")
    assert row_dtype(2**32 + 1) == np.dtype("<u8")
    assert [name for name, _ in EpochArrays(*(np.zeros(1) for _ in ARRAY_NAMES)).named()] == list(ARRAY_NAMES)
