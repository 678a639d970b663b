"""Does the pipeline do the right thing for every planted fault? All faults x seeds, each one a training on real servers.

A drill takes minutes, so every verdict is appended to `<root>/verdicts.jsonl` at once: interrupted, the same command goes on with
what is missing, as long as configuration and code are the same. `--faults nan ramp --seeds 0 1` selects. The whole suite (8
faults x 3 seeds and 3 fault-free runs) takes about an hour on two cores; `--quick` is one short drill of about a minute.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import load_config
from dflash.drill.facts import DrillFacts
from dflash.drill.reference import reference_key
from dflash.drill.verdict import Check, is_right, onset_of
from dflash.errors import DflashError
from dflash.records import FaultName
from tasks.drill import Drills
from tasks.drill_stack import drill_stack

NAME = "drill"
FAULTS = [name for name in get_args(FaultName) if name != "none"]
SEEDS = (0, 1, 2)
QUICK = (
    "train.max_steps=400", "drill.fault_step=200", "checkpoint.interval_steps=25", "checkpoint.window_steps=50",
    "checkpoint.soak_steps=50", "evaluate.num_prompts=8", "evaluate.max_new_tokens=48", "data.num_conversations=300",
)  # fmt: skip


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--config", default=str(ROOT / "configs" / "drill.yaml"))
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "drill")
    arguments = parser.parse_args()
    wanted = [(fault, seed) for seed in arguments.seeds for fault in arguments.faults]
    overrides = QUICK if arguments.quick else ()
    if arguments.quick:
        wanted = wanted[:1]
    arguments.root.mkdir(parents=True, exist_ok=True)
    store = arguments.root / "verdicts.jsonl"
    key = reference_key(load_config(arguments.config, overrides=overrides))
    known = _known(store, key)
    missing = [pair for pair in wanted if pair not in known]
    if missing:
        _drill(missing, store=store, key=key, config=arguments.config, root=arguments.root, overrides=overrides)
    rows = [row for pair, row in _known(store, key).items() if pair in wanted]
    figures = _figures(rows)
    _table(rows)
    publish(NAME, figures, arguments)
    return 0 if len(rows) == len(wanted) and all(row["right"] for row in rows) else 1


def _drill(wanted: Sequence[tuple[str, int]], *, store: Path, key: str, config: str, root: Path, overrides: Sequence[str]) -> None:
    with drill_stack(root) as stack:
        drills = Drills(stack, config, overrides, 1200.0, lambda line: print(line, flush=True))
        for fault, seed in wanted:
            begun_s = time.monotonic()
            try:
                run, checks = drills.drill(fault, seed=seed)
            except DflashError as error:
                row: dict[str, Any] = {"right": False, "wrong": [f"the drill broke off: {error.what}"]}
            else:
                row = _row(run.facts, checks)
            row |= {"key": key, "fault": fault, "seed": seed, "wall_s": round(time.monotonic() - begun_s, 1)}
            with store.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _row(facts: DrillFacts, checks: Sequence[Check]) -> dict[str, Any]:
    onset = onset_of(facts)
    row: dict[str, Any] = {"right": is_right(checks), "wrong": [f"{c.name}: {c.found}" for c in checks if not c.holds]}
    row["steps_lost"] = next((c.found for c in checks if c.name == "steps lost"), None)
    ends = [entry for entry in facts.rollbacks if entry.phase == "end"]
    if ends and facts.requests and onset is not None:
        first = facts.requests[0].at_s
        back = facts.log.first_step_at_s.get(ends[0].next_segment or 0)
        row |= {
            "delay_steps": ends[0].plan.alarm_step - onset,
            "delay_s": round(first - facts.planted[0].at_s, 2),
            "target": ends[0].target_step,
            "onset_error_steps": ends[0].plan.onset_step - onset,
            "skipped": sum(end - begin for begin, end in ends[0].plan.skip),
            "request_to_training_s": None if back is None else round(back - first, 2),
        }
    return row | {"rollbacks": len(ends), "acceptance": facts.outcome.acceptance_length}


def _known(store: Path, key: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The newest verdict of every fault and seed that this configuration and code gave."""
    lines = store.read_text(encoding="utf-8").splitlines() if store.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["fault"], row["seed"]): row for row in rows if row["key"] == key}


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    latencies = [row["request_to_training_s"] for row in rows if row.get("request_to_training_s") is not None]
    quiet = [row for row in rows if row["fault"] in ("save-artefact", "hung-save", "killed-worker", "corrupt-checkpoint")]
    return {
        "drills": len(rows),
        "right_frac": round(sum(row["right"] for row in rows) / max(1, len(rows)), 4),
        "rollbacks_where_none_is_right": sum(row.get("rollbacks", 0) for row in quiet),
        "request_to_training_median_s": round(statistics.median(latencies), 2) if latencies else None,
        "request_to_training_worst_s": max(latencies, default=None),
        **{f"{row['fault']}/{row['seed']}": _words(row) for row in rows},
    }


def _words(row: dict[str, Any]) -> str:
    if not row["right"]:
        return f"WRONG: {'; '.join(row['wrong'])}"
    if "target" not in row:
        return "right, no rollback"
    lost = row["steps_lost"].partition(";")[0]
    return f"right, after {row['delay_steps']} steps, to step-{row['target']}, {row['skipped']} batches left out, {lost} steps lost"


def _table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'fault':<20}{'seed':>4}{'right':>7}{'steps':>7}{'target':>8}{'skipped':>9}{'accept.':>9}{'wall s':>8}")
    for row in rows:
        cells = (row.get("delay_steps", ""), row.get("target", ""), row.get("skipped", ""))
        accepted = row.get("acceptance")
        shown = "" if accepted is None else f"{accepted:.2f}"
        right = "yes" if row["right"] else "NO"
        print(f"{row['fault']:<20}{row['seed']:>4}{right:>7}{cells[0]:>7}{cells[1]:>8}{cells[2]:>9}{shown:>9}{row['wall_s']:>8.0f}")


if __name__ == "__main__":
    raise SystemExit(main())
