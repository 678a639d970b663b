"""The process's S3 client, and its errors in words.

Everything about the store is the environment's and boto3's own configuration: AWS_ENDPOINT_URL, AWS_REGION, profiles,
`s3 = addressing_style = path|virtual` in the AWS configuration file (a custom endpoint is addressed by path unless it says
otherwise), AWS_RETRY_MODE, AWS_MAX_ATTEMPTS. Only what boto3 has no setting for is named here, with bounded values.

Invariant: one client per process (boto3 clients are safe to share between threads, not between processes), made on first
use, never inherited through a fork; no message holds a secret.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

from dflash.config.credentials import hide_users
from dflash.errors import StorageError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 6
"""Tries of one request; with the standard mode's back-off of at most 20 s an outage of half a minute is ridden out."""

CONNECT_TIMEOUT_ENV = "DFLASH_S3_CONNECT_TIMEOUT_S"
READ_TIMEOUT_ENV = "DFLASH_S3_READ_TIMEOUT_S"

_POOL_CONNECTIONS = 32
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_lock = threading.Lock()
_client: tuple[int, Any] | None = None


def s3_client() -> Any:
    """The client for the environment as it is now.

    Raises:
        StorageError: a setting is not valid.
    """
    global _client  # noqa: PLW0603 - one client a process is the point
    key = _environment_key()
    current = _client
    if current is not None and current[0] == key:
        return current[1]
    with _lock:
        if _client is None or _client[0] != key:
            _client = (key, _new_client())
        return _client[1]


def s3_errors() -> tuple[type[Exception], ...]:
    """What a client's calls and bodies raise."""
    # Imported here: boto3 costs half a second that purely local runs should not pay.
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return (BotoCoreError, ClientError, HTTPError, OSError)


def status_of(error: Exception) -> int | None:
    """HTTP status of the answer that made the error, if there was one."""
    response = getattr(error, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    return int(status) if status is not None else None


def may_pass(error: Exception) -> bool:
    """Whether the same request could succeed later: no answer at all, throttling, or the server's own fault."""
    status = status_of(error)
    return (status is None and type(error).__name__ not in _PERMANENT) or status in (408, 409, 429) or (status or 0) >= 500


_PERMANENT = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "NoRegionError", "ProfileNotFound"}
)


def storage_error(doing: str, uri: str, error: Exception) -> StorageError:
    """The error in words, without secrets: `doing` is `read`, `write`, ..."""
    status = status_of(error)
    reason = str(error).strip() or type(error).__name__
    for name in _SECRETS:
        secret = os.environ.get(name)
        if secret:
            reason = reason.replace(secret, "***")
    reason = hide_users(reason)
    error.args = (reason,)  # it is the cause of what is raised: a traceback shows it too
    if status == 404:
        remedy = "check the bucket and the name"
    elif status in (401, 403) or type(error).__name__ in _PERMANENT:
        remedy = "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE) and the bucket's policy"
    elif may_pass(error):
        remedy = "check AWS_ENDPOINT_URL and that the store is up; all retries are used up (AWS_MAX_ATTEMPTS)"
    else:
        remedy = "check the bucket, the name and the credentials"
    return StorageError(f"cannot {doing} {uri}: {reason}", remedy=remedy)


def _new_client() -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.session.Session()
        profile = session._session.get_scoped_config()  # noqa: SLF001 - boto3 offers no public way to ask what is configured
        retries: dict[str, Any] = {}
        if "AWS_RETRY_MODE" not in os.environ and "retry_mode" not in profile:
            retries["mode"] = "standard"
        if "AWS_MAX_ATTEMPTS" not in os.environ and "max_attempts" not in profile:
            retries["total_max_attempts"] = MAX_ATTEMPTS
        return session.client(
            "s3",
            config=Config(
                connect_timeout=_seconds(CONNECT_TIMEOUT_ENV, CONNECT_TIMEOUT_S),
                read_timeout=_seconds(READ_TIMEOUT_ENV, READ_TIMEOUT_S),
                max_pool_connections=_POOL_CONNECTIONS,
                retries=retries or None,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise storage_error("set up a client for", "s3://", error) from error


def _seconds(name: str, otherwise: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise StorageError(f"{name} is {text!r}", remedy="set it to a number of seconds above 0")
    return value


def pause_after(failures: int) -> None:
    """Wait before the next try: longer after each failure, and not in step with others who failed at the same moment."""
    time.sleep(random.uniform(0.5, 1.0) * min(_MAX_BACKOFF_S, _BACKOFF_S * 2**failures))


def _environment_key() -> int:
    return hash(tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(("AWS_", "DFLASH_S3_")))))


def _forget() -> None:
    global _client, _lock  # noqa: PLW0603
    _client = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
