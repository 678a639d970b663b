"""How often the health check is right: every fault of the generator, found, named, dated and acted on, beside four simple rules.

Scores are taken on the held-out split, whose noise laws and bucket mixes were never used to choose a threshold (the
development split with `--split development`). `--quick` runs one seed at the two larger strengths. A full run may be
cut into parts (`--part 0/4 --scores FILE`, then `--merge FILE FILE ...`), which give the same figures.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.health.baselines import RuleScore, add, fired
from benchmarks.health.grid import SEEDS, STEPS, STRENGTHS, Cell, bench_config, build, cells
from benchmarks.health.labels import Label
from benchmarks.health.runs import SAVE_INTERVAL, items_of
from benchmarks.health.score import Score, score_run
from benchmarks.health.watch import Watched, watch
from benchmarks.health.windowed import score_windowed, watch_windowed
from benchmarks.report import benchmark_parser, publish
from dflash.config import Config

NAME = "health_score"
SAVES = [0, *range(SAVE_INTERVAL, STEPS, SAVE_INTERVAL)]
Scores = dict[str, Score]
Rules = dict[str, RuleScore]


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = _parser().parse_args()
    if arguments.merge:
        scores, rules = _merged([Path(name) for name in arguments.merge])
    else:
        scores, rules = _run(arguments)
    if arguments.scores:
        raw = {
            "scores": {kind: vars(score) for kind, score in scores.items()},
            "rules": {name: vars(rule) for name, rule in rules.items()},
        }
        Path(arguments.scores).write_text(json.dumps(raw), encoding="utf-8")
        return 0
    print(_table(scores, rules))
    arguments.quick = arguments.quick or arguments.split != "held-out" or bool(arguments.only) or arguments.part != "0/1"
    publish(NAME, _figures(scores, rules), arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--split", choices=("held-out", "development"), default="held-out", help="which runs (default: held-out)")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--part", default="0/1", help="only every n-th run: i/n")
    parser.add_argument("--scores", default="", help="write the counts to this file instead of publishing figures")
    parser.add_argument("--merge", nargs="+", default=[], help="files written by --scores: publish their sum")
    parser.add_argument("--verbose", action="store_true", help="print every run that was not judged right")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[Scores, Rules]:
    config = bench_config()
    scores: Scores = defaultdict(Score)
    rules: Rules = defaultdict(RuleScore)
    strengths, seeds = (2, 1) if arguments.quick else (STRENGTHS, SEEDS)
    part, parts = map(int, arguments.part.split("/"))
    for number, cell in enumerate(cells(arguments.split, strengths=strengths, seeds=seeds)):
        wanted = not arguments.only or (cell.fault is not None and arguments.only in cell.fault.__name__)
        if number % parts == part and wanted:
            score = _judge(cell, config, scores, rules, verbose=arguments.verbose)
            scores["all"].add(score)
    return scores, rules


def _judge(cell: Cell, config: Config, scores: Scores, rules: Rules, *, verbose: bool) -> Score:
    run, label, seed = build(cell, config)
    if cell.windowed:
        watched = watch_windowed(run, config)
        score = score_windowed(label, watched)
    else:
        watched = watch(items_of(run, seed=seed), config, saves=SAVES, positions_per_step=cell.mix.micro_batches)
        score = score_run(label, watched, saves=SAVES, soak_steps=config.checkpoint.soak_steps, interleaved=cell.interleaved)
    scores[("windowed: " if cell.windowed else "") + ("clean" if label is None else label.kind)].add(score)
    for name, rows in fired(run).items():
        add(rules[name], rows, label)
    if verbose and not score.is_right():
        _tell(cell, label, score, watched)
    return score


def _tell(cell: Cell, label: Label | None, score: Score, watched: Watched) -> None:
    print(cell.mix.name, cell.seed, cell.strength, cell.interleaved, label and (label.kind, label.onset, label.end))
    decision = watched.decision
    print("    ", {name: value for name, value in vars(score).items() if value})
    print("    ", decision and (decision.onset_step, decision.alarm_step, decision.target_step, decision.skip))
    for said in watched.said:
        f = said.finding
        print("       ", f.severity, f.detector, f.first_step, f.last_step, said.seen_step, f.values.get("cause"), f.message)


def _merged(files: list[Path]) -> tuple[Scores, Rules]:
    scores: Scores = defaultdict(Score)
    rules: Rules = defaultdict(RuleScore)
    for file in files:
        raw = json.loads(file.read_text(encoding="utf-8"))
        for kind, counts in raw["scores"].items():
            scores[kind].add(Score(**counts))
        for name, counts in raw["rules"].items():
            for key, value in counts.items():
                setattr(rules[name], key, getattr(rules[name], key) + value)
    return scores, rules


def _table(scores: Scores, rules: Rules) -> str:
    names = list(Score().figures())
    lines = [f"{'kind':<34}" + "".join(f"{name.replace('_steps', '')[:16]:>18}" for name in names)]
    for kind in sorted(scores, key=lambda kind: kind == "all"):
        cells_ = ("-" if value is None else value for value in scores[kind].figures().values())
        lines.append(f"{kind:<34}" + "".join(f"{value:>18}" for value in cells_))
    lines += [f"{name:<34}{rule.figures()}" for name, rule in rules.items()]
    return "\n".join(lines)


def _figures(scores: Scores, rules: Rules) -> dict[str, Any]:
    figures: dict[str, Any] = dict(scores["all"].figures())
    figures["false_criticals_per_100k_clean_steps"] = scores["all"].per_100k_clean(scores["clean"])
    for kind, score in scores.items():
        if kind != "all":
            told = {name: value for name, value in score.figures().items() if value is not None}
            figures[kind] = ", ".join(f"{name} {value}" for name, value in told.items())
    for name, rule in rules.items():
        figures[f"rule: {name}"] = ", ".join(f"{key} {value}" for key, value in rule.figures().items())
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
