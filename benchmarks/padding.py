"""How little a plan pads, and whether it keeps its run limit: real tokens / padded tokens at a budget of 32k padded tokens.

Beside it, on the same lengths: random batches of 16, six buckets alone (every sample padded to the edge of its bucket), our own
order `random`, and what Hugging Face `datasets` gives (sorted and cut into 16, sorted and filled to the same budget, grouped by
length); the last is no dependency: the environment variable `DFLASH_BENCH_DATASETS_PYTHON` names an interpreter that has it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lengths import LONGEST, PEER_VARIABLE, bucket_lengths, draw_lengths, peer_python, run_peer
from benchmarks.report import benchmark_parser, publish
from dflash.config import PlanConfig
from dflash.data.buckets import auto_edges, count_lengths, equal_mass_edges
from dflash.data.interleave import NOTHING_YET, end_of, interleave_epoch, longest_run, shortest_feasible_run
from dflash.data.plan_build import Planner
from dflash.data.plan_stats import naive_efficiency

NAME = "padding"
TOKENS_PER_BATCH = 32_768
MAX_RUN = 3
TOP_SHARE = 0.75
EPOCHS = 3


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    samples, mixes = (100_000, 300) if arguments.quick else (1_000_000, 3000)
    lengths = draw_lengths(samples, seed=2)
    counts = count_lengths(lengths, longest=LONGEST)
    edges = auto_edges(counts, buckets=6, pad_multiple_tokens=16)
    buckets = bucket_lengths(lengths, edges)
    figures: dict[str, Any] = {"samples": samples, "tokens_per_batch": TOKENS_PER_BATCH, "edges": list(edges)}
    for name, changed in {
        "multiples_of_16": {},
        "ladder_of_32": {"max_padded_lengths": 32},
        "ladder_of_16": {"max_padded_lengths": 16},
        "windows_of_4096": {"sort_window_samples": 4096},
        "order_shuffle": {"order": "shuffle"},
        "order_random": {"order": "random"},
    }.items():
        figures |= _plan(name, lengths, buckets, changed)
    figures["random_batches_of_16"] = round(naive_efficiency(lengths, seed=0), 4)
    figures["six_auto_buckets_alone"] = _edges_alone(lengths, edges)
    figures["six_equal_mass_buckets_alone"] = _edges_alone(lengths, equal_mass_edges(counts, buckets=6, pad_multiple_tokens=16))
    figures |= _mixes(mixes)
    figures |= _peer(lengths)
    publish(NAME, figures, arguments)
    return 0


def _plan(name: str, lengths: np.ndarray, buckets: np.ndarray, changed: dict[str, Any]) -> dict[str, Any]:
    plan = PlanConfig.model_validate(
        {
            "tokens_per_batch": TOKENS_PER_BATCH, "max_sequences": 1024, "pad_multiple_tokens": 16,
            "max_bucket_run": MAX_RUN, **changed,
        }
    )  # fmt: skip
    [epoch] = Planner(lengths, buckets, plan=plan, seed=0, epochs=1).epochs()
    real = int(lengths.sum(dtype=np.int64))
    return {
        f"{name}_efficiency": round(real / int(epoch.padded_tokens.sum()), 4),
        f"{name}_padded_lengths": len(np.unique(epoch.padded_length)),
        f"{name}_batches": len(epoch),
        f"{name}_longest_run": longest_run(epoch.bucket, after=NOTHING_YET),
    }


def _edges_alone(lengths: np.ndarray, edges: tuple[int, ...]) -> float:
    padded = np.array(edges)[bucket_lengths(lengths, edges)]
    return round(int(lengths.sum(dtype=np.int64)) / int(padded.sum(dtype=np.int64)), 4)


def _mixes(wanted: int) -> dict[str, Any]:
    """Random mixes of six buckets for which the limit is feasible; runs are counted across the joins of the epochs."""
    rng = np.random.default_rng(3)
    checked = violations = late = above_half = 0
    while checked < wanted:
        total = int(rng.integers(30, 3000))
        counts = rng.multinomial(total, rng.dirichlet([0.5] * 6)).tolist()
        if max(counts) > TOP_SHARE * total or shortest_feasible_run(counts, epochs=EPOCHS) > MAX_RUN:
            continue
        after = NOTHING_YET
        for epoch in range(EPOCHS):
            order = interleave_epoch(
                counts, limit=MAX_RUN, after=after, epochs_after=EPOCHS - epoch - 1, rng=np.random.default_rng((checked, epoch))
            )
            violations += longest_run(order, after=after) > MAX_RUN
            violations += np.bincount(order, minlength=6).tolist() != counts
            late += any(_waits(order, bucket) * count > total for bucket, count in enumerate(counts) if count)
            after = end_of(order, after=after)
        above_half += max(counts) > total / 2
        checked += 1
    return {
        "mixes": checked,
        "mixes_with_top_share_above_half": above_half,
        "run_limit": MAX_RUN,
        "run_limit_violations": violations,
        "epochs_with_a_bucket_out_early": late,
    }


def _waits(order: np.ndarray, bucket: int) -> int:
    """Batches after the last one of a bucket."""
    return len(order) - 1 - int(np.flatnonzero(order == bucket)[-1])


def _peer(lengths: np.ndarray) -> dict[str, Any]:
    python = peer_python()
    if python is None:
        return {"datasets": f"not run: set {PEER_VARIABLE} to a Python that has `datasets`"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths, allow_pickle=False)
        found = run_peer(python, file, tokens_per_batch=TOKENS_PER_BATCH)
    return {
        "datasets": found["version"],
        "datasets_sorted_batches_of_16": round(found["sorted_fixed"], 4),
        "datasets_sorted_filled_to_budget": round(found["sorted_budget"], 4),
        "datasets_group_by_length_16": round(found["group_by_length"], 4),
    }


if __name__ == "__main__":
    raise SystemExit(main())
