"""A real HTTP server that completes prompts in the format of vLLM or SGLang, and fails when a test tells it to.

The words come from a function over token ids, which may run a real model. Faults are drawn for each request by its number.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

Write = Callable[[list[int], dict[str, Any]], list[int]]
"""(prompt ids, request body) -> new ids, the stop token included, not longer than `max_tokens`."""


@dataclass(frozen=True)
class Fault:
    """What happens instead of an answer.

    `status` replies with an error; `disconnect` closes at once; `truncate` closes in the middle of a complete answer;
    `garbage` is a complete reply that is no completion; `hang` never replies; `abort` is a completion that was given up.
    """

    kind: Literal["status", "disconnect", "truncate", "garbage", "hang", "abort"]
    status: int = 503
    body: Any = field(default_factory=lambda: {"error": {"message": "out of order"}})
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Behaviour:
    """How the server differs from the simplest one."""

    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "target", "root": None, "max_model_len": 4096}])
    fault: Callable[[int, dict[str, Any]], Fault | None] = lambda number, body: None
    models_fault: Fault | None = None
    takes_ids: bool = True
    returns_ids: bool = True
    keeps_stop_token: bool = True
    style: Literal["vllm", "sglang"] = "vllm"
    adds_bos: int | None = None
    spells: Callable[[str], str] = str
    key: str | None = None


class AnswerServer:
    """A server on a free local port; use as a context manager.

    Attributes:
        bodies: of all completion requests, in the order they came.
        completed: how often each prompt was answered whole.
        most_at_once: requests in flight at the busiest moment.
    """

    def __init__(self, write: Write, tokenizer: PreTrainedTokenizerBase, *, stop_ids: set[int], behaviour: Behaviour) -> None:
        self.write, self.tokenizer, self.stop_ids, self.behaviour = write, tokenizer, stop_ids, behaviour
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.completed: Counter[tuple[int, ...]] = Counter()
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()
        self.model_lock = threading.Lock()
        self.stopping = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self, path: str) -> Any:
        """What another address than `/v1/models` shows, as JSON or bytes; None if there is nothing."""

    def takes(self, path: str) -> bool:
        """Whether prompts may be sent to this path."""
        return path == "/v1/completions"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request, as the servers document it."""
        with self.model_lock:
            return self.complete_locked(body)

    def complete_locked(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same for whoever holds the lock."""
        behaviour, prompt = self.behaviour, body["prompt"]
        ids = list(prompt) if isinstance(prompt, list) else self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if isinstance(prompt, str) and behaviour.adds_bos is not None:
            ids = [behaviour.adds_bos, *ids]
        new = self.write(ids, body)[: body["max_tokens"]]
        stopped = bool(new) and new[-1] in self.stop_ids
        said = new[:-1] if stopped else new
        text = self.tokenizer.decode(said, skip_special_tokens=body["skip_special_tokens"], clean_up_tokenization_spaces=False)
        choice: dict[str, Any] = {
            "index": 0, "text": behaviour.spells(text), "logprobs": None, "finish_reason": "stop" if stopped else "length",
        }  # fmt: skip
        choice["stop_reason" if behaviour.style == "vllm" else "matched_stop"] = (
            new[-1] if stopped and behaviour.style == "sglang" else None
        )
        if behaviour.returns_ids and body.get("return_token_ids"):
            choice["token_ids"] = new if behaviour.keeps_stop_token else said
            choice["prompt_token_ids"] = ids
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: AnswerServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of the server; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two would wait for each other

    @property
    def owner(self) -> AnswerServer:
        assert isinstance(self.server, _Server)
        return self.server.owner

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing."""

    def reply(self, status: int, body: Any, headers: tuple[tuple[str, str], ...] = (), *, share: float = 1.0) -> None:
        """Send an answer, or only the first `share` of its body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: int(len(content) * share)])

    def refused(self) -> bool:
        """Whether the key is wrong (the reply says so)."""
        wanted = self.owner.behaviour.key
        if wanted is None or self.headers.get("Authorization") == f"Bearer {wanted}":
            return False
        self.reply(401, {"error": "Unauthorized"})
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        fault = self.owner.behaviour.models_fault
        if fault is not None:
            self.reply(fault.status, fault.body)
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": self.owner.behaviour.models})
        else:
            page = self.owner.page(self.path)
            self.reply(404, {"detail": "Not Found"}) if page is None else self.reply(200, page)

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        with owner.lock:
            number = len(owner.bodies)
            owner.bodies.append(body)
            owner.headers.append(dict(self.headers))
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
        try:
            if not self.unfit(body):
                fault = owner.behaviour.fault(number, body)
                self.answer(body) if fault is None else self.fail(fault, body)
        finally:
            with owner.lock:
                owner.at_once -= 1

    def unfit(self, body: dict[str, Any]) -> bool:
        """Whether the request is one that the server does not take (the reply says so)."""
        behaviour = self.owner.behaviour
        if not self.owner.takes(self.path):
            self.reply(404, {"detail": "Not Found"})
        elif "prompt" not in body:
            return False
        elif isinstance(body["prompt"], list) and not behaviour.takes_ids:
            self.reply(400, {"object": "error", "message": "prompt must be a string", "code": 400})
        elif body["model"] not in [model["id"] for model in behaviour.models]:
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        else:
            return False
        return True

    def answer(self, body: dict[str, Any]) -> None:
        completion = self.owner.complete(body)
        with self.owner.lock:
            self.owner.completed[tuple(body["prompt"] if "prompt" in body else body["input_ids"])] += 1
        self.reply(200, completion)

    def fail(self, fault: Fault, body: dict[str, Any]) -> None:
        if fault.kind == "status":
            self.reply(fault.status, fault.body, fault.headers)
        elif fault.kind == "garbage":
            self.reply(200, b'{"choices": [{"text"')
        elif fault.kind == "abort":
            completion = self.owner.complete(body)
            if "choices" in completion:
                completion["choices"][0]["finish_reason"] = "abort"
            else:
                completion["meta_info"]["finish_reason"] = {"type": "abort", "message": "given up"}
            self.reply(200, completion)
        else:
            if fault.kind == "truncate":
                self.reply(200, self.owner.complete(body), share=0.5)
            elif fault.kind == "hang":
                self.owner.stopping.wait()
            self.close_connection = True
