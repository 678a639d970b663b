"""Who answers prompts: one protocol, and the engine that runs the target in this process.

A prompt is token ids and an answer is token ids: no engine ever renders a chat template, so both write what the target
says to exactly the ids that the samples will be cut from.

Invariant: an answer depends on its prompt and key alone, never on the prompts that happen to be answered with it.
Hard decision: engines are asked through a session that hands back whatever is ready, in any order: a server with
hundreds of requests in flight never waits for its slowest one, and a batched engine chooses prompts of similar length.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash.errors import TargetError

GenerateFn = Callable[[list[list[int]], list[str]], list[list[int]]]
"""(prompt ids, one key a prompt for keyed sampling) -> new ids a prompt: up to and including a stop token, or cut at the limit."""

FinishReason = Literal["stop", "length"]

_WINDOW_BATCHES = 8
"""Batches of conversations under way at once: enough to find prompts of similar length, few enough to hold in memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt.

    Attributes:
        digest: of everything that decides the answer.
        key: names it; samples are keyed by it.
        prompt_ids: never empty.
    """

    digest: str
    key: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote.

    Attributes:
        ids: without the stop token.
        finish_reason: `stop`, or `length` if it was cut at the limit.
        stop_id: the token that ended it; None if it was cut, or if the engine does not tell.
        generated_ids: `ids` are the generated ones, or a new tokenization of the answer's text into as many.
        tokens: generated, the stop token included.
    """

    ids: list[int]
    finish_reason: FinishReason
    stop_id: int | None
    generated_ids: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that this engine could not answer though it answers others; `reason` names every try's fault."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A question with its outcome."""

    question: Question
    outcome: Answer | Failure


class AnswerSession(Protocol):
    """Questions under way; leaving the session drops those still unanswered."""

    def submit(self, question: Question) -> None:
        """Take a question; returns at once, or raises what makes the engine unusable."""
        ...

    def collect(self) -> list[Reply]:
        """Wait for at least one reply to a submitted question; whoever calls again has the former replies safe on disk."""
        ...


class Answerer(Protocol):
    """Something that lets the target answer prompts."""

    @property
    def window(self) -> int:
        """Conversations worth having under way at once."""
        ...

    def session(self) -> AbstractContextManager[AnswerSession]:
        """Begin to ask."""
        ...


class InProcessAnswerer:
    """Answers in batches, by a function that runs the target.

    Args:
        generate: the target.
        batch_size: prompts generated together.
        stop_ids: ids that end an answer.
    """

    def __init__(self, generate: GenerateFn, *, batch_size: int, stop_ids: Iterable[int]) -> None:
        self._generate = generate
        self._batch_size = batch_size
        self._stop_ids = frozenset(stop_ids)

    @property
    def window(self) -> int:
        """Conversations worth having under way at once."""
        return self._batch_size * _WINDOW_BATCHES

    def session(self) -> AbstractContextManager[AnswerSession]:
        """Begin to ask; nothing outlives a call of `collect`."""
        return nullcontext(_BatchSession(self._generate, self._batch_size, self._stop_ids))


class _BatchSession:
    """Waiting questions sorted by prompt length; each batch is those nearest in length to the one that waits longest.

    So no question waits for ever, however unusual its length is.
    """

    def __init__(self, generate: GenerateFn, batch_size: int, stop_ids: frozenset[int]) -> None:
        self._generate = generate
        self._batch_size = batch_size
        self._stop_ids = stop_ids
        self._waiting: list[tuple[int, int, Question]] = []  # (prompt length, number, question), ascending
        self._submitted = 0

    def submit(self, question: Question) -> None:
        insort(self._waiting, (len(question.prompt_ids), self._submitted, question), key=lambda entry: entry[:2])
        self._submitted += 1

    def collect(self) -> list[Reply]:
        batch = self._next_batch()
        generated = self._generate([question.prompt_ids for question in batch], [question.key for question in batch])
        return [Reply(question, self._answer(ids)) for question, ids in zip(batch, generated, strict=True)]

    def _next_batch(self) -> list[Question]:
        oldest = min(range(len(self._waiting)), key=lambda place: self._waiting[place][1])
        start, stop = _nearest([length for length, _, _ in self._waiting], around=oldest, count=self._batch_size)
        batch = [question for _, _, question in self._waiting[start:stop]]
        del self._waiting[start:stop]
        return batch

    def _answer(self, generated: Sequence[int]) -> Answer:
        ids = list(generated)
        stop_id = ids.pop() if ids and ids[-1] in self._stop_ids else None
        return Answer(ids, "length" if stop_id is None else "stop", stop_id, generated_ids=True, tokens=len(generated))


def _nearest(lengths: Sequence[int], *, around: int, count: int) -> tuple[int, int]:
    """The slice of `count` ascending lengths around one place that spans the least."""
    start, stop = around, around + 1
    while stop - start < min(count, len(lengths)):
        below = lengths[around] - lengths[start - 1] if start else None
        above = lengths[stop] - lengths[around] if stop < len(lengths) else None
        if above is None or (below is not None and below <= above):
            start -= 1
        else:
            stop += 1
    return start, stop


def answer_from_ids(ids: Sequence[int], *, finish_reason: FinishReason, stop_ids: frozenset[int], stop_id: int | None) -> Answer:
    """An answer from the ids that a server returned, with or without the stop token behind them.

    Raises:
        TargetError: the server ended it by a token that is no stop token of the target.
    """
    kept = list(ids)
    if finish_reason == "length":
        return Answer(kept, "length", None, generated_ids=True, tokens=len(kept))
    if kept and kept[-1] in stop_ids:
        stop_id = kept.pop()
    elif stop_id is not None and stop_id not in stop_ids:
        raise TargetError(
            f"the server ends answers at token {stop_id}, the configured target's stop tokens are {sorted(stop_ids)}",
            remedy="serve the very model that target.path names, with its own generation_config.json",
        )
    return Answer(kept, "stop", stop_id, generated_ids=True, tokens=len(kept) + 1)
