"""What is known of a target without loading its weights: shape from its config, identity from its safetensors headers.

Invariant: only JSON and safetensors are read; a pickled checkpoint is refused. The fingerprint hashes the config, every
header and samples of every tensor's bytes (start, middle, end), so that fine-tunes of one shape differ while a 54 GB target
costs a few thousand small reads instead of minutes; an edit that touches only unsampled bytes would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PretrainedConfig

from dflash.config import DrafterConfig, TargetConfig
from dflash.config.model import GGUF_SUFFIX
from dflash.errors import DrafterError, TargetError
from dflash.model.gguf import convert_once

SAMPLE_BYTES = 64
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_DTYPES = frozenset(
    {
        "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0",
        "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F16", "BF16", "F32", "F64", "C64",
    }
)  # fmt: skip
"""Types of the format (https://github.com/huggingface/safetensors)."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Identity and shape of a target.

    Attributes:
        location: folder that it is loaded from.
        fingerprint: SHA-256 (hex) over config, tensor headers and sampled weights.
        hidden_size: width of the residual stream.
        vocab_size: padded vocabulary (rows of the head).
        rope_theta: base of the (full-attention) RoPE; None if the config names none.
        num_parameters: elements of all stored tensors.
    """

    location: str
    fingerprint: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rope_theta: float | None
    max_position_embeddings: int | None
    num_parameters: int


def read_target_info(config: TargetConfig) -> TargetInfo:
    """Read a target's shape and identity from its folder.

    Args:
        config: target section; a hub name is resolved through the local hub cache, or downloaded if that is allowed.

    Returns:
        The target's info.

    Raises:
        TargetError: the folder, its config or its safetensors are missing or malformed, or the shape is not as expected.
    """
    folder = resolve_folder(config)
    text = read_hf_config(folder, trust_remote_code=config.trust_remote_code).get_text_config()
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    num_parameters = 0
    for file in _weight_files(folder):
        num_parameters += _digest_weights(file, digest)
    info = TargetInfo(
        location=str(folder),
        fingerprint=digest.hexdigest(),
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        rope_theta=_rope_theta(text),
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
        num_parameters=num_parameters,
    )
    _check_expected(config, info)
    return info


def check_drafter_fits(drafter: DrafterConfig, info: TargetInfo) -> None:
    """Refuse a drafter that cannot sit on a target.

    Raises:
        DrafterError: its width differs from the target's, or it taps the target's last layer or one that does not exist.
    """
    if drafter.hidden_size != info.hidden_size:
        raise DrafterError(
            f"drafter.hidden_size {drafter.hidden_size} differs from the target's hidden size {info.hidden_size}",
            remedy=f"set drafter.hidden_size={info.hidden_size}: the drafter works on the target's own embedding and head",
        )
    highest = drafter.target_layer_ids[-1]
    if highest >= info.num_hidden_layers - 1:
        raise DrafterError(
            f"drafter.target_layer_ids names layer {highest} of a target with {info.num_hidden_layers} layers (0-based)",
            remedy=f"tap layers 0..{info.num_hidden_layers - 2}: serving engines see the last layer only after the final norm",
        )


def resolve_folder(config: TargetConfig) -> Path:
    """The local folder of a target: the one named, what a GGUF file was converted into, or the hub snapshot.

    Raises:
        TargetError: there is no such folder and the hub does not give it, or the GGUF file cannot be converted.
    """
    folder = Path(config.location)
    if folder.is_dir():
        return folder
    if config.gguf_file is not None:
        convert_once(config.gguf_file, folder)
        return folder
    if folder.suffix == GGUF_SUFFIX:
        raise TargetError(f"GGUF file {config.location} does not exist", remedy="check target.path")
    try:
        snapshot = huggingface_hub.snapshot_download(
            config.location,
            revision=config.revision,
            local_files_only=config.local_files_only,
            allow_patterns=list(HUB_PATTERNS),
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise TargetError(
            f"target {config.location!r} is no folder here and the hub does not give it ({type(error).__name__})",
            remedy="give target.path as an existing Hugging Face folder, or as a hub name that this machine can reach",
        ) from error
    return Path(snapshot)


def read_hf_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The folder's Hugging Face config.

    Raises:
        TargetError: `config.json` is missing, malformed, or of a type that the installed transformers does not know.
    """
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} holds no config.json", remedy="give target.path as a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind: the library believes the file until something does not work
        raise TargetError(
            f"{folder}/config.json cannot be used: {error}",
            remedy="use a model type of the installed transformers, or set target.trust_remote_code=true for a model you trust",
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, or else every safetensors file (some repositories hold the weights twice)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if outside := [name for name in names if Path(name).name != name or name == ".."]:
                raise ValueError(f"it names files outside the folder, {outside[:3]}")
            files = sorted(folder / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TargetError(f"{index} cannot be used: {error}", remedy="download or save the target again") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise TargetError(f"{folder} lacks {', '.join(missing)} that its index names", remedy="download the target again")
    if not files:
        raise TargetError(
            f"{folder} holds no *.safetensors file", remedy="save the target with safetensors; pickled weights are never loaded"
        )
    return files


def _digest_weights(file: Path, digest: Any) -> int:
    """Feed a file's header and samples of its tensors into `digest`; returns the number of elements."""
    with file.open("rb") as stream:
        header, data_start = _read_header(file, stream)
        digest.update(json.dumps(header, sort_keys=True).encode())
        elements = 0
        for entry in _entries(header):
            begin, end = (data_start + offset for offset in entry["data_offsets"])
            elements += math.prod(entry["shape"])
            for position in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
                stream.seek(position)
                digest.update(stream.read(min(SAMPLE_BYTES, end - position)))
    return elements


def _read_header(file: Path, stream: BinaryIO) -> tuple[dict[str, Any], int]:
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > HEADER_LIMIT_BYTES:
            raise ValueError(f"header of {length} bytes")
        header = json.loads(stream.read(length))
        entries = [_checked_offsets(entry) for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TargetError(f"{file} is not a safetensors file: {error}", remedy="download or save the target again") from error
    stored, needed = file.stat().st_size, 8 + length + max((end for _, end in entries), default=0)
    if stored != needed:
        raise TargetError(
            f"{file} has {stored} bytes, its header asks for {needed}", remedy="the file is cut off or damaged: download it again"
        )
    return header, 8 + length


def _checked_offsets(entry: dict[str, Any]) -> tuple[int, int]:
    """First byte and end of a tensor, if they and its shape are whole numbers that can be meant."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    known = entry["dtype"] in _DTYPES and all(type(number) is int and number >= 0 for number in numbers)
    if not known or begin > end or math.prod(entry["shape"]) > 8 * (end - begin):  # no element is smaller than a bit
        raise ValueError(f"a tensor has the type {entry['dtype']}, shape {entry['shape']} and offsets {entry['data_offsets']}")
    return begin, end


def _entries(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (header[name] for name in sorted(header) if name != "__metadata__")


def _rope_theta(text: PretrainedConfig) -> float | None:
    """Base of the RoPE; models with one base for each layer type give that of their full-attention layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    return None if theta is None else float(theta)


def _check_expected(config: TargetConfig, info: TargetInfo) -> None:
    if config.expected is None:
        return
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        wanted, found = getattr(config.expected, name), getattr(info, name)
        if wanted != found:
            raise TargetError(
                f"target {info.location} has {name} {found}, target.expected says {wanted}",
                remedy="point target.path at the intended model, or correct target.expected",
            )
