"""A flow run at work on a run: noted when it begins, and how it ended, in the run's folder and at the server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from prefect import runtime

from dflash.errors import HaltedError, StorageError
from dflash.records import RunPaths
from dflash.train.attempts import FINISHED, begin_attempt, end_attempt
from dflash.train.progress import read_progress
from tasks.events import halted_event
from tasks.own_state import end_cancelled
from tasks.patience import await_server
from tasks.reporting import send_kept

logger = logging.getLogger(__name__)


def note_beginning(paths: RunPaths) -> None:
    """Note in the run's folder which flow run works on it, so that a health check can tell its death."""
    flow_run = runtime.flow_run.id
    if flow_run is not None:
        deployment = runtime.deployment.id
        begin_attempt(
            paths,
            flow_run=str(flow_run),
            deployment=None if deployment is None else str(deployment),
            parameters=runtime.flow_run.parameters or {},
        )


def _note_end(paths: RunPaths, flow_run: str, *, how: str) -> None:
    """Note how a flow run ended; a full disk must not hide why it did."""
    try:
        end_attempt(paths, flow_run, how=how, records=read_progress(paths).step, continued_by=None)
    except (OSError, StorageError) as error:
        logger.error("how this flow run ended (%s) could not be noted in its run's folder: %s", how, error)


@contextlib.contextmanager
def working_on(run_dir: str) -> Iterator[None]:
    """The rest of a flow: whatever ends it is noted, a halt is told as an event, and a server that is away is waited for."""
    paths, how, halt = RunPaths(Path(run_dir)), FINISHED, None
    try:
        yield
    except BaseException as error:
        how = type(error).__name__
        halt = error.what if isinstance(error, HaltedError) else None
        raise
    finally:
        if runtime.flow_run.id is not None:
            _note_end(paths, str(runtime.flow_run.id), how=how)
        if await_server():
            send_kept()
            if halt is not None:  # not before: what cannot be delivered is not kept for long
                halted_event(paths.root.name, halt)
            # The server takes no failure of a flow run that is on its way to `Cancelled`, and no worker may be left to end that.
            end_cancelled(runtime.flow_run.id, how)
