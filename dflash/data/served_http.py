"""Requests to a server, asked again where asking again may help.

Invariants: what may pass (429, 408, 5xx, time-outs, broken connections, cut replies) is retried with exponential back-off
and jitter, or after the time that the server names; what will not (any other status) is not. The key goes into one header
and nowhere else: no message of this module can hold it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from dflash.config import ServerConfig
from dflash.config.credentials import hide_users
from dflash.data.served_protocol import MalformedReplyError, error_message
from dflash.errors import TargetError

logger = logging.getLogger(__name__)

ParsedT = TypeVar("ParsedT")

_CONNECT_TIMEOUT_S = 30.0
_LONGEST_BACKOFF_S = 60.0
_TELL_EVERY_S = 30.0
_PASSING_STATUS = frozenset({408, 425, 429})


class RefusedError(Exception):
    """The server understood a request and refuses it: asking again gets the same answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class NoReplyError(Exception):
    """No usable reply in all tries; the message names the last fault."""


class ServerClient:
    """One server.

    Args:
        server: its address, key and patience.
        section: of the configuration, that says these: for messages.
        kept: what a person has of an interrupted work, e.g. "every answer so far is kept": for messages.

    Raises:
        TargetError: the address is no URL, or the key cannot be sent in a header.
    """

    def __init__(self, server: ServerConfig, *, section: str, kept: str) -> None:
        self.address = _without_credentials(str(server.url))
        self.section, self.kept = section, kept
        self._patience = server
        self._silent_until_s = 0.0
        self._key = os.environ.get(server.api_key_env, "").strip()
        if not self.address.lower().startswith(("http://", "https://")):
            raise _no_address(section, self.address)
        try:
            base_url = httpx.URL(str(server.url).rstrip("/") + "/")
        except httpx.InvalidURL:
            raise _no_address(section, self.address) from None  # the library names the part it stumbled over
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=_authorization(server.api_key_env, self._key),
            timeout=httpx.Timeout(server.request_timeout_s, connect=min(_CONNECT_TIMEOUT_S, server.request_timeout_s), pool=None),
            limits=httpx.Limits(max_connections=server.concurrency + 1, max_keepalive_connections=server.concurrency + 1),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def ask(self, path: str, *, body: dict[str, Any] | None, parse: Callable[[Any], ParsedT], key: str) -> ParsedT:
        """Ask until a reply can be used; see `_patiently` for the errors.

        Args:
            path: below the server's address.
            body: of a POST; None asks by GET.
            parse: reads the decoded JSON; a MalformedReplyError counts as a fault that may pass.
            key: names the request; the jitter depends on it.
        """
        return await self._patiently(lambda: self.ask_once(path, body=body, parse=parse), path=path, key=key)

    async def read_text(self, path: str, *, parse: Callable[[str], ParsedT], key: str) -> ParsedT:
        """Get a page that is no JSON, patiently as `ask` does.

        Args:
            path: below the server's address.
            parse: reads the page; a MalformedReplyError counts as a fault that may pass.
            key: names the request; the jitter depends on it.
        """

        async def read_once() -> ParsedT:
            try:
                return parse((await self._reply(path, body=None)).text)
            except MalformedReplyError as error:
                raise _PassingError(self._hidden(str(error)), retry_after_s=None) from None  # its text may hold the key

        return await self._patiently(read_once, path=path, key=key)

    async def _patiently(self, attempt: Callable[[], Awaitable[ParsedT]], *, path: str, key: str) -> ParsedT:
        """Try until it works.

        Raises:
            RefusedError: the server refuses it.
            NoReplyError: every try failed.
        """
        tries = self._patience.max_retries + 1
        for number in range(1, tries + 1):
            try:
                return await attempt()
            except _PassingError as fault:
                if number == tries:
                    raise NoReplyError(f"{fault} (try {number} of {tries})") from fault
                wait_s = fault.retry_after_s
                if wait_s is None:
                    wait_s = backoff_s(number, first_s=self._patience.backoff_s, key=key)
                self._tell(f"{self.address} {path}: {fault}; try {number + 1} of {tries} in {wait_s:.1f} s")
                await asyncio.sleep(min(wait_s, self._patience.request_timeout_s))
        raise AssertionError("unreachable: the last try returns or raises")

    def _tell(self, fault: str) -> None:
        """Log a fault that is being survived, but not every one of hundreds of requests that meet it together."""
        now_s = time.monotonic()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + _TELL_EVERY_S
            logger.warning("%s", fault)

    async def ask_once(self, path: str, *, body: dict[str, Any] | None, parse: Callable[[Any], ParsedT]) -> ParsedT:
        """One try; any fault that may pass is a NoReplyError. See `ask`."""
        response = await self._reply(path, body=body)
        try:
            return parse(response.json())
        except (ValueError, RecursionError) as error:
            raise _PassingError(f"the reply is not JSON: {error}", retry_after_s=None) from error
        except MalformedReplyError as error:
            raise _PassingError(self._hidden(str(error)), retry_after_s=None) from None  # its text may hold the key

    async def _reply(self, path: str, *, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = await (self._client.get(path) if body is None else self._client.post(path, json=body))
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _PassingError(f"{type(error).__name__}: {error}".rstrip(": "), retry_after_s=None) from error
        if response.status_code != httpx.codes.OK:
            raise _fault(response, self._hidden(response.text))
        return response

    def _hidden(self, text: str) -> str:
        """A server may repeat the key (`invalid key sk-...`), and its words go into logs and messages."""
        return text.replace(self._key, "***") if self._key else text


class _PassingError(NoReplyError):
    """A fault that may pass, with the wait that the server asks for, if it does."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def backoff_s(number: int, *, first_s: float, key: str) -> float:
    """Wait after the try with this number (from 1): doubled each time, between half of it and all of it, at most a minute.

    The share is keyed by (key, number): requests that failed together do not come back together, without any random state.
    """
    digest = hashlib.blake2b(f"{key}\0{number}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return float(min(first_s * 2.0 ** min(number - 1, 32), _LONGEST_BACKOFF_S) * (0.5 + 0.5 * share))


def retry_after_s(value: str | None, *, now: datetime) -> float | None:
    """Seconds that a `Retry-After` header asks for: a number, or a date; None if it says nothing usable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _fault(response: httpx.Response, text: str) -> Exception:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    message = error_message(body, text=text)
    if response.status_code in _PASSING_STATUS or response.status_code >= 500:
        wait_s = retry_after_s(response.headers.get("retry-after"), now=datetime.now(UTC))
        return _PassingError(f"HTTP {response.status_code}: {message}", retry_after_s=wait_s)
    return RefusedError(response.status_code, message)


def _authorization(variable: str, key: str) -> dict[str, str]:
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise TargetError(
            f"the key in the environment variable {variable} holds characters that no header can carry", remedy="set it again"
        )
    return {"Authorization": f"Bearer {key}"}


def _no_address(section: str, address: str) -> TargetError:
    return TargetError(
        f"the address of {section} is {address!r}, no http address", remedy="write e.g. http://127.0.0.1:8000/v1"
    )  # fmt: skip


def _without_credentials(url: str) -> str:
    return hide_users(url).replace("***@", "")
