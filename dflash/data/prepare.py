"""Build a data set, or find the one that is there: the one entry to the room's first half.

Everything is written into `<fingerprint>.partial`; the manifest comes last, then the folder gets its real name. So a
folder with the real name is complete, and a killed build leaves nothing that could be taken for data. The answers lie
outside, in a journal that outlives any build.

One build at a time in one data folder: a second process waits, and then usually finds the data set ready.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash.config import Config
from dflash.data.answers import GenerateFn, Progress
from dflash.data.build import DataBuild
from dflash.data.fingerprint import data_fingerprint, described_fingerprint, source_description
from dflash.data.manifest import read_manifest
from dflash.data.tokenizer import resolve_mask_token_id
from dflash.errors import DataError
from dflash.records import DataManifest
from dflash.storage import fsync_dir

__all__ = ["PreparedData", "data_fingerprint", "load_data", "prepare_data"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A complete data set.

    Attributes:
        dir: its folder.
        reused: it was there already.
    """

    dir: Path
    manifest: DataManifest
    reused: bool


def load_data(data_dir: Path, *, verify: bool = False) -> PreparedData:
    """Open a complete data set.

    Args:
        data_dir: its folder.
        verify: hash every file; otherwise presence and sizes are compared.

    Raises:
        SchemaVersionError: written with another schema version.
        DataError: incomplete or damaged.
    """
    return PreparedData(data_dir, read_manifest(data_dir, verify=verify), reused=True)


def prepare_data(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    target_fingerprint: str,
    generate: GenerateFn | None,
    progress: Progress,
) -> PreparedData:
    """Build the data set that a configuration describes, unless an identical one is there.

    Args:
        config: its `data` section, the target's tokens and `run.root` matter.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.
        target_fingerprint: identity of the target that writes the answers.
        generate: the target; needed if `data.answers.regenerate` and answers are missing.
        progress: called with (label, done, total).

    Raises:
        DataError: rows, tokens or the template cannot be used; nothing but the journal of answers is left behind.
        StorageError: a source file is missing.
        TargetError: the mask token is not usable.
    """
    mask_token_id = resolve_mask_token_id(config.target, tokenizer, vocab_size=vocab_size)
    source = source_description(config.data)
    fingerprint = described_fingerprint(config, source, tokenizer=tokenizer, target_fingerprint=target_fingerprint)
    root = Path(config.run.root) / "data"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / fingerprint[:16]
    with _exclusive(root):
        if folder.exists():
            return _reused(folder, fingerprint)
        identity = {
            "fingerprint": fingerprint,
            "source": source,
            "target_fingerprint": target_fingerprint,
            "vocab_size": vocab_size,
            "mask_token_id": mask_token_id,
        }
        build = DataBuild(config, tokenizer, identity, folder)
        with _partial_folder(folder) as partial:
            manifest = build.run(partial, generate=generate, progress=progress)
    return PreparedData(folder, manifest, reused=False)


def _reused(folder: Path, fingerprint: str) -> PreparedData:
    manifest = read_manifest(folder, verify=True)
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{folder} holds a data set with the fingerprint {manifest.fingerprint}, expected {fingerprint}",
            remedy=f"remove {folder} and build the data set again",
        )
    logger.info("data set %s is unchanged and complete: reused", folder)
    return PreparedData(folder, manifest, reused=True)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Hold the data folder's lock; the kernel releases it however the process ends."""
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process builds data in %s: waiting for it", root)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` on success and is removed on failure."""
    partial = folder.with_suffix(".partial")
    if partial.exists():
        logger.info("removing %s, left by a build that was killed; its answers are kept in the journal", partial)
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    fsync_dir(partial)
    partial.rename(folder)
    fsync_dir(folder.parent)
