"""Task: held-out prompts decoded by a server that runs the drafter."""

from __future__ import annotations

from typing import Literal

from prefect import task

from dflash.errors import ConfigError
from dflash.evaluate.describe import evaluation_text
from dflash.records import EvaluationResult
from dflash.stages import evaluate_served_stage, reopen_run
from tasks.policies import EVALUATE_TIMEOUT_S, NEVER_CACHED, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import markdown


@task(
    name="evaluate-server",
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=is_transient,
    timeout_seconds=EVALUATE_TIMEOUT_S,
    **NEVER_CACHED,
)
def evaluate_server(
    run_dir: str, *, engine: Literal["in_process", "vllm", "sglang"], url: str | None, plain_url: str | None
) -> EvaluationResult:
    """Measure the drafter that a server runs; the figures become an artifact."""
    if engine == "in_process":
        raise ConfigError("a server's address is given, but engine is in_process", remedy="give engine too: vllm or sglang")
    if url is None:
        raise ConfigError(f"engine is {engine}, but there is no server", remedy="give url, e.g. http://127.0.0.1:8000")
    run = reopen_run(run_dir)
    with ProgressReport("served-progress") as progress:
        result = evaluate_served_stage(run, engine=engine, url=url, plain_url=plain_url, progress=progress)
    text = evaluation_text(result)
    markdown("served-evaluation", f"```\n{text}\n```\n", description=f"acceptance of {run.name} served by {engine}")
    return result
