"""What all tasks share: when to try again, what to cache, and whose log is shown.

Invariant: training is never retried by Prefect. Resuming is the checkpoints' business: the next run of the same
configuration continues from the newest durable one.
Nothing is cached: Prefect's cache key knows the task's own source, not the library behind it, so the
stages decide themselves (by fingerprint and manifest) what can be reused.
No task has tags: Prefect asks the server for a slot of each before a task begins, and gives up after a minute. A server that is
away when a training ends would turn its evaluation into the flow run's failure.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from dflash.errors import ServerError, StorageError

LIBRARY_LOGGERS = ("dflash", "tasks")

PREPARE_TIMEOUT_S = 24 * 3600
SHORT_TIMEOUT_S = 15 * 60
EVALUATE_TIMEOUT_S = 12 * 3600

NEVER_CACHED: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
"""Policy of every task."""


def is_transient(_task: Task[..., Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failure may go away by itself: files, stores and the network may, a user's mistake may not."""
    return isinstance(state.result(raise_on_failure=False), StorageError | ServerError | OSError)


def show_library_log(_flow: Any, _flow_run: Any, _state: Any) -> None:
    """Flow hook: see `let_library_log`."""
    let_library_log()


def let_library_log() -> None:
    """Let the library's informative messages through to Prefect (its own default stops at warnings)."""
    for name in LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
