"""A flow as a plain program: which Prefect server it talks to, what it prints, how it ends.

Hard decision: a server named by PREFECT_API_URL is used and must answer; the one of `prefect.toml` is used if it
answers; otherwise Prefect's temporary server serves this one run, so nothing has to be set up by hand.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from urllib.error import URLError

from prefect.exceptions import ParameterTypeError
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from dflash.errors import EXIT_OK, EXIT_USER_ERROR, DflashError

PROBE_TIMEOUT_S = 2.0
QUIET_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def run_program(body: Callable[[], object], *, check: Callable[[], object]) -> int:
    """Run `body` (which calls a flow) with readable output.

    Args:
        body: calls the flow and prints its result.
        check: finds what can be wrong with the user's input before a server is started for it.

    Returns:
        The process's exit code: 0, or that of the error, whose text is printed instead of a traceback.
    """
    _plain_console()
    try:
        check()
        with _server():
            body()
    except DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ParameterTypeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_OK


@contextlib.contextmanager
def _server() -> Iterator[None]:
    configured = get_current_settings().api.url
    if "PREFECT_API_URL" in os.environ or configured is None or _answers(configured):
        print(f"Prefect: {configured or 'temporary server'}", flush=True)
        yield
        return
    print("Prefect: starting a temporary server (about 15 s)", flush=True)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


def _answers(api_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=PROBE_TIMEOUT_S) as response:  # noqa: S310 - http(s) from settings
            return bool(response.status == 200)
    except (URLError, OSError, ValueError):
        return False


def _plain_console() -> None:
    """Time and message only: 80 columns are enough, and Prefect's own comings and goings stay in its UI."""
    logging.getLogger("prefect").setLevel(logging.WARNING)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
