"""What it costs to plan 10 and 100 million samples: bucket edges, packing, ordering, hashing and writing one epoch, in one process.

Every plan is made by a child process of its own, so that its peak memory is its own; input arrays and libraries are included.
Beside it, in turn with ours, Hugging Face `datasets` sorts the same lengths and groups them into batches of the same budget; it is
no dependency: the environment variable `DFLASH_BENCH_DATASETS_PYTHON` names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lengths import LONGEST, PEER_VARIABLE, bucket_lengths, draw_lengths, peer_python, run_peer
from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import Config
from dflash.data.buckets import auto_edges, count_lengths
from dflash.data.plan import load_plan, prepare_plan

NAME = "plan"
TOKENS_PER_BATCH = 32_768
LIMITS = {10_000_000: (8.0, 600), 100_000_000: (90.0, 4000)}
"""Seconds and MB that planning so many samples may take."""
ACCESSES = 20_000


class _Samples:
    def __init__(self, lengths: np.ndarray, buckets: np.ndarray) -> None:
        self.lengths = lengths
        self.buckets = buckets


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--child", type=int, metavar="SAMPLES", help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None or arguments.lengths is not None:
        print(json.dumps(_plan_once(arguments.child, arguments.lengths)))
        return 0
    sizes = [1_000_000] if arguments.quick else [10_000_000, 100_000_000]
    figures: dict[str, Any] = {"tokens_per_batch": TOKENS_PER_BATCH, "lengths": "log-normal, median 900, sigma 0.9, 32..8192"}
    for size in sizes:
        runs = [_child("--child", str(size)) for _ in range(1 if size > 10_000_000 else 3)]
        figures |= _figures(size, runs)
    figures |= _beside_peer(samples=200_000 if arguments.quick else 2_000_000, rounds=1 if arguments.quick else 3)
    publish(NAME, figures, arguments)
    return 0


def _plan_once(samples: int | None, lengths_file: Path | None) -> dict[str, Any]:
    """Plan in this process; the clock starts with the lengths in memory."""
    lengths = draw_lengths(samples or 0, seed=0) if lengths_file is None else np.load(lengths_file, allow_pickle=False)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    edges = auto_edges(count_lengths(lengths, longest=LONGEST), buckets=6, pad_multiple_tokens=16)
    buckets = bucket_lengths(lengths, edges)
    with tempfile.TemporaryDirectory() as folder:
        planned = prepare_plan(_config(edges), _Samples(lengths, buckets), Path(folder), data_fingerprint="f" * 64)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        began = time.perf_counter()
        plan = load_plan(Path(folder))
        verify_s = time.perf_counter() - began
        positions = np.random.default_rng(0).integers(len(plan), size=ACCESSES).tolist()
        began = time.perf_counter()
        for position in positions:
            plan[position]
        access_us = 1e6 * (time.perf_counter() - began) / ACCESSES
    manifest = planned.plan.manifest
    return {
        "cpu_s": cpu_s, "wall_s": wall_s, "peak_rss_mb": peak_mb, "disk_mb": disk / 1e6, "verify_s": verify_s,
        "access_us": access_us, "batches": manifest.batches, "efficiency": manifest.padding_efficiency,
        "longest_run": manifest.longest_bucket_run,
    }  # fmt: skip


def _config(edges: tuple[int, ...]) -> Config:
    return Config.model_validate(
        {
            "target": {"path": "none", "mask_token_id": 1},
            "data": {"num_conversations": 1, "bucket_edges_tokens": edges, "max_length_tokens": LONGEST},
            "drafter": {"max_position_embeddings": 2 * LONGEST},
            "plan": {"tokens_per_batch": TOKENS_PER_BATCH, "max_sequences": 1024, "pad_multiple_tokens": 16},
            "train": {"epochs": 1},
        }
    )


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.plan", *arguments]
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=one_core)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _figures(samples: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    name = f"{samples // 1_000_000}m"
    last = runs[-1]
    figures = {
        f"{name}_cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 2),
        f"{name}_wall_s": round(statistics.median(run["wall_s"] for run in runs), 2),
        f"{name}_peak_rss_mb": round(max(run["peak_rss_mb"] for run in runs)),
        f"{name}_disk_mb": round(last["disk_mb"]),
        f"{name}_verify_s": round(last["verify_s"], 3),
        f"{name}_access_us": round(last["access_us"], 1),
        f"{name}_batches": last["batches"],
        f"{name}_efficiency": round(last["efficiency"], 4),
        f"{name}_longest_run": last["longest_run"],
    }
    if samples in LIMITS:
        seconds, megabytes = LIMITS[samples]
        kept = figures[f"{name}_wall_s"] < seconds and figures[f"{name}_peak_rss_mb"] < megabytes
        figures[f"{name}_limits"] = f"{'kept' if kept else 'MISSED'}: {seconds:.0f} s, {megabytes} MB"
    return figures


def _beside_peer(*, samples: int, rounds: int) -> dict[str, Any]:
    python = peer_python()
    if python is None:
        return {"datasets": f"not run: set {PEER_VARIABLE} to a Python that has `datasets`"}
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, draw_lengths(samples, seed=1), allow_pickle=False)
        for _ in range(rounds):
            ours.append(_child("--lengths", str(file)))
            theirs.append(run_peer(python, file, tokens_per_batch=TOKENS_PER_BATCH))
    ratios = [peer["cpu_s"] / mine["cpu_s"] for mine, peer in zip(ours, theirs, strict=True)]
    return {
        "datasets": theirs[0]["version"],
        "datasets_samples": samples,
        "datasets_cpu_s": round(statistics.median(peer["cpu_s"] for peer in theirs), 2),
        "ours_cpu_s": round(statistics.median(mine["cpu_s"] for mine in ours), 2),
        "datasets_over_ours": round(statistics.median(ratios), 1),
        "datasets_over_ours_range": [round(min(ratios), 1), round(max(ratios), 1)],
        "datasets_peak_rss_mb": round(max(peer["peak_rss_mb"] for peer in theirs)),
        "ours_peak_rss_mb": round(max(mine["peak_rss_mb"] for mine in ours)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
