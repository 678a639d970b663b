"""How long does a rollback take? From the fault in the log to the request, and from the request to ranks that train again.

Three NaN batches are planted in the drill's training, on real servers. `supervisor` is the way it goes while the supervisor
lives: its own check sees the fault. `schedule` leaves it to the scheduled health check alone (the supervisor's own checks are far
apart, and the trainer goes on meanwhile): a worker has to start a flow run first. Goals: the request within one schedule
interval and 30 s; training again within 45 s at worst and 20 s in the median. About three minutes a repeat of each way;
`--quick` is one short repeat of the first way, in about a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.drill.facts import DrillFacts
from dflash.drill.faults import fault_named
from tasks.drill import Drills
from tasks.drill_stack import drill_stack

NAME = "rollback_latency"
EVALUATE_LITTLE = ("evaluate.num_prompts=2", "evaluate.untrained_prompts=1", "evaluate.max_new_tokens=16")
WAYS: dict[str, tuple[str, ...]] = {
    "supervisor": ("train.max_steps=900",),
    # No checkpoint ends its soak before the end, so nobody but the schedule looks at the log.
    "schedule": (
        "health.check_interval_s=3600", "checkpoint.interval_steps=1500", "drill.fault_step=200", "train.max_nonfinite_in_row=1000",
    ),
}  # fmt: skip
QUICK = ("train.max_steps=400", "drill.fault_step=200", "data.num_conversations=300")


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--config", default=str(ROOT / "configs" / "drill.yaml"))
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "drill")
    arguments = parser.parse_args()
    ways = arguments.ways[:1] if arguments.quick else arguments.ways
    arguments.root.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with drill_stack(arguments.root) as stack:
        for seed in range(1 if arguments.quick else arguments.repeats):
            for way in ways:
                overrides = (*EVALUATE_LITTLE, *(QUICK if arguments.quick else WAYS[way]))
                drills = Drills(stack, arguments.config, overrides, 900.0, lambda line: print(line, flush=True))
                run, _ = drills.run(fault_named("nan"), seed=seed)
                measured[way].append(latencies(run.facts))
    publish(NAME, _figures(measured), arguments)
    return 0


def latencies(facts: DrillFacts) -> tuple[float, float]:
    """Seconds from the last bad record to the request, and from there to the first record of the next segment.

    Raises:
        ValueError: there was no rollback.
    """
    ends = [entry for entry in facts.rollbacks if entry.phase == "end"]
    if not ends or not facts.requests or not facts.planted:
        raise ValueError(f"no rollback happened: the flow run is {facts.ended}")
    segment = ends[0].next_segment
    visible = [line.at_s for line in facts.planted if line.segment == 0]
    requested = facts.requests[0].at_s
    return requested - max(visible), facts.log.first_step_at_s[int(segment or 0)] - requested


def _figures(measured: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for way, pairs in measured.items():
        figures |= _summary(f"{way}_visible_to_request", [pair[0] for pair in pairs])
        figures |= _summary(f"{way}_request_to_training", [pair[1] for pair in pairs])
    return figures | {"repeats": max(map(len, measured.values()))}


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_median_s": round(statistics.median(seconds), 2), f"{name}_worst_s": round(max(seconds), 2)}


if __name__ == "__main__":
    raise SystemExit(main())
