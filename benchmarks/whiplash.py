"""What the order of the batches does to a training: the demo under every order of the plan, with several seeds.

Batches of one length bucket in long runs, and jumps between them, were suspected of throwing a drafter's loss and gradients
about. Each run is the demo but for `plan.order` and `run.seed`; the runs land in one MLflow experiment (`whiplash`) and one
folder, and a finished run is not trained again when the benchmark is repeated with the same `--work`.
Spikes: a micro-batch whose loss is over 1.5 times the median of the 16 before it in its own bucket, once the learning rate is up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.records import RunPaths

NAME = "whiplash"
ORDERS = ("interleave", "shuffle", "sorted", "random")
SEEDS = (20260, 20261, 20262)
SPIKE_FACTOR = 1.5
SPIKE_WINDOW = 16
WARM_UP_FRAC = 0.1
END_STEPS = 100
COMMON = ("tracking.experiment=whiplash", "evaluate.num_prompts=32", "health.check_interval_s=30", "rollback.enabled=false")
QUICK = ("data.num_conversations=60", "data.max_bad_frac=0.5", "train.max_steps=40", "evaluate.num_prompts=3")


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / NAME, help="folder of the runs; continued if it exists")
    arguments = parser.parse_args()
    orders, seeds = (ORDERS[::3], SEEDS[:1]) if arguments.quick else (ORDERS, SEEDS)
    rows = {order: [_one(order, seed, arguments) for seed in seeds] for order in orders}
    figures: dict[str, Any] = {"seeds": len(seeds)}
    for order, found in rows.items():
        for key in found[0]:
            values = [row[key] for row in found]
            figures[f"{order}_{key}"] = _rounded(statistics.median(values))
            if len(values) > 1 and key in ("acceptance_length", "spikes", "grad_norm_max_over_median"):
                figures[f"{order}_{key}_spread"] = [_rounded(min(values)), _rounded(max(values))]
    publish(NAME, figures, arguments)
    return 0


def _one(order: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of one run, trained and measured unless that was done before."""
    name = f"{order}-{seed}" + ("-quick" if arguments.quick else "")
    paths = RunPaths(arguments.work / f"{name}-001")
    kept = arguments.work / f"{name}.json"
    if not kept.is_file():
        settings = [f"run.root={arguments.work}", f"run.name={name}", f"run.seed={seed}", f"plan.order={order}", *COMMON]
        _dflash("train", "configs/demo.yaml", *settings, *(QUICK if arguments.quick else ()))
        newest = max(paths.checkpoints_dir.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
        told = _dflash("evaluate", str(paths.root), "--checkpoint", str(newest), "--json")
        row = _figures(list(_steps(paths))) | {"acceptance_length": float(json.loads(told)["acceptance_length"])}
        kept.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    row = json.loads(kept.read_text(encoding="utf-8"))
    print(name, row, file=sys.stderr)
    return {str(key): float(value) for key, value in row.items()}


def _dflash(*words: str) -> str:
    """Run a command of the package; returns the last line that it printed."""
    command = [sys.executable, "-m", "dflash", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} failed with exit code {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def _steps(paths: RunPaths) -> Iterable[dict[str, Any]]:
    for line in paths.log.read_bytes().splitlines():
        item = msgspec.json.decode(line)
        if item["kind"] == "step":
            yield item


def _figures(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    warm = steps[int(WARM_UP_FRAC * len(steps)) :]
    micro = [item for step in warm for item in step["micro_batches"]]
    losses = [(item["bucket"], item["ce_sum"] / item["n_tokens"]) for item in micro if item["ce_sum"] is not None]
    norms = np.array([step["grad_norm"] for step in warm if step["grad_norm"] is not None])
    buckets = [item["bucket"] for step in steps for item in step["micro_batches"]]
    spikes = _spikes(losses)
    real = sum(item["length_sum_tokens"] for step in steps for item in step["micro_batches"])
    padded = sum(item["padded_length_tokens"] * item["n_seqs"] for step in steps for item in step["micro_batches"])
    jumps = [abs(after - before) for (_, before), (_, after) in itertools.pairwise(losses)]
    return {
        "spikes": sum(spikes.values()),
        "spikes_in_worst_bucket": max(spikes.values(), default=0),
        "mean_jump_of_loss": float(np.mean(jumps)),
        "grad_norm_p99_over_median": float(np.quantile(norms, 0.99) / np.median(norms)),
        "grad_norm_max_over_median": float(norms.max() / np.median(norms)),
        "clipped_frac": float(np.mean([step["clip_coef"] < 1 for step in warm if step["clip_coef"] is not None])),
        "longest_run": _longest_run(buckets),
        "padding_frac": 1.0 - real / padded,
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in warm),
        "final_ce": statistics.fmean(step["ce"] for step in steps[-END_STEPS:]),
        "final_accepted_length": statistics.fmean(step["accepted_length"] for step in steps[-END_STEPS:]),
    }


def _spikes(losses: Iterable[tuple[int, float]]) -> dict[int, int]:
    """Losses over `SPIKE_FACTOR` times the median of their bucket's last `SPIKE_WINDOW`, by bucket."""
    before: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SPIKE_WINDOW))
    found: dict[int, int] = {}
    for bucket, loss in losses:
        own = before[bucket]
        found.setdefault(bucket, 0)
        if len(own) == SPIKE_WINDOW and loss > SPIKE_FACTOR * statistics.median(own):
            found[bucket] += 1
        own.append(loss)
    return found


def _longest_run(buckets: Sequence[int]) -> int:
    longest = current = 0
    for index, bucket in enumerate(buckets):
        current = current + 1 if index and bucket == buckets[index - 1] else 1
        longest = max(longest, current)
    return longest


def _rounded(value: float) -> float:
    return round(value, 4) if abs(value) < 100 else round(value)


if __name__ == "__main__":
    raise SystemExit(main())
