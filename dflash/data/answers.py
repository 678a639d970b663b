"""On-policy answers: every assistant turn is written by the target itself, in order, over its own earlier answers.

Conversations advance in rounds: round t generates the t-th answer of all that have one, in batches of similar prompt
length. Each finished batch is journalled before its answers are used, so a killed run repeats one batch at most.

Invariant: each conversation leaves exactly once, in the order it came, either answered throughout or as a quarantined row.
Hard decision: a conversation with one unusable answer (unfinished, empty) is set aside whole: what follows in it would be
said in answer to something that was not said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from dflash.config import AnswerConfig
from dflash.data.journal import AnswerEntry, AnswerJournal, prompt_sha256
from dflash.data.quarantine import BadRowCode, BadRowError
from dflash.data.render import ChatRenderer
from dflash.records import Conversation, Message, QuarantinedRow

logger = logging.getLogger(__name__)

GenerateFn = Callable[[list[list[int]], list[str]], list[list[int]]]
"""(prompt ids, one key a prompt for keyed sampling) -> new ids a prompt: up to and including a stop token, or cut at the limit."""

Progress = Callable[[str, int, int], None]
"""(label, done, total)."""

_ROUND_BATCHES = 8
"""Batches that one round can draw on: enough to sort prompts by length, few enough to hold in memory and to stream."""


@dataclass(frozen=True, slots=True)
class AnsweredConversation:
    """A conversation whose assistant turns were all written by the target.

    Attributes:
        finished: the last answer ends with a stop token.
        exact: rendering gives the very tokens that were generated, in every answer.
    """

    conversation: Conversation
    finished: bool
    exact: bool


@dataclass(slots=True)
class _Open:
    """A conversation on its way: `messages` grows by one user turn and one answer a round."""

    source: Conversation
    user_turns: list[Message]
    messages: list[Message]
    bad: QuarantinedRow | None = None
    finished: bool = True
    exact: bool = True
    turn: int = field(default=0)


def answer_conversations(
    conversations: Sequence[Conversation],
    *,
    renderer: ChatRenderer,
    generate: GenerateFn,
    answers: AnswerConfig,
    stop_ids: Sequence[int],
    max_length_tokens: int,
    journal: Path,
    progress: Progress,
) -> Iterator[AnsweredConversation | QuarantinedRow]:
    """Let the target write every assistant turn, resuming from the journal.

    Args:
        conversations: assistant turns already there are dropped; the last turn is always an answer.
        renderer: gives the prompts.
        generate: the target.
        answers: limits and batch size.
        stop_ids: ids that end an answer.
        max_length_tokens: a prompt that leaves no room for two tokens under this limit is set aside unasked.
        journal: JSONL file, created if absent.
        progress: called with ("answers", turns done, turns in all).

    Raises:
        DataError: the journal is damaged, or the chat template contradicts itself.
    """
    total = sum(len(_user_turns(conversation)) for conversation in conversations)
    done = 0
    source = iter(conversations)
    with AnswerJournal(journal) as book:
        writer = _Writer(renderer, generate, answers, frozenset(stop_ids), max_length_tokens, book)
        while chunk := [_opened(conversation) for conversation in islice(source, answers.batch_size * _ROUND_BATCHES)]:
            while pending := [item for item in chunk if item.bad is None and item.turn < len(item.user_turns)]:
                for answered in writer.advance(pending):
                    done += answered
                    progress("answers", done, total)
            for item in chunk:
                done += len(item.user_turns) - item.turn  # turns that an unusable answer made pointless
                yield item.bad if item.bad is not None else _closed(item)
            progress("answers", done, total)


class _Writer:
    """One round after another: journalled answers are taken, missing ones generated in batches."""

    def __init__(
        self,
        renderer: ChatRenderer,
        generate: GenerateFn,
        answers: AnswerConfig,
        stop_ids: frozenset[int],
        max_length_tokens: int,
        book: AnswerJournal,
    ) -> None:
        self._renderer = renderer
        self._generate = generate
        self._answers = answers
        self._stop_ids = stop_ids
        self._max_prompt_tokens = max_length_tokens - 2
        self._book = book

    def advance(self, pending: Sequence[_Open]) -> Iterator[int]:
        """Answer the next turn of every pending conversation; yields how many turns each part has settled."""
        missing: list[tuple[_Open, list[int]]] = []
        settled = 0
        for item in pending:
            prompt = self._prompt(item)
            if prompt is None:
                continue
            entry = self._book.find((item.source.id, item.turn, self._hash(prompt)))
            if entry is None:
                missing.append((item, prompt))
            else:
                self._apply(item, entry)
                settled += 1
        yield settled
        missing.sort(key=lambda pair: len(pair[1]))
        size = self._answers.batch_size
        for start in range(0, len(missing), size):
            self._answer(missing[start : start + size])
            yield len(missing[start : start + size])

    def _prompt(self, item: _Open) -> list[int] | None:
        """The prompt of the next turn, or None if it cannot be used (the conversation is marked bad)."""
        item.messages.append(item.user_turns[item.turn])
        try:
            prompt = self._renderer.prompt_ids(item.messages)
        except BadRowError as error:
            item.bad = QuarantinedRow(item.source.origin, error.row.reason)
            return None
        if len(prompt) > self._max_prompt_tokens:
            limit = self._max_prompt_tokens
            _reject(item, "over_long", f"the prompt of answer {item.turn} has {len(prompt)} tokens, room is for {limit}")
            return None
        return prompt

    def _answer(self, batch: Sequence[tuple[_Open, list[int]]]) -> None:
        keys = [f"{item.source.id}/{item.turn}" for item, _ in batch]
        generated = self._generate([prompt for _, prompt in batch], keys)
        entries = [self._entry(item, prompt, list(new_ids)) for (item, prompt), new_ids in zip(batch, generated, strict=True)]
        self._book.append(entries)
        for (item, _), entry in zip(batch, entries, strict=True):
            self._apply(item, entry)

    def _entry(self, item: _Open, prompt: list[int], new_ids: list[int]) -> AnswerEntry:
        finished = bool(new_ids) and new_ids[-1] in self._stop_ids
        said = new_ids[:-1] if finished else new_ids
        text = self._renderer.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return AnswerEntry(
            conversation_id=item.source.id,
            turn=item.turn,
            prompt_sha256=self._hash(prompt),
            text=text,
            tokens=len(new_ids),
            finished=finished,
            exact=self._renders_exactly(item, text, prompt + new_ids),
        )

    def _renders_exactly(self, item: _Open, text: str, wanted: list[int]) -> bool:
        try:
            rendered = self._renderer.render([*item.messages, Message("assistant", text)]).input_ids
        except BadRowError:  # met again, with its origin, when the sample is built
            return False
        return rendered[: len(wanted)] == wanted

    def _apply(self, item: _Open, entry: AnswerEntry) -> None:
        item.messages.append(Message("assistant", entry.text))
        item.finished = entry.finished
        item.exact = item.exact and entry.exact
        last = item.turn == len(item.user_turns) - 1
        if not entry.finished and not (self._answers.keep_unfinished and last):
            _reject(item, "unfinished", f"answer {item.turn} has no stop token within {entry.tokens} tokens")
        elif entry.tokens <= entry.finished:
            _reject(item, "empty_answer", f"the target says nothing in answer {item.turn}")
        item.turn += 1

    def _hash(self, prompt: Sequence[int]) -> str:
        return prompt_sha256(prompt, max_new_tokens=self._answers.max_new_tokens, temperature=self._answers.temperature)


def _user_turns(conversation: Conversation) -> list[Message]:
    return [message for message in conversation.messages if message.role == "user"]


def _opened(conversation: Conversation) -> _Open:
    system = [message for message in conversation.messages[:1] if message.role == "system"]
    return _Open(source=conversation, user_turns=_user_turns(conversation), messages=system)


def _closed(item: _Open) -> AnsweredConversation:
    source = item.source
    answered = Conversation(id=source.id, messages=tuple(item.messages), origin=source.origin, kind=source.kind)
    return AnsweredConversation(answered, finished=item.finished, exact=item.exact)


def _reject(item: _Open, code: BadRowCode, detail: str) -> None:
    item.bad = QuarantinedRow(item.source.origin, f"{code}: {detail}")
