"""Task: the target answers the prompts of a corpus; the answers become a conversation file."""

from __future__ import annotations

from prefect import task

from dflash.config import load_config
from dflash.stages import RegenerateStage, regenerate_stage
from tasks.policies import NEVER_CACHED, PREPARE_TIMEOUT_S, is_transient
from tasks.progress import ProgressReport
from tasks.reporting import table


@task(
    name="regenerate-answers",
    retries=2,
    retry_delay_seconds=60,  # a server that restarts loads its weights again
    retry_condition_fn=is_transient,
    timeout_seconds=PREPARE_TIMEOUT_S,
    **NEVER_CACHED,
)
def regenerate_answers(config: str, *, overrides: list[str], output: str | None) -> RegenerateStage:
    """Let the target write every answer; those already written are kept, so a retry goes on."""
    with ProgressReport("answers-progress") as progress:
        answers = regenerate_stage(load_config(config, overrides=overrides), output=output, progress=progress)
    row = {
        "conversations": answers.conversations,
        "answers": answers.answers,
        "rendered exactly": answers.exact,
        "unfinished": answers.unfinished,
        "left out": sum(answers.quarantined.values()),
    }
    table("answers", [row], description=f"answers of the target in {answers.output}")
    return answers
