"""A data set's folder: its names, and what must hold before anyone reads it.

Invariant: a manifest is believed only if its seal fits and every file that it lists has the size that it says; whether the
bytes are hashed too is the caller's policy. Names come from the manifest, so each must be one that a builder can have given.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from dflash.errors import DataError
from dflash.records import DataFile, DataManifest, ShardEntry, from_sealed_json
from dflash.storage import Store, sha256_in_store

MANIFEST_FILE = "manifest.json"
PREVIEW_FILE = "preview.html"
EDGES_FILE = "edges.json"
BUILD_FILE = "build.json"

Verify = Literal["sizes", "sampled", "full"]

_SAMPLED_SHARE = 16
_NAME = re.compile(r"(bucket=\d+|units)/[A-Za-z0-9][A-Za-z0-9._-]*")


def manifest_name(fingerprint: str) -> str:
    """Name of one version's manifest in the data set's store."""
    return f"manifests/{fingerprint[:16]}.json"


def read_manifest(store: Store, *, fingerprint: str | None, verify: Verify) -> DataManifest:
    """Read a data set's manifest and check its files against it.

    Args:
        store: the data set's folder.
        fingerprint: of the version that is meant; the newest if None.
        verify: `sizes` only, the hashes of some files too (`sampled`), or of every file (`full`).

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: no such complete data set, or a file that is not the one that was written.
    """
    name = MANIFEST_FILE if fingerprint is None else manifest_name(fingerprint)
    if store.size(name) is None:
        raise DataError(
            f"there is no complete data set in {store.uri} ({name} is missing)",
            remedy="build it (python -m dflash data prepare CONFIG); a build that was killed goes on where it stopped",
        )
    manifest = from_sealed_json(DataManifest, store.read(name), origin=f"{store.uri}/{name}")
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise DataError(
            f"{store.uri}/{name} is the manifest of {manifest.fingerprint}, expected {fingerprint}",
            remedy=_remedy(store),
        )
    damage = find_damage(store, (*manifest.shards, *manifest.prompt_files, *manifest.quarantine_files), verify=verify)
    if damage is not None:
        raise DataError(damage, remedy=_remedy(store))
    return manifest


def find_damage(store: Store, files: Sequence[ShardEntry | DataFile], *, verify: Verify) -> str | None:
    """What is wrong with the first file that is not as recorded; None if nothing is."""
    for file in files:
        if not _NAME.fullmatch(file.path):
            return f"{store.uri}: {file.path!r} is no name of a file of a data set"
        size_bytes = store.size(file.path)
        if size_bytes != file.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            return f"{store.uri}/{file.path} {found}, the manifest says {file.size_bytes} bytes"
    for file in _hashed(files, verify):
        if sha256_in_store(store, file.path) != file.sha256:
            return f"the content of {store.uri}/{file.path} differs from the hash in the manifest"
    return None


def read_data_file(store: Store, file: DataFile) -> bytes:
    """Content of a small file of the data set, verified.

    Raises:
        DataError: it is not the one that was written.
    """
    damage = find_damage(store, [file], verify="full")
    if damage is not None:
        raise DataError(damage, remedy=_remedy(store))
    return store.read(file.path)


def _hashed(files: Sequence[ShardEntry | DataFile], verify: Verify) -> Sequence[ShardEntry | DataFile]:
    if verify == "sizes":
        return ()
    if verify == "full":
        return files
    # Others each time, so that every file is looked at sooner or later.
    return random.sample(files, -(-len(files) // _SAMPLED_SHARE))


def _remedy(store: Store) -> str:
    return f"build the data set again (python -m dflash data prepare CONFIG replaces what is damaged in {store.uri})"
