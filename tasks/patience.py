"""Waiting for a Prefect server that is away, so that a flow that has done its work can say so.

Invariant: training, evaluation and files never wait for the server; only the last words do, and they are never given up while
somebody could still read them. Prefect's own client gives up after about a minute, and the flow run would end as a failure.
"""

from __future__ import annotations

import logging
import os
import time

from prefect.settings import get_current_settings

from dflash.config.credentials import hide_users
from tasks.server import health_status

logger = logging.getLogger(__name__)

PATIENCE_S = 24 * 3600.0
OWN_SERVER_PATIENCE_S = 10.0
"""A server that this program started for itself does not come back."""

POLL_S = 1.0
PROBE_TIMEOUT_S = 5.0
OWN_SERVER_VARIABLE = "DFLASH_TEMPORARY_SERVER"
"""Environment variable with the address of such a server."""

NOT_YET = (502, 503, 504)
"""Answers of a proxy in front of a server that is away."""


def await_server() -> bool:
    """Return once the Prefect server answers; False if it has not for a day.

    SIGTERM and Ctrl-C end the wait like any other work.
    """
    api_url = get_current_settings().api.url
    if api_url is None or is_there(api_url):
        return True
    logger.warning("the Prefect server %s is away: waiting for it, to report how this flow run ended", hide_users(api_url))
    patience_s = OWN_SERVER_PATIENCE_S if api_url == os.environ.get(OWN_SERVER_VARIABLE) else PATIENCE_S
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        if is_there(api_url):
            logger.warning("the Prefect server is back")
            return True
    logger.error("the Prefect server has been away for %.0f s: its record of this flow run will be wrong", patience_s)
    return False


def is_there(api_url: str) -> bool:
    """Whether something answers at `api_url`, even if only with a refusal."""
    status = health_status(api_url, timeout_s=PROBE_TIMEOUT_S)
    return status is not None and status not in NOT_YET
