"""Answers from an OpenAI-compatible server (vLLM, SGLang) that runs the target.

Requests run in one event loop in a thread of its own, a bounded number at once. A request's place is given up only when its
answer has been fetched and the caller has come back for more, that is when it is in the journal: so a kill repeats at most
`concurrency` prompts, whatever was ready but not written included.

Hard decision: a prompt that fails in all its tries is set aside only while the server answers others (or at least tells that it
is there, and not for several prompts in a row): otherwise the server is gone, and the build stops with every answer kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from dflash.config import ServerConfig
from dflash.data.answers_engine import Answer, Failure, Question, Reply, answer_from_ids
from dflash.data.served_check import ServedAs, ServedTarget, away, check_prompt_tokens, check_served, decode, refused
from dflash.data.served_http import NoReplyError, RefusedError, ServerClient
from dflash.data.served_protocol import Completion, Sampling, parse_completion, parse_models

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_WINDOW_PER_REQUEST = 8
"""Conversations under way for each request in flight: a slow answer does not hold up the others, whose order is kept."""

_FAILURES_IN_A_ROW = 8
"""Prompts that may fail one after the other, while the server says that it is there, before it counts as broken."""


class ServedAnswerer:
    """Answers through a server; use as a context manager.

    Nothing is connected, checked or asked before the first question: a complete journal needs no server.

    Args:
        server: address, key, concurrency and patience.
        target: what the server must be serving.
        sampling: of the answers; the model's name is filled in when the server is checked.
    """

    def __init__(self, server: ServerConfig, *, target: ServedTarget, sampling: Sampling) -> None:
        self._server = server
        self._target = target
        self._sampling = sampling
        self._connection: _Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def window(self) -> int:
        """Conversations worth having under way at once."""
        return self._server.concurrency * _WINDOW_PER_REQUEST

    @contextlib.contextmanager
    def session(self) -> Iterator[_Session]:
        """Begin to ask; requests still in flight at the end are dropped."""
        session = _Session(self)
        try:
            yield session
        finally:
            session.drop()

    def connect(self) -> _Connection:
        """The checked connection, made at the first call.

        Raises:
            TargetError: the server does not run the target.
            ServerError: the server does not answer.
        """
        if self._connection is None:
            connection = _Connection(self._server)
            try:
                served = connection.run(check_served(connection.client, self._target, self._sampling))
            except BaseException:
                connection.close()
                raise
            logger.info("%s writes the answers (%d at once)", connection.client.address, self._server.concurrency)
            connection.asker = _Asker(connection.client, self._target, replace(self._sampling, model=served.name), served)
            self._connection = connection
        return self._connection

    @property
    def concurrency(self) -> int:
        """Requests in flight at once."""
        return self._server.concurrency


class _Connection:
    """An event loop in a thread, and the client that lives in it."""

    asker: _Asker

    def __init__(self, server: ServerConfig) -> None:
        self.client = ServerClient(server, section="data.answers.server", kept="every answer so far is kept")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="served-answers", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.run(self._wind_up())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _wind_up(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.client.aclose()


class _Asker:
    """One question at a time, and who is to blame when it fails. All methods run in the event loop."""

    def __init__(self, client: ServerClient, target: ServedTarget, sampling: Sampling, served: ServedAs) -> None:
        self._client = client
        self._tokenizer = target.tokenizer
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_ids)
        self._form = served.form
        self._answered = 0
        self._failed_in_a_row = 0

    async def answer(self, question: Question) -> Answer | Failure:
        """Raises TargetError where asking again is pointless, ServerError where the server is gone."""
        answered_before = self._answered
        prompt: list[int] | str = question.prompt_ids
        if self._form == "text":
            prompt = decode(self._tokenizer, question.prompt_ids)
            if self._tokenized(prompt) != question.prompt_ids:
                return Failure("the server takes text only, and the prompt's text is tokenized otherwise than its template")
        try:
            completion = await self._client.ask(
                "completions", body=self._sampling.request(prompt, key=question.key), parse=parse_completion, key=question.key
            )
        except RefusedError as error:
            raise refused(self._client, error) from error
        except NoReplyError as error:
            await self._judge(error, answered_before)
            logger.warning("no answer to %s: %s", question.key, error)
            return Failure(str(error))
        self._answered += 1
        self._failed_in_a_row = 0
        check_prompt_tokens(completion, question.prompt_ids, address=self._client.address)
        return self._read(completion)

    async def _judge(self, fault: NoReplyError, answered_before: int) -> None:
        self._failed_in_a_row += 1
        if self._answered > answered_before:
            return
        if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
            raise away(self._client, f"{self._failed_in_a_row} prompts in a row failed, the last one: {fault}") from fault
        try:
            await self._client.ask_once("models", body=None, parse=parse_models)
        except (NoReplyError, RefusedError) as error:
            raise away(self._client, str(fault)) from error

    def _read(self, completion: Completion) -> Answer:
        ids = completion.token_ids
        if ids is not None:
            return answer_from_ids(ids, finish_reason=completion.finish_reason, stop_ids=self._stop_ids, stop_id=completion.stop_id)
        stopped = completion.finish_reason == "stop"
        again = self._tokenized(completion.text)
        stop_id = completion.stop_id if stopped else None
        if stopped and again and again[-1] in self._stop_ids:  # some servers leave it in the text
            stop_id = again.pop()
        return Answer(
            again,
            completion.finish_reason,
            stop_id,
            generated_ids=completion.completion_tokens - len(again) in ((0, 1) if stopped else (0,)),
            tokens=completion.completion_tokens,
        )

    def _tokenized(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class _Session:
    """Questions under way at the server."""

    def __init__(self, owner: ServedAnswerer) -> None:
        self._owner = owner
        self._places: asyncio.Semaphore | None = None
        self._ready: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        self._tasks: set[Future[None]] = set()
        self._fetched = 0

    def submit(self, question: Question) -> None:
        connection = self._owner.connect()
        if self._places is None:
            self._places = asyncio.Semaphore(self._owner.concurrency)
        task = connection.start(self._ask(connection.asker, self._places, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def collect(self) -> list[Reply]:
        connection = self._owner.connect()
        for _ in range(self._fetched):  # their answers are in the journal by now
            connection.loop.call_soon_threadsafe(self._give_up_place)
        self._fetched = 0
        items = [self._ready.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._ready.get_nowait())
        replies = [item for item in items if isinstance(item, Reply)]
        self._fetched = len(replies)
        if not replies:  # an error waits until the answers that came with it are used
            raise next(item for item in items if isinstance(item, BaseException))
        for item in items:
            if isinstance(item, BaseException):
                self._ready.put(item)
        return replies

    def drop(self) -> None:
        """Cancel whatever is still in flight."""
        for task in tuple(self._tasks):
            task.cancel()

    def _give_up_place(self) -> None:
        if self._places is not None:
            self._places.release()

    async def _ask(self, asker: _Asker, places: asyncio.Semaphore, question: Question) -> None:
        await places.acquire()
        try:
            outcome = await asker.answer(question)
        except Exception as error:  # noqa: BLE001 - raised again where the answers are collected
            self._ready.put(error)
        else:
            self._ready.put(Reply(question, outcome))
