"""Lengths that planning is measured on: log-normal, median 900, sigma 0.9, clipped to 32..8192; and the peer that sees the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 8192
PEER_VARIABLE = "DFLASH_BENCH_DATASETS_PYTHON"
_CHUNK = 1 << 20


def draw_lengths(samples: int, *, seed: int) -> NDArray[np.int32]:
    """[n] lengths in tokens; made in chunks, so that the input costs 4 bytes a sample and no more."""
    rng = np.random.default_rng(seed)
    lengths = np.empty(samples, np.int32)
    for start in range(0, samples, _CHUNK):
        part = lengths[start : start + _CHUNK]
        part[:] = np.clip(np.exp(rng.normal(np.log(900), 0.9, len(part))), 32, LONGEST)
    return lengths


def bucket_lengths(lengths: NDArray[np.int32], edges: tuple[int, ...]) -> NDArray[np.int8]:
    """[n] bucket of each sample."""
    buckets = np.empty(len(lengths), np.int8)
    for start in range(0, len(lengths), _CHUNK):
        part = slice(start, start + _CHUNK)
        buckets[part] = np.searchsorted(np.array(edges), lengths[part])
    return buckets


def peer_python() -> str | None:
    """An interpreter that has Hugging Face `datasets`: named by the environment; the project does not depend on it."""
    return os.environ.get(PEER_VARIABLE)


def run_peer(python: str, lengths_file: Path, *, tokens_per_batch: int) -> dict[str, Any]:
    """Sort and group the same lengths with `datasets` in its own process; see `benchmarks/peer_datasets.py`."""
    script = Path(__file__).with_name("peer_datasets.py")
    command = [python, str(script), str(lengths_file), str(tokens_per_batch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
