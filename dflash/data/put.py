"""Putting finished files under names that hold the beginning of their hash.

Invariant: after a put the object of that name has the given hash, whoever wrote it and whatever lay there before: an equal
file is left alone, a damaged one is replaced, which is always right under such a name.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.records import DataFile
from dflash.storage import Store, disk_errors, sha256_file, sha256_in_store

logger = logging.getLogger(__name__)

SCRATCH_FOLDER = ".scratch"
"""In a local store: unfinished files of builds, safe to remove while nobody builds."""
_CONTENT_DIGITS = 8


def put_by_content(store: Store, stem: str, local: Path) -> tuple[str, int, str]:
    """Put a finished local file under `<stem>-<content><suffix>`, or find the same bytes there already.

    Args:
        store: the data set's folder.
        stem: name without the hash; the suffix is the local file's.
        local: finished; it must not be changed afterwards.

    Returns:
        Name, size in bytes, SHA-256 (hex).

    Raises:
        StorageError: the store cannot be used.
    """
    sha256, size_bytes = sha256_file(local), local.stat().st_size
    name = f"{stem}-{sha256[:_CONTENT_DIGITS]}{local.suffix}"
    if not store.put_file(name, local, only_if_absent=True) and sha256_in_store(store, name) != sha256:
        logger.warning("%s in %s was damaged: replaced", name, store.uri)
        store.put_file(name, local, only_if_absent=False)
    return name, size_bytes, sha256


def put_data_file(store: Store, stem: str, local: Path, *, rows: int) -> DataFile:
    """Like `put_by_content`; `rows` is what the file lists, for the record."""
    name, size_bytes, sha256 = put_by_content(store, stem, local)
    return DataFile(path=name, rows=rows, size_bytes=size_bytes, sha256=sha256)


@contextmanager
def scratch_folder(store: Store) -> Iterator[Path]:
    """A local folder for unfinished files, gone afterwards; on the store's own file system if that is local.

    Raises:
        StorageError: its disk is full or cannot be written.
    """
    local = store.local_root
    parent = Path(tempfile.gettempdir()) if local is None else local / SCRATCH_FOLDER
    remedy = "free space there and build again: finished files are kept"
    remedy += "; TMPDIR may name another folder for unfinished ones" if local is None else ""
    with disk_errors(f"write unfinished files in {parent}", remedy=remedy):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="dflash-build-") as folder:
            yield Path(folder)
