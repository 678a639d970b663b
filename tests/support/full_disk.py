"""A disk that is full for this process: files may not grow past a limit, as with a quota; no privileges needed."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(*, limit_bytes: int) -> Iterator[None]:
    """Let every write behind `limit_bytes` of a file fail (EFBIG, an OSError) while the block runs.

    Python ignores the signal that comes with it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
