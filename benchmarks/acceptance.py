"""Tokens that one target forward commits with a trained drafter, and the time that saves, beside what needs no training.

Decodes a run's held-out prompts with the trained drafter, the untrained one, prompt lookup and plainly, alternating from
prompt to prompt in one process, so that the speed-ups are ratios of neighbours in time and all comparisons are paired. `--run` is
a run of configs/demo.yaml; `--smollm2` adds a run of configs/smollm2.yaml, its figures under `smollm2_`, and `--code` the same
run on other held-out prompts (a JSONL file), under `code_`. What limits a figure is told by the run's own size: how much of the
target's own text it saw in how many steps, how large the drafter is, how long the training took.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.checkpoint import load_drafter
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import load_data
from dflash.errors import CheckpointError, DflashError, RunStateError, SchemaVersionError
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.hardware import describe_machine
from dflash.evaluate.rivals import rival_lines, rival_table
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.model.drafter import Drafter
from dflash.records import RivalTable, RunPaths
from dflash.stages.evaluate import open_bench
from dflash.stages.export import newest_checkpoint
from dflash.stages.rivals import with_baselines
from dflash.stages.run import Run, list_runs, reopen_run
from dflash.train.follow import LogFollower

NAME = "acceptance"
QUICK_PROMPTS = 8
BASELINES = ("untrained", "prompt_lookup")


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = _arguments()
    try:
        figures = _measured(arguments.run or _newest_run(), arguments, overrides=())
        if arguments.smollm2 is not None:
            figures |= _prefixed("smollm2", _measured(arguments.smollm2, arguments, overrides=()))
            if arguments.code is not None:
                other = (f"evaluate.files=[{arguments.code}]",)
                figures |= _prefixed("code", _measured(arguments.smollm2, arguments, overrides=other))
    except DflashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    publish(NAME, figures, arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--run", type=Path, help="run of the demo; the newest trained one under runs/ if absent")
    parser.add_argument("--smollm2", type=Path, help="run of configs/smollm2.yaml (or any other run) to report beside it")
    parser.add_argument("--code", type=Path, help="other held-out prompts for that run, e.g. HumanEval as JSONL")
    parser.add_argument(
        "--baseline", dest="more", action="append", default=[], help="folder of another drafter of the demo's target"
    )
    return parser.parse_args()


def _newest_run() -> Path:
    trained = [folder for folder in list_runs(ROOT / "runs") if _is_trained(folder)]
    if not trained:
        raise RunStateError("there is no trained run under runs/", remedy="make demo, or give --run DIR")
    return max(trained, key=lambda folder: (folder / "config.yaml").stat().st_mtime)


def _is_trained(folder: Path) -> bool:
    """Whether there is a checkpoint that this code can read."""
    try:
        return newest_checkpoint(RunPaths(folder)).is_dir()
    except (CheckpointError, SchemaVersionError):
        return False


def _measured(folder: Path, arguments: argparse.Namespace, *, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run's figures, with its table printed."""
    run = reopen_run(folder, overrides=overrides)
    bench = open_bench(run)
    manifest, weights = load_drafter(newest_checkpoint(run.paths))
    drafter = Drafter(run.config.drafter, target_hidden_size=bench.target.info.hidden_size)
    drafter.load_state_dict(weights)
    trained = drafter_candidate(
        bench.target,
        drafter.to(bench.target.device).eval(),
        block_size=run.config.evaluate.block_size,
        mask_token_id=manifest.mask_token_id,
        label="trained",
        step=manifest.step,
    )
    more = tuple(arguments.more) if folder != arguments.smollm2 else ()
    target, candidates = with_baselines(run, bench.target, trained, names=(*BASELINES, *more))
    prompts = bench.prompts[:QUICK_PROMPTS] if arguments.quick else bench.prompts
    settings = run.config.evaluate

    def progress(label: str, done: int, total: int) -> None:
        if not arguments.json:
            print(f"\r{label} {done}/{total}", end="\n" if done == total else "", flush=True)

    judged, *others = evaluate_candidates(
        target, candidates, prompts, evaluate=settings, stop_ids=bench.stop_ids, progress=progress
    )
    table = rival_table(judged, others, evaluate=settings, machine=describe_machine())
    if not arguments.json:
        print("\n".join(["", *rival_lines(table), ""]))
    return _figures(judged, table) | _size(run, drafter)


def _size(run: Run, drafter: Drafter) -> dict[str, Any]:
    """What was trained, on how much, for how long."""
    pointer = read_data_pointer(run.paths)
    manifest = load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes").manifest
    log = LogFollower(run.paths.log)
    log.poll()
    return {
        "trained_samples": manifest.samples,
        "trained_supervised_tokens": manifest.supervised_tokens,
        "trained_epochs": run.config.train.epochs,
        "train_time_s": log.train_time_s(),
        "drafter_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def _figures(judged: Evaluation, table: RivalTable) -> dict[str, Any]:
    result, timing, ours = judged.result, judged.timing, table.rows[-1]
    figures: dict[str, Any] = {
        "acceptance_length": result.acceptance_length,
        "ci": list(ours.acceptance_ci or ()),
        "speedup": ours.speedup,
        "speedup_ci": list(ours.speedup_ci or ()),
        "speedup_median": None if timing is None else timing.speedup_median,
        "lossless": all(row.lossless is not False for row in table.rows),
        "differing_prompts": result.differing_prompts,
        "acceptance_length_untruncated": result.acceptance_length_untruncated,
        "acceptance_length_macro": result.acceptance_length_macro,
        "survival_per_position": list(result.survival_per_position or ()),
        "plain_tokens_per_s": table.rows[0].tokens_per_s,
        "speculative_tokens_per_s": ours.tokens_per_s,
    }
    for row in table.rows[1:-1]:
        figures |= {
            row.label: row.acceptance_length,
            f"{row.label}_speedup": row.speedup,
            f"gain_over_{row.label}": row.gain,
            f"gain_over_{row.label}_ci": list(row.gain_ci or ()),
            f"faster_than_{row.label}": row.faster,
            f"faster_than_{row.label}_ci": list(row.faster_ci or ()),
        }
    size = {"dataset": result.dataset, "prompts": result.prompts, "verifications": result.verifications}
    return figures | size | {"block_size": result.block_size, "step": result.step}


def _prefixed(prefix: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in figures.items()}


if __name__ == "__main__":
    raise SystemExit(main())
