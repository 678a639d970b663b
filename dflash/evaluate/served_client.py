"""One served engine: checked once, asked prompt by prompt, with what it tells about its speculation.

Invariant: an answer that is used was asked for with the prompt's own token ids and every sampling parameter, by a model that
`served_check` found to be the target.

vLLM is asked by `/v1/completions`; where its replies hold no account of their own, its Prometheus counters are read around them.
SGLang is asked by its own `/generate`, the one route whose replies hold the account (`/v1/completions` leaves it out), and names
its speculation at `/server_info` (`/get_server_info` before).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from dflash.config import ServerConfig
from dflash.data.served_check import ServedTarget, away, check_served, refused
from dflash.data.served_http import NoReplyError, RefusedError, ServerClient
from dflash.data.served_protocol import MalformedReplyError, Sampling
from dflash.errors import EvaluationError, TargetError
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.served_counters import Counters, read_counters
from dflash.evaluate.served_replies import ServedReply, parse_sglang, parse_vllm, sglang_request

logger = logging.getLogger(__name__)

EngineName = Literal["vllm", "sglang"]
SECTION = "evaluate.server"

_POLL_S = 0.1
_NO_SUCH_PAGE = (404, 405)
_ALONE = (
    "use a server of your own, or start vLLM with --per-request-spec-decode-metrics detailed: then no counter is needed "
    f"({SECTION}.settle_s says how long to wait for counters)"
)
_INFO_KEYS = (
    "version", "model_path", "served_model_name", "dtype", "speculative_algorithm", "speculative_draft_model_path",
    "speculative_num_draft_tokens", "speculative_dflash_block_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedWants:
    """What is asked of a server.

    Attributes:
        target: what it must be serving.
        sampling: of the answers; the model's name is filled in when the server is checked.
        settle_s: longest wait for counters that lag behind the answers.
    """

    target: ServedTarget
    sampling: Sampling
    settle_s: float


@dataclass(slots=True)
class Known:
    """What a check found out about a server.

    Attributes:
        speculates: whether it proposes drafts at all.
        accounts: whether its replies hold an account of their verifications.
        positions: drafts of a proposal, where the server tells before it is asked.
        info: for the evidence.
    """

    speculates: bool
    accounts: bool
    positions: int | None
    info: dict[str, Any] = field(default_factory=dict)


class ServedEngine:
    """One server; use as an asynchronous context manager.

    Args:
        engine: which one it is.
        server: address (with or without `/v1`), key, concurrency and patience.
        wants: what is asked of it.

    Raises:
        TargetError: the address is no URL, or the key cannot be sent.
    """

    known: Known

    def __init__(self, engine: EngineName, server: ServerConfig, *, wants: ServedWants) -> None:
        root = root_of(str(server.url))
        self._engine = engine
        self._wants = wants
        self._sampling = wants.sampling
        self.concurrency = server.concurrency
        kept = "an evaluation keeps no answers"
        self._root = ServerClient(server.model_copy(update={"url": root}), section=SECTION, kept=kept)
        self._api = ServerClient(server.model_copy(update={"url": f"{root}/v1"}), section=SECTION, kept=kept)

    @property
    def address(self) -> str:
        """Base address without credentials."""
        return self._root.address

    async def __aenter__(self) -> ServedEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.aclose()
        await self._root.aclose()

    async def check(self) -> None:
        """Prove that the server runs the target, and find out what it tells about speculation.

        Raises:
            TargetError: it serves another model, or refuses a request.
            ServerError: it does not answer.
            EvaluationError: it takes no token ids as a prompt.
        """
        served = await check_served(self._api, self._wants.target, self._wants.sampling)
        self._sampling = replace(self._wants.sampling, model=served.name)
        if self._engine == "vllm":
            if served.form != "ids":
                raise EvaluationError(
                    f"the server {self.address} takes no token ids as a prompt: it is no vLLM",
                    remedy="give the address of a vLLM server, or say --engine sglang",
                )
            self.known = await self._look_at_vllm()
        else:
            self.known = await self._look_at_sglang()

    async def ask(self, prompt: EvalPrompt) -> ServedReply:
        """Let the server answer one prompt.

        Raises:
            TargetError: it refuses, or read other tokens.
            ServerError: every try failed.
            EvaluationError: it cut the answer before the configured limit.
        """
        reply = await self._answer(prompt.prompt_ids, key=prompt.id)
        if reply.prompt_tokens != len(prompt.prompt_ids):
            raise TargetError(
                f"the server {self.address} read {reply.prompt_tokens} prompt tokens where {len(prompt.prompt_ids)} were sent",
                remedy="serve the very model and tokenizer that target.path names",
            )
        if reply.cut and reply.completion_tokens < self._sampling.max_new_tokens:
            raise EvaluationError(
                f"the server {self.address} cut the answer to {prompt.id!r} at {reply.completion_tokens} tokens, "
                f"evaluate.max_new_tokens is {self._sampling.max_new_tokens}",
                remedy="serve with a longer context, or lower evaluate.max_new_tokens",
            )
        return reply

    async def counters(self) -> Counters:
        """Read the counters of vLLM.

        Raises:
            TargetError, ServerError: the page cannot be read.
        """
        try:
            return await self._root.read_text("metrics", parse=read_counters, key="metrics")
        except RefusedError as error:
            raise refused(self._root, error) from error
        except NoReplyError as error:
            raise away(self._root, str(error)) from error

    async def counters_at_rest(self) -> Counters:
        """Counters of vLLM once they have stopped moving: those of the check's own requests may lag behind the replies.

        Raises:
            EvaluationError: they do not stop.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wants.settle_s
        before = await self.counters()
        while True:
            await asyncio.sleep(_POLL_S)
            now = await self.counters()
            if now == before:
                return now
            if loop.time() >= deadline_s:
                raise EvaluationError(
                    f"the counters of {self.address} move though nothing was asked: somebody else uses the server", remedy=_ALONE
                )
            before = now

    async def counters_after(self, before: Counters, *, answers: int, tokens: int) -> Counters:
        """The counters once they have caught up with some answers.

        Args:
            before: read before the answers were asked for.
            answers: how many there were.
            tokens: generated in them.

        Raises:
            EvaluationError: the counters moved by something else as well, do not move, or fell.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wants.settle_s
        while True:
            now = await self.counters()
            since = now.since(before)
            if (since.requests, since.tokens) == (answers, tokens):
                return now
            others = since.requests > answers or since.tokens > tokens
            if others or loop.time() >= deadline_s:
                why = "somebody else uses the server, or requests were asked twice" if others else "they lag behind"
                raise EvaluationError(
                    f"the counters of {self.address} do not belong to this evaluation alone: {since.requests} requests and "
                    f"{since.tokens} tokens since its beginning, {answers} and {tokens} are its own ({why})",
                    remedy=_ALONE,
                )
            await asyncio.sleep(_POLL_S)

    async def _look_at_vllm(self) -> Known:
        info = await self._version()
        probe = await self._answer(self._wants.target.probes[0], key="probe")
        if probe.drafting is not None:
            return Known(speculates=True, accounts=True, positions=None, info=info)
        try:
            counters = await self._root.read_text("metrics", parse=read_counters, key="metrics")
        except RefusedError as error:
            if error.status not in _NO_SUCH_PAGE:
                raise refused(self._root, error) from error
            return Known(speculates=False, accounts=False, positions=None, info=info)
        except NoReplyError as error:
            raise away(self._root, str(error)) from error
        positions = len(counters.per_position) or None
        return Known(speculates=counters.drafts is not None, accounts=False, positions=positions, info=info)

    async def _version(self) -> dict[str, Any]:
        """What vLLM says at `/version`; nothing where a proxy keeps it back."""
        try:
            return {"version": (await self._root.ask_once("version", body=None, parse=_server_info)).get("version")}
        except (RefusedError, NoReplyError):
            return {}

    async def _look_at_sglang(self) -> Known:
        info = await self._server_info()
        algorithm, width = info.get("speculative_algorithm"), info.get("speculative_num_draft_tokens")
        positions = width - 1 if isinstance(width, int) and width > 1 else None
        return Known(bool(algorithm), bool(algorithm), positions, {key: info[key] for key in _INFO_KEYS if key in info})

    async def _server_info(self) -> dict[str, Any]:
        for path in ("server_info", "get_server_info"):
            try:
                return await self._root.ask(path, body=None, parse=_server_info, key=path)
            except RefusedError as error:
                if error.status not in _NO_SUCH_PAGE:
                    raise refused(self._root, error) from error
            except NoReplyError as error:
                raise away(self._root, str(error)) from error
        raise EvaluationError(
            f"the server {self.address} tells nothing about itself at /server_info: it is no SGLang",
            remedy="give the address of an SGLang server, or say --engine vllm",
        )

    async def _answer(self, prompt_ids: tuple[int, ...], *, key: str) -> ServedReply:
        client = self._api if self._engine == "vllm" else self._root
        try:
            if self._engine == "vllm":
                body = self._sampling.request(list(prompt_ids), key=key)
                return await client.ask("completions", body=body, parse=parse_vllm, key=key)
            body = sglang_request(self._sampling, prompt_ids, key=key)
            return await client.ask("generate", body=body, parse=parse_sglang, key=key)
        except RefusedError as error:
            raise refused(client, error) from error
        except NoReplyError as error:
            raise away(client, str(error)) from error


def root_of(url: str) -> str:
    """A server's base address, whether or not the version was written behind it.

    Raises:
        TargetError: it is no URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        shown = url.rpartition("@")[2]  # a key may stand in front of it
        raise TargetError(f"{shown!r} is no address of a server: {error}", remedy="write e.g. http://127.0.0.1:8000") from error
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"), query="", fragment=""))


def _server_info(body: Any) -> dict[str, Any]:
    """SGLang's account of itself: its arguments, which newer versions repeat for each scheduler."""
    if not isinstance(body, Mapping):
        raise MalformedReplyError(f"not an account of a server: {str(body)[:200]}")
    states = body.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    return {**body, **first}
