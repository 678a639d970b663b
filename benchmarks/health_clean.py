"""How often the health check cries wolf: criticals in a million steps of healthy runs, over all bucket mixes and noise laws.

Development and held-out mixes, shuffled and interleaved, with saves. `--part i/n --scores FILE` and `--merge` cut the run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from benchmarks.health.grid import SPLITS, bench_config
from benchmarks.health.runs import healthy_run, items_of
from benchmarks.report import benchmark_parser, publish
from dflash.health import HealthChecker
from dflash.records import Damage

NAME = "health_clean"
TOTAL_STEPS, QUICK_STEPS, RUN_STEPS = 1_000_000, 96_000, 8_000


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--part", default="0/1", help="only every n-th run: i/n")
    parser.add_argument("--scores", default="", help="write the counts to this file instead of publishing figures")
    parser.add_argument("--merge", nargs="+", default=[], help="files written by --scores: publish their sum")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    if arguments.merge:
        for name in arguments.merge:
            counts.update(json.loads(Path(name).read_text(encoding="utf-8")))
    else:
        part, parts = map(int, arguments.part.split("/"))
        runs = (QUICK_STEPS if arguments.quick else TOTAL_STEPS) // RUN_STEPS
        for number in range(part, runs, parts):
            counts.update(_judge(number))
    if arguments.scores:
        Path(arguments.scores).write_text(json.dumps(counts), encoding="utf-8")
        return 0
    steps = counts["steps"]
    figures: dict[str, float] = {
        "steps": steps,
        "false_criticals": counts["critical"],
        "runs_asking_for_a_rollback": counts["damage"],
    }
    figures["warnings_per_100k_steps"] = round(1e5 * counts["warn"] / steps, 2)
    for name in sorted(counts):
        if name.startswith(("warn ", "critical ")):
            figures[name] = counts[name]
    publish(NAME, figures, arguments)
    return 0


def _judge(number: int) -> Counter[str]:
    config = bench_config()
    mixes = [mix for split in SPLITS.values() for mix in split]
    mix, interleaved = mixes[number % len(mixes)], (number // len(mixes)) % 2 == 0
    run = healthy_run(mix, seed=9_000_000 + number, steps=RUN_STEPS, interleaved=interleaved, train=config.train)
    checker = HealthChecker(config.health, config.train, config.checkpoint)
    checker.feed(items_of(run, seed=number))
    report = checker.report(run="clean", now_s=0.0, ended=True, remedy=_no_remedy)
    counts = Counter({"steps": report.records, "damage": int(report.damage is not None)})
    for row in report.detectors:
        counts["critical"] += row.critical
        counts[f"critical {row.detector}"] += row.critical
    for finding in report.findings:
        # In a shuffled order, stretches of one bucket are really there.
        if finding.severity == "warn" and (interleaved or finding.detector != "bucket run"):
            counts["warn"] += 1
            counts[f"warn {finding.detector}"] += 1
    return +counts


def _no_remedy(_damage: Damage) -> None:
    return None


if __name__ == "__main__":
    raise SystemExit(main())
