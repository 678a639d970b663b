"""A store that refuses to tell who the champion is has not said that there is none: nobody may be crowned over it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash.tracking import Registry
from dflash.tracking.store import StoreMissingError, StoreRefusalError


@contextmanager
def refusing_store(code: str, status: int) -> Iterator[str]:
    """An HTTP store that answers everything with one of MLflow's error codes."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error_code": code, "message": f"{code}: not for you"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_only_what_does_not_exist_is_none() -> None:
    with refusing_store("RESOURCE_DOES_NOT_EXIST", 404) as uri:
        registry = Registry(uri, model="drafter")
        assert registry.champion() is None
        assert not registry.holds_run("0" * 32)


def test_a_refusal_is_no_absence() -> None:
    with refusing_store("PERMISSION_DENIED", 403) as uri:
        registry = Registry(uri, model="drafter")
        for ask in (registry.champion, lambda: registry.holds_run("0" * 32)):
            with pytest.raises(StoreRefusalError, match="not for you") as refused:
                ask()
            assert not isinstance(refused.value, StoreMissingError)
