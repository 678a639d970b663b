"""Task: held-out prompts decoded with the untrained and the trained drafter, beside plain decoding."""

from __future__ import annotations

from prefect import task

from dflash.records import EvaluationResult
from dflash.stages import evaluate_stage, open_bench, reopen_run
from tasks.policies import EVALUATE_TIMEOUT_S, NEVER_CACHED, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import table


@task(
    name="evaluate",
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=EVALUATE_TIMEOUT_S,
    **NEVER_CACHED,
)
def evaluate_drafter(run_dir: str) -> list[EvaluationResult]:
    """Measure the drafter before and after training; one task for both, because they share the loaded target."""
    run = reopen_run(run_dir)
    with ProgressReport("evaluation-progress") as progress:
        bench = open_bench(run)
        results = [evaluate_stage(run, bench, which=which, progress=progress) for which in ("untrained", "trained")]
    table("evaluation", [_row(result) for result in results], description=f"acceptance of {run.name} on held-out prompts")
    return results


def _row(result: EvaluationResult) -> dict[str, object]:
    interval, survival = result.acceptance_ci, result.survival_per_position
    return {
        "drafter": result.drafter,
        "step": result.step,
        "prompts": result.prompts,
        "acceptance length": round(result.acceptance_length, 3),
        f"{result.confidence:.0%} interval": None if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        "per position": None if survival is None else " ".join(f"{share:.2f}" for share in survival),
        "speed-up": round(result.speedup, 2) if result.speedup is not None else None,
        "lossless": result.lossless,
        "warnings": "; ".join(result.warnings) or None,
    }
