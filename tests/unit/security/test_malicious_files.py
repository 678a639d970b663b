"""Weights, shards and arrays from somebody else: code in them never runs, lies in them are one error of the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.checkpoint.load import load_checkpoint, load_drafter, read_state
from dflash.checkpoint.scan import scan_file
from dflash.config import TargetConfig
from dflash.data.conversations import read_source
from dflash.errors import CheckpointError, DataError, DrafterError, TargetError
from dflash.model.export_files import stored_tensors
from dflash.model.target import load_target
from dflash.model.target_info import read_target_info
from dflash.records import CheckpointManifest, FileEntry, from_json, to_json
from tests.support.checkpoints import save_at
from tests.support.malice import hostile_headers, pickled, tarred, zipped

ARCHIVES: dict[str, Callable[[Path], bytes]] = {"pickle": pickled, "zip": zipped, "tar": tarred}


def _bytes_of(kind: str, canary: Path) -> bytes:
    return ARCHIVES[kind](canary) if kind in ARCHIVES else hostile_headers()[kind]


def resealed(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes into a checkpoint and write a manifest that fits them: whoever makes a checkpoint makes its hashes too."""
    (folder / name).write_bytes(data)
    manifest = from_json(CheckpointManifest, (folder / "manifest.json").read_text(), origin="manifest")
    files = [entry for entry in manifest.files if entry.name != name]
    files.append(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()))
    raw = json.loads(to_json(manifest)) | {"files": [json.loads(to_json(entry)) for entry in files]}
    (folder / "manifest.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_at(folder, 4)
    return folder / "step-4"


@pytest.mark.parametrize("kind", [*ARCHIVES, *hostile_headers()])
def test_a_checkpoint_whose_hashes_fit_but_whose_weights_are_something_else(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = _bytes_of(kind, canary)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    try:
        for name, read in {"optimizer.safetensors": load_checkpoint, "drafter.safetensors": load_drafter}.items():
            resealed(checkpoint, name, data)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                read(checkpoint)
        with pytest.raises(CheckpointError):
            list(scan_file(checkpoint / "drafter.safetensors"))
    finally:
        for name, content in before.items():
            (checkpoint / name).write_bytes(content)
    assert not canary.exists()
    assert not (tmp_path.parent / "climbed.txt").exists()


@pytest.mark.parametrize("kind", [*ARCHIVES, *hostile_headers()])
def test_weights_of_a_target_or_a_published_drafter_that_are_something_else(kind: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "model"
    folder.mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(_bytes_of(kind, canary))
    config = TargetConfig(path=str(folder), mask_token_id=9)
    with pytest.raises(TargetError):
        read_target_info(config)
    with pytest.raises(DrafterError, match=r"model\.safetensors"):
        stored_tensors(folder)
    assert not canary.exists()


def test_pickled_weights_beside_a_configuration_are_never_opened(tmp_path: Path) -> None:
    import torch

    canary = tmp_path / "canary"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2}))
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(pickled(canary))
    with pytest.raises(TargetError, match="pickled weights are never loaded"):
        load_target(TargetConfig(path=str(tmp_path), mask_token_id=9), target_layer_ids=(0,), device=torch.device("cpu"))
    assert not canary.exists()


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_states_that_are_pickles(name: str, checkpoint: Path, tmp_path: Path) -> None:
    canary, before = tmp_path / "canary", (checkpoint / name).read_bytes()
    try:
        (checkpoint / name).write_bytes(pickled(canary))
        with pytest.raises(CheckpointError):
            read_state(checkpoint)
    finally:
        (checkpoint / name).write_bytes(before)
    assert not canary.exists()


def test_parquet_metadata_that_asks_for_code_is_inert(tmp_path: Path) -> None:
    """Extension types were once unpickled by the reader (CVE-2023-47248), and pandas metadata names types to import."""
    canary, file = tmp_path / "canary", tmp_path / "rows.parquet"
    evil = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled(canary)}
    rows = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    messages = pa.array(rows)
    fields = [pa.field("messages", messages.type, metadata=evil), pa.field("source", pa.string(), metadata=evil)]
    schema = pa.schema(fields, metadata={**evil, b"pandas": b'{"columns": [{"numpy_type": "os.system"}]}'})
    pq.write_table(pa.Table.from_arrays([messages, pa.array(["s"])], schema=schema), file)
    found = list(read_source(str(file), label="rows", system_prompt=None))
    assert [row.messages[1].content for row in found] == ["a"]  # type: ignore[union-attr]
    assert not canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"PAR1",
        b"PAR1PAR1",
        b"PAR1" + (2**31).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + bytes(64) + (60).to_bytes(4, "little") + b"PAR1",
    ],
)
def test_footers_that_lie_are_one_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError, match="no readable Parquet file"):
        list(read_source(str(file), label="rows", system_prompt=None))
