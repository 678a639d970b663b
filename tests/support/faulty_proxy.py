"""An HTTP proxy on a real socket that can be told to break: what a store, a network or a load balancer does on a bad day."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

Kind = Literal["status", "stall", "cut", "reset", "lose_answer"]

UNAVAILABLE = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")


@dataclass(slots=True)
class Fault:
    """One kind of failure, for requests of a method whose path holds a text, a number of times.

    Attributes:
        kind: `status` answers with `status`; `stall` sends nothing until the proxy closes; `cut` closes after `after_bytes` of
            the body that was announced; `reset` resets the connection before the request goes on; `lose_answer` after it.
    """

    kind: Kind
    times: int
    method: str
    path_holds: str = ""
    status: int = 503
    after_bytes: int = 0


@dataclass
class FaultyProxy:
    """Forwards everything to `upstream` but for the injected faults."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(self, fault: Fault) -> None:
        """Break the next requests that fit."""
        with self._lock:
            self.faults.append(fault)

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets; it is used up by one."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path_holds in path:
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultyProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy


class _Handler(BaseHTTPRequestHandler):
    """One connection through the proxy."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.proxy.take(self.command, self.path)
        if fault is None:
            self._answer(*self._forward(body), after_bytes=None)
        elif fault.kind == "status":
            self._answer(fault.status, [("Content-Type", "application/xml")], UNAVAILABLE, after_bytes=None)
        elif fault.kind == "stall":
            self.server.proxy.closing.wait(30)
            self.close_connection = True
        elif fault.kind == "cut":
            self._answer(*self._forward(body), after_bytes=fault.after_bytes)
        else:
            if fault.kind == "lose_answer":
                self._forward(body)
            self._reset()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.server.proxy.upstream).netloc, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        connection.request(self.command, self.path, body=body or None, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        headers_back = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
        connection.close()
        return answer.status, headers_back, content

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, after_bytes: int | None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content if after_bytes is None else content[:after_bytes])
        if after_bytes is not None:
            self.wfile.flush()
            self.close_connection = True

    def _reset(self) -> None:
        # Zero linger: closing sends a reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Keep quiet."""
