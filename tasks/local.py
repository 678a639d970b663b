"""A flow as a plain program: which Prefect server it talks to, what it prints, how it ends.

Hard decision: a server named by PREFECT_API_URL is used and must answer; the one that infra/local/up started for this
checkout is used while it answers; otherwise a temporary server serves this one run, so nothing has to be set up by hand.
Whatever else listens on Prefect's usual port belongs to somebody else and is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prefect.exceptions import ParameterTypeError
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflash.config.credentials import hide_users
from dflash.errors import EXIT_OK, EXIT_SIGINT, EXIT_USER_ERROR, DflashError, ServerError, as_storage_error
from dflash.evaluate.text import OneRecord, clean_library_records, terminal_text
from tasks.patience import OWN_SERVER_VARIABLE
from tasks.server import answers, temporary_server

QUIET_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def run_program(body: Callable[[], object], *, check: Callable[[], object]) -> int:
    """Run `body` (which calls a flow) with readable output.

    Args:
        body: calls the flow and prints its result.
        check: finds what can be wrong with the user's input before a server is started for it.

    Returns:
        The process's exit code: 0, or that of the error, whose text is printed instead of a traceback.
    """
    plain_console()
    try:
        check()
        with _server():
            body()
    except (DflashError, ParameterTypeError, OSError) as error:
        if (known := as_storage_error(error) if isinstance(error, OSError) else error) is None:
            raise
        print(f"error: {terminal_text(str(known))}", file=sys.stderr)
        return known.exit_code if isinstance(known, DflashError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_SIGINT
    return EXIT_OK


@contextlib.contextmanager
def _server() -> Iterator[None]:
    api_url = os.environ.get("PREFECT_API_URL") or _local_server()
    if api_url is not None:
        print(f"Prefect: {hide_users(api_url).removesuffix('/api')}", flush=True)
        with temporary_settings({PREFECT_API_URL: api_url}):
            yield
        return
    print("Prefect: starting a temporary server (about 15 s)", flush=True)
    kept = contextlib.ExitStack()
    # Stopped when the interpreter ends and not with this block: Prefect's threads send the last states and logs in between.
    atexit.register(kept.close)
    api_url = kept.enter_context(temporary_server())
    os.environ[OWN_SERVER_VARIABLE] = api_url
    with temporary_settings({PREFECT_API_URL: api_url}):
        print(f"Prefect: {api_url.removesuffix('/api')} while this runs", flush=True)
        yield


def require_server() -> None:
    """Raise ServerError unless a lasting server is named or answers: some programs make no sense on a temporary one."""
    if not os.environ.get("PREFECT_API_URL") and _local_server() is None:
        raise ServerError("no Prefect server is up", remedy="start one with infra/local/up, or name one in PREFECT_API_URL")


def _local_server() -> str | None:
    """The server that infra/local/up recorded, if it still answers."""
    record = Path(os.environ.get("DFLASH_LOCAL_DIR", ".local")) / "prefect-api-url"
    if not record.is_file():
        return None
    api_url = record.read_text(encoding="utf-8").strip()
    return api_url if answers(api_url) else None


def plain_console() -> None:
    """Time and message only: 80 columns are enough, and Prefect's own comings and goings stay in its UI."""
    clean_library_records()
    logging.getLogger("prefect").setLevel(logging.WARNING)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setFormatter(OneRecord("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
