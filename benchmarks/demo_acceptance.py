"""Tokens that one target forward commits with the demo's drafter, and the time that saves.

Decodes a run's held-out prompts with the trained drafter, the untrained one, prompt lookup and plainly, alternating from
prompt to prompt in one process, so that the speed-ups are ratios of neighbours in time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.checkpoint import current_states, load_checkpoint, newest_durable, read_ledger
from dflash.errors import DflashError, RunStateError
from dflash.evaluate.candidates import Candidate, drafter_candidate, lookup_candidate
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.model.drafter import Drafter
from dflash.stages.evaluate import EvaluationBench, open_bench
from dflash.stages.run import Run, list_runs, reopen_run

NAME = "demo_acceptance"
QUICK_PROMPTS = 12


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = _arguments()
    try:
        run = reopen_run(arguments.run or _newest_run())
        bench = open_bench(run)
        evaluations = _evaluate(run, bench, quick=arguments.quick, quiet=arguments.json)
    except DflashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    publish(NAME, _figures(*evaluations), arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--run", type=Path, help="run folder; the newest trained one under runs/ if absent")
    return parser.parse_args()


def _newest_run() -> Path:
    trained = [folder for folder in list_runs(ROOT / "runs") if _newest_step(folder) is not None]
    if not trained:
        raise RunStateError("there is no trained run under runs/", remedy="make demo, or give --run DIR")
    return max(trained, key=lambda folder: (folder / "config.yaml").stat().st_mtime)


def _newest_step(folder: Path) -> int | None:
    checkpoints = folder / "checkpoints"
    return newest_durable(checkpoints, current_states(read_ledger(checkpoints / "ledger.jsonl"))) if checkpoints.is_dir() else None


def _evaluate(run: Run, bench: EvaluationBench, *, quick: bool, quiet: bool) -> tuple[Evaluation, ...]:
    step = _newest_step(run.paths.root)
    if step is None:
        raise RunStateError(f"run {run.paths.root} has no durable checkpoint", remedy="train first, or give another --run")
    trained = _drafter(run, bench, step=step, label="trained")
    candidates = [
        trained,
        _drafter(run, bench, step=0, label="untrained"),
        lookup_candidate(bench.target, block_size=trained.proposer.max_drafts + 1),
    ]

    def progress(label: str, done: int, total: int) -> None:
        if not quiet:
            print(f"\r{label} {done}/{total}", end="\n" if done == total else "", flush=True)

    prompts = bench.prompts[:QUICK_PROMPTS] if quick else bench.prompts
    settings = run.config.evaluate
    return evaluate_candidates(bench.target, candidates, prompts, evaluate=settings, stop_ids=bench.stop_ids, progress=progress)


def _drafter(run: Run, bench: EvaluationBench, *, step: int, label: str) -> Candidate:
    loaded = load_checkpoint(run.paths.checkpoint(step))
    drafter = Drafter(run.config.drafter, target_hidden_size=bench.target.info.hidden_size)
    drafter.load_state_dict(loaded.drafter)
    return drafter_candidate(
        bench.target,
        drafter.to(bench.target.device).eval(),
        block_size=run.config.evaluate.block_size,
        mask_token_id=bench.manifest.mask_token_id,
        label=label,
        step=step,
    )


def _figures(trained: Evaluation, untrained: Evaluation, lookup: Evaluation) -> dict[str, Any]:
    result, timing = trained.result, trained.timing
    return {
        "acceptance_length": result.acceptance_length,
        "ci": list(result.acceptance_ci),
        "speedup": result.speedup,
        "speedup_ci": None if timing is None else list(timing.speedup_ci),
        "speedup_median": None if timing is None else timing.speedup_median,
        "lossless": all(evaluation.result.lossless for evaluation in (trained, untrained, lookup)),
        "differing_prompts": result.differing_prompts,
        "untrained": untrained.result.acceptance_length,
        "prompt_lookup": lookup.result.acceptance_length,
        "prompt_lookup_speedup": lookup.result.speedup,
        "acceptance_length_untruncated": result.acceptance_length_untruncated,
        "acceptance_length_macro": result.acceptance_length_macro,
        "survival_per_position": list(result.survival_per_position),
        "plain_tokens_per_s": None if timing is None else 1.0 / timing.plain_s_per_token,
        "speculative_tokens_per_s": None if timing is None else 1.0 / timing.speculative_s_per_token,
        "prompts": result.prompts,
        "verifications": result.verifications,
        "block_size": result.block_size,
        "step": result.step,
    }


if __name__ == "__main__":
    raise SystemExit(main())
