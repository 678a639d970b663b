"""Targets, tokenizers and drafters whose JSON is something else: one error with a remedy, whatever the libraries make of it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dflash.config import TargetConfig
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.errors import TargetError
from dflash.model.export_audit import audit_folder
from dflash.model.gguf import convert_once
from dflash.model.target_info import read_hf_config
from tests.support.demo_target import DEMO_TARGET

BROKEN = {
    "deep": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "long": '{"vocab_size": ' + "9" * 6000 + "}",
    "list": "[1]",
    "null": "null",
    "text": '"x"',
    "number": "7",
    "empty": "",
    "cut": '{"model_type": "qw',
}
WRONG = [
    ("tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE"}}'),
    ("tokenizer_config.json", '{"eos_token": {"evil": 1}}'),
    ("generation_config.json", '{"eos_token_id": ["x"]}'),
    ("generation_config.json", '{"eos_token_id": [[1]]}'),
    ("config.json", '{"model_type": ["qwen3"]}'),
    ("config.json", '{"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["x"]}'),
]
LLAMA_NUMBERS = (
    "embedding_length",
    "block_count",
    "attention.head_count",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
)
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FILES for text in BROKEN.values()] + WRONG)
def test_a_target_whose_file_is_something_else(name: str, text: str, tmp_path: Path) -> None:
    for source in DEMO_TARGET.iterdir():
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(text)
    config = TargetConfig(path=str(tmp_path), mask_token_id=9)
    with pytest.raises(TargetError) as caught:
        read(config)
    assert str(tmp_path) in caught.value.what


def read(config: TargetConfig) -> None:
    read_hf_config(Path(config.path), trust_remote_code=False)
    stop_token_ids(load_tokenizer(config), config)


def named(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_file(*values: tuple[str, int, bytes], tensors: int = 0) -> bytes:
    """A GGUF file of these metadata: name, number of the type, bytes."""
    counts = struct.pack("<IQQ", 3, tensors, len(values))
    return b"GGUF" + counts + b"".join(named(name) + struct.pack("<I", kind) + data for name, kind, data in values)


ARRAY, TEXT, U32 = 9, 8, 4
LLAMA = ("general.architecture", TEXT, named("llama"))
GGUF = {
    "counts": gguf_file(tensors=1 << 60),
    "nested": gguf_file(("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 3000)),
    "kind": gguf_file(("a", 77, b"")),
    "no text": gguf_file(("a", TEXT, struct.pack("<Q", 2) + b"\xff\xfe")),
    "nothing but its architecture": gguf_file(LLAMA),
    "texts for numbers": gguf_file(LLAMA, *((f"llama.{name}", TEXT, named("x")) for name in LLAMA_NUMBERS)),
    "no heads": gguf_file(LLAMA, *((f"llama.{name}", U32, struct.pack("<I", 0)) for name in LLAMA_NUMBERS)),
}


@pytest.mark.parametrize("data", GGUF.values(), ids=list(GGUF))
def test_a_gguf_file_that_is_something_else(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(TargetError, match=r"x\.gguf"):
        convert_once(file, tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_published_drafter_whose_file_is_something_else(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    failed = {check.message: check.remedy for check in audit_folder(tmp_path, target=None, tables=None) if check.status == "fail"}
    (told,) = [message for message in failed if name in message]
    assert "cannot be read" in told or "holds no object" in told
    assert failed[told]
