"""A data set's folder: its names, and what must hold before anyone reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from dflash.errors import DataError
from dflash.records import DataManifest, from_json
from dflash.storage import sha256_file

MANIFEST_FILE = "manifest.json"
PROMPT_HASHES_FILE = "prompt_hashes.txt"
QUARANTINE_FILE = "quarantine.jsonl"
PREVIEW_FILE = "preview.html"


def read_manifest(data_dir: Path, *, verify: bool) -> DataManifest:
    """Read a data set's manifest and check its files against it.

    Args:
        data_dir: the data set's folder.
        verify: hash every file; otherwise only presence and sizes are compared.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: no complete data set, or a file that is not the one that was written.
    """
    file = data_dir / MANIFEST_FILE
    if not file.is_file():
        raise DataError(
            f"there is no complete data set in {data_dir} ({MANIFEST_FILE} is missing)",
            remedy="build it (python -m dflash data prepare CONFIG); remove the folder first if it exists",
        )
    manifest = from_json(DataManifest, file.read_bytes(), origin=str(file))
    for shard in manifest.shards:
        path = data_dir / shard.path
        size_bytes = path.stat().st_size if path.is_file() else None
        if size_bytes != shard.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise _damaged(data_dir, f"{path} {found}, the manifest says {shard.size_bytes} bytes")
        if verify and sha256_file(path) != shard.sha256:
            raise _damaged(data_dir, f"the content of {path} differs from the hash in the manifest")
    if verify:
        read_prompt_hashes_of(data_dir, manifest)
    return manifest


def read_prompt_hashes_of(data_dir: Path, manifest: DataManifest) -> frozenset[str]:
    """The normalised hashes of every user turn that a sample was made from, verified against the manifest."""
    path = data_dir / PROMPT_HASHES_FILE
    if not path.is_file():
        raise _damaged(data_dir, f"{path} is missing")
    lines = path.read_text(encoding="utf-8").split()
    if hashes_sha256(lines) != manifest.prompt_hashes_sha256:
        raise _damaged(data_dir, f"the content of {path} differs from the hash in the manifest")
    return frozenset(lines)


def hashes_sha256(hashes: Iterable[str]) -> str:
    """SHA-256 (hex) over sorted hashes, one a line."""
    return hashlib.sha256("".join(f"{line}\n" for line in sorted(hashes)).encode()).hexdigest()


def _damaged(data_dir: Path, what: str) -> DataError:
    return DataError(what, remedy=f"remove {data_dir} and build the data set again")
