"""Evaluation of a drafter that an engine serves: vLLM or SGLang, through their HTTP interfaces.

The figures are those of an evaluation in this process, as far as the engine tells enough; `served_account` says what follows from
what. Plain decoding by the same engine, at a second address, is what losslessness is judged by; without it nothing is said.

Hard decision: a prompt is asked of both servers by the same worker, one after the other and in turn first, so that both see the
same load. Speeds are compared only one prompt at a time, and only if the engine itself tells the time behind the first token:
what a client measures holds the queue, the prefill and the network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dflash.config import EvaluateConfig, ServerConfig
from dflash.errors import EvaluationError
from dflash.evaluate.contest import Progress
from dflash.evaluate.metrics import VerificationTable
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.served_account import Account
from dflash.evaluate.served_client import EngineName, ServedEngine, ServedWants, root_of
from dflash.evaluate.served_counters import Counters
from dflash.evaluate.served_replies import ServedReply
from dflash.evaluate.served_result import Asked, Comparison, Judge, accounts_of, compare, served_result
from dflash.records import EvaluationResult

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ServedQuestion:
    """What is to be evaluated where.

    Attributes:
        server: address, key, concurrency and patience.
        plain_url: of the same engine without speculation; None leaves the comparison out.
        wants: what both must serve.
        expected_positions: drafts of a proposal, as the drafter was trained (or `evaluate.block_size` says).
        judge: near-ties; None counts every difference as one that is not excused.
    """

    engine: EngineName
    server: ServerConfig
    plain_url: str | None
    wants: ServedWants
    expected_positions: int
    judge: Judge | None


@dataclass(frozen=True, slots=True)
class ServedEvaluation:
    """An evaluation through a server: the record, and what it was computed from.

    Attributes:
        accounts: one a prompt, or a single one of all prompts.
        table: one row a verification; None if the engine does not name them.
        server: engine, address, concurrency and what the server says about itself.
    """

    result: EvaluationResult
    asked: Asked
    accounts: tuple[Account, ...]
    table: VerificationTable | None
    comparison: Comparison
    server: dict[str, Any]


def evaluate_served(
    prompts: Sequence[EvalPrompt], question: ServedQuestion, *, evaluate: EvaluateConfig, progress: Progress
) -> ServedEvaluation:
    """Let a server decode the prompts and measure its speculation.

    Args:
        prompts: held-out prompts.
        question: servers, and what they must serve.
        evaluate: bootstrap.
        progress: called with (label, done, total).

    Raises:
        TargetError: a server runs another model, or refuses a request.
        ServerError: a server is away.
        EvaluationError: no prompts, no speculation, or figures that do not belong to this evaluation.
    """
    if not prompts:
        raise EvaluationError("there are no evaluation prompts", remedy="set evaluate.num_prompts or evaluate.files")
    if question.plain_url is not None and root_of(question.plain_url) == root_of(str(question.server.url)):
        raise EvaluationError(
            "the address of plain decoding is that of the speculating server", remedy="start a second server without a drafter"
        )
    asked = asyncio.run(_ask(prompts, question, progress))
    accounts, positions = accounts_of(asked, expected=question.expected_positions)
    comparison = compare(asked, judge=question.judge, sampled=evaluate.temperature > 0)
    result, table = served_result(
        asked,
        accounts,
        comparison,
        evaluate=evaluate,
        label=question.engine,
        positions=(positions, question.expected_positions),
        concurrency=question.server.concurrency,
    )
    server = {"engine": question.engine, "address": asked.address, "concurrency": question.server.concurrency}
    return ServedEvaluation(result, asked, accounts, table, comparison, server | asked.known.info)


def served_answers(prompts: Sequence[EvalPrompt], question: ServedQuestion, *, progress: Progress) -> list[list[int]]:
    """Greedy answers of the server (the plain one, if there is one), to go on asking behind them.

    Raises:
        TargetError, ServerError, EvaluationError: as `evaluate_served`; or the server returns no token ids.
    """
    replies = asyncio.run(_answers(prompts, question, progress))
    if any(reply.ids is None for reply in replies):
        raise EvaluationError(
            "the server returns no token ids: what is asked behind its answers cannot be asked exactly",
            remedy="serve with a version that knows return_token_ids, or take sets with later turns out of evaluate.sets",
        )
    return [list(reply.ids) for reply in replies if reply.ids is not None]


async def _answers(prompts: Sequence[EvalPrompt], question: ServedQuestion, progress: Progress) -> list[ServedReply]:
    wants = replace(question.wants, sampling=replace(question.wants.sampling, temperature=0.0))
    server = question.server if question.plain_url is None else question.server.model_copy(update={"url": question.plain_url})
    places = asyncio.Semaphore(server.concurrency)

    async def ask(engine: ServedEngine, prompt: EvalPrompt) -> ServedReply:
        async with places:
            return await engine.ask(prompt)

    async with ServedEngine(question.engine, server, wants=wants) as engine:
        await engine.check()
        return await _together([ask(engine, prompt) for prompt in prompts], f"earlier turns ({engine.address})", progress)


async def _together(asking: Sequence[Coroutine[Any, Any, ResultT]], label: str, progress: Progress) -> list[ResultT]:
    """Results of all, in their order; the first failure ends the others."""
    tasks = [asyncio.create_task(each) for each in asking]
    try:
        for done, task in enumerate(asyncio.as_completed(tasks), start=1):
            await task
            progress(label, done, len(tasks))
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def _ask(prompts: Sequence[EvalPrompt], question: ServedQuestion, progress: Progress) -> Asked:
    async with AsyncExitStack() as stack:
        drafting = await stack.enter_async_context(ServedEngine(question.engine, question.server, wants=question.wants))
        await drafting.check()
        if not drafting.known.speculates:
            raise EvaluationError(
                f"the server {drafting.address} tells of no speculative decoding",
                remedy="start it with the drafter: python -m dflash evaluate RUN --print-serve-command ENGINE says how",
            )
        plain = None
        if question.plain_url is not None:
            other = question.server.model_copy(update={"url": question.plain_url})
            plain = await stack.enter_async_context(ServedEngine(question.engine, other, wants=question.wants))
            await plain.check()
            if plain.known.speculates:
                raise EvaluationError(
                    f"the server {plain.address} speculates too: its answers are no plain decoding",
                    remedy="start it without a drafter",
                )
        return await _Asker(prompts, drafting, plain, progress).ask_all()


class _Asker:
    """All prompts on their way, a bounded number at once."""

    def __init__(
        self, prompts: Sequence[EvalPrompt], drafting: ServedEngine, plain: ServedEngine | None, progress: Progress
    ) -> None:
        self._prompts, self._drafting, self._plain, self._progress = prompts, drafting, plain, progress
        self._counted = not drafting.known.accounts
        # Counters belong to one answer only while no other is on its way.
        self._each = self._counted and drafting.concurrency == 1
        self._places = asyncio.Semaphore(drafting.concurrency)
        self._replies: dict[int, ServedReply] = {}
        self._answers: dict[int, ServedReply] = {}
        self._counters: dict[int, Counters] = {}
        self._last: Counters | None = None

    async def ask_all(self) -> Asked:
        """Ask every prompt; the first failure ends all."""
        before = self._last = await self._drafting.counters_at_rest() if self._counted else None
        order = range(len(self._prompts))
        began_s = time.monotonic()
        await _together([self._ask(index) for index in order], f"decoding ({self._drafting.address})", self._progress)
        seconds = time.monotonic() - began_s
        replies = tuple(self._replies[index] for index in order)
        if before is not None and not self._each:
            tokens = sum(reply.completion_tokens for reply in replies)
            now = await self._drafting.counters_after(before, answers=len(replies), tokens=tokens)
            self._counters = {0: now.since(before)}
        plain = None if self._plain is None else tuple(self._answers[index] for index in order)
        counters = tuple(self._counters[index] for index in sorted(self._counters))
        known, address = self._drafting.known, self._drafting.address
        return Asked(tuple(self._prompts), replies, plain, counters, known, address, seconds)

    async def _ask(self, index: int) -> None:
        prompt = self._prompts[index]
        async with self._places:
            if self._plain is not None and index % 2:
                self._answers[index] = await self._plain.ask(prompt)
            reply = self._replies[index] = await self._drafting.ask(prompt)
            if self._each and self._last is not None:
                now = await self._drafting.counters_after(self._last, answers=1, tokens=reply.completion_tokens)
                self._counters[index], self._last = now.since(self._last), now
            if self._plain is not None and not index % 2:
                self._answers[index] = await self._plain.ask(prompt)
