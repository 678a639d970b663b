"""A live S3 server (moto) for a test module, and the environment that points boto3 to it.

The emulator looks for an existing object and stores the new one in two steps; S3 promises that a conditional write is one.
So writes take turns here; two writers without that would both be told that they were first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

BUCKET = "runs"


class _OneWriteAtATime:
    """The emulator as a WSGI application whose PUT and POST requests take turns."""

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self._turn = threading.Lock()

    def __call__(self, request: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if request["REQUEST_METHOD"] not in ("PUT", "POST"):
            return self._application(request, start_response)  # type: ignore[no-any-return]
        with self._turn:
            return list(self._application(request, start_response))


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A running server with one bucket; gives its address."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, _OneWriteAtATime(), True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        client.create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process (and its children) use the server at `endpoint`."""
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def environment(endpoint: str) -> dict[str, str]:
    """Environment variables for the server at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "hidden-secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
