"""How long data-parallel ranks wait for the one with the dearest batches, and what equal-cost neighbours cost in mixture.

Pure planning, so no clock is read: cost is taken as padded tokens. The plan is that of `configs/train-v2.yaml` (its buckets, its
padding, its limit of sequences) over log-normal lengths, and one with twice the budget and no such limit. A step's micro-batches
are dealt to the ranks as the trainer does.
Beside it stands the price: the share of steps that see a single bucket, at one micro-batch a rank and step.
"""

from __future__ import annotations

from typing import Any

from benchmarks.lengths import bucket_lengths, draw_lengths
from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import PlanConfig, load_config
from dflash.data.plan_arrays import EpochArrays
from dflash.data.plan_build import Planner
from dflash.train.schedule import waiting_frac

NAME = "rank_wait"
CONFIG = ROOT / "configs" / "train-v2.yaml"
RANKS = (2, 4, 8)
NO_LIMIT = 1024


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    config = load_config(CONFIG)
    edges = config.data.bucket_edges_tokens
    assert isinstance(edges, tuple)
    samples = 30_000 if arguments.quick else 200_000
    lengths = draw_lengths(samples, seed=4)
    buckets = bucket_lengths(lengths, edges)

    def planned(plan: PlanConfig, neighbours: int) -> EpochArrays:
        plan = plan.model_copy(update={"equal_cost_neighbours": neighbours})
        [epoch] = Planner(lengths, buckets, plan=plan, seed=0, epochs=1).epochs()
        return epoch

    figures: dict[str, Any] = {"samples": samples, "lengths": "log-normal, median 900, sigma 0.9, 32..8192"}
    twice = config.plan.model_copy(update={"tokens_per_batch": 2 * config.plan.tokens_per_batch, "max_sequences": NO_LIMIT})
    for plan in (config.plan, twice):
        budget, mixed = plan.tokens_per_batch, planned(plan, 1)
        for ranks in RANKS:
            grouped = planned(plan, ranks)
            figures |= {
                f"{budget}.{ranks}_ranks.1_batch": waiting(mixed, ranks, each=1),
                f"{budget}.{ranks}_ranks.4_batches": waiting(mixed, ranks, each=4),
                f"{budget}.{ranks}_ranks.equal_cost": waiting(grouped, ranks, each=1),
                f"{budget}.{ranks}_ranks.single_bucket": single_bucket(mixed, ranks),
                f"{budget}.{ranks}_ranks.single_bucket_equal_cost": single_bucket(grouped, ranks),
            }
    publish(NAME, figures, arguments)
    return 0


def waiting(epoch: EpochArrays, ranks: int, *, each: int) -> float:
    """Share of all ranks' time that is waiting, at `each` micro-batches a rank and step."""
    return round(waiting_frac(_cut(epoch.padded_tokens.tolist(), ranks * each), ranks=ranks), 4)


def single_bucket(epoch: EpochArrays, ranks: int) -> float:
    """Share of steps of one micro-batch a rank whose batches are all of one bucket."""
    steps = _cut(epoch.bucket.tolist(), ranks)
    return round(sum(len(set(step)) == 1 for step in steps) / len(steps), 4)


def _cut(values: list[int], size: int) -> list[list[int]]:
    """Whole groups of neighbours."""
    return [values[start : start + size] for start in range(0, len(values) // size * size, size)]


if __name__ == "__main__":
    raise SystemExit(main())
