"""On-policy answers: every assistant turn is written by the target itself, in order, over its own earlier answers.

A bounded number of conversations is under way at once, each as far as its own answers allow; whatever the engine has ready
is journalled and synced before it is used, so a killed run repeats only what was in flight. Prompts that are equal (and
answered without sampling) are asked once.

Invariant: each conversation leaves exactly once, in the order it came, either answered throughout or as a quarantined row.
Hard decision: a conversation with one unusable answer (unfinished, empty) is set aside whole: what follows in it would be
said in answer to something that was not said.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash.config import AnswerConfig
from dflash.data.answers_engine import Answer, Answerer, AnswerSession, Failure, GenerateFn, InProcessAnswerer, Question, Reply
from dflash.data.answers_turns import AnsweredConversation, OpenConversation, answer_forms, count_answers
from dflash.data.journal import AnswerEntry, AnswerJournal, answer_digest
from dflash.data.quarantine import BadRowError
from dflash.data.render import ChatRenderer
from dflash.records import Conversation, Message, QuarantinedRow

__all__ = [
    "AnsweredConversation",
    "AnswerSettings",
    "Answerer",
    "GenerateFn",
    "InProcessAnswerer",
    "Progress",
    "answer_conversations",
    "count_answers",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(label, done, total)."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How prompts are made and which answers are usable.

    Attributes:
        renderer: gives the prompts.
        answers: limits and sampling.
        max_length_tokens: a prompt that leaves no room for two tokens under this limit is set aside unasked.
        total_answers: for the progress; None if nobody counted, then those begun so far are the total.
    """

    renderer: ChatRenderer
    answers: AnswerConfig
    max_length_tokens: int
    total_answers: int | None


def answer_conversations(
    conversations: Iterable[Conversation], *, answerer: Answerer, settings: AnswerSettings, journal: Path, progress: Progress
) -> Generator[AnsweredConversation | QuarantinedRow]:
    """Let the target write every assistant turn, resuming from the journal.

    Whoever may stop before the end closes it (`contextlib.closing`): only then is the journal free for others.

    Args:
        conversations: a stream; assistant turns already there are dropped, the last turn is always an answer.
        answerer: the target.
        settings: how prompts are made.
        journal: JSONL file, created if absent.
        progress: called with ("answers", answers settled, answers in all).

    Raises:
        DataError: the journal is damaged or in use, or the chat template contradicts itself.
        TargetError: the engine does not run the configured target.
        ServerError: the server that runs the target is away.
    """
    source = iter(conversations)
    under_way: deque[OpenConversation] = deque()
    begun, more = 0, True
    with AnswerJournal(journal) as book, answerer.session() as session:
        desk = _Desk(settings, session, book)
        while more or under_way:
            while more and len(under_way) < answerer.window:
                conversation = next(source, None)
                if conversation is None:
                    more = False
                    break
                item = OpenConversation.of(conversation)
                begun += len(item.asked)
                under_way.append(item)
                desk.advance(item)
            while under_way and under_way[0].done:
                yield under_way.popleft().close()
            progress("answers", desk.settled, begun if settings.total_answers is None else settings.total_answers)
            if under_way:  # the first one is not done, so its answer is on its way
                desk.receive(session.collect())


class _Desk:
    """Makes prompts, finds or asks for their answers, and puts the answers into the conversations."""

    def __init__(self, settings: AnswerSettings, session: AnswerSession, book: AnswerJournal) -> None:
        self._renderer = settings.renderer
        self._answers = settings.answers
        self._max_prompt_tokens = settings.max_length_tokens - 2
        self._session = session
        self._book = book
        self._asked: dict[str, list[OpenConversation]] = {}  # by digest: who waits for the answer
        self.settled = 0

    def advance(self, item: OpenConversation) -> None:
        """Take a conversation as far as the journalled answers reach, then ask for the next one."""
        while not item.done:
            prompt = self._prompt(item)
            if prompt is None:
                break
            digest = answer_digest(
                prompt, max_new_tokens=self._answers.max_new_tokens, temperature=self._answers.temperature, key=item.key
            )
            entry = self._book.find(digest)
            if entry is None:
                self._ask(Question(digest, item.key, prompt), item)
                return
            self._apply(item, entry)
        self.settled += len(item.asked) - item.turn  # turns that an unusable answer made pointless

    def receive(self, replies: Sequence[Reply]) -> None:
        """Journal what has come, then let everyone who waited for it go on."""
        waiting = [(reply, self._asked.pop(reply.question.digest)) for reply in replies]
        entries = {
            reply.question.digest: self._entry(items[0], reply.question, reply.outcome)
            for reply, items in waiting
            if isinstance(reply.outcome, Answer)
        }
        self._book.append(entries.values())
        for reply, items in waiting:
            for item in items:
                if isinstance(reply.outcome, Failure):
                    item.reject("unanswered", f"answer {item.turn}: {reply.outcome.reason}")
                else:
                    self._apply(item, entries[reply.question.digest])
                self.advance(item)

    def _ask(self, question: Question, item: OpenConversation) -> None:
        waiting = self._asked.setdefault(question.digest, [])
        waiting.append(item)
        if len(waiting) == 1:
            self._session.submit(question)

    def _prompt(self, item: OpenConversation) -> list[int] | None:
        """The prompt of the next turn, or None if it cannot be used (the conversation is marked bad)."""
        item.ask()
        try:
            prompt = self._renderer.prompt_ids(item.messages, item.source.tools)
        except BadRowError as error:
            item.bad = QuarantinedRow(item.source.origin, error.row.reason)
            return None
        if len(prompt) > self._max_prompt_tokens:
            limit = self._max_prompt_tokens
            item.reject("over_long", f"the prompt of answer {item.turn} has {len(prompt)} tokens, room is for {limit}")
            return None
        return prompt

    def _entry(self, item: OpenConversation, question: Question, answer: Answer) -> AnswerEntry:
        message, exact = self._message(item, question, answer)
        return AnswerEntry(
            digest=question.digest,
            conversation_id=item.source.id,
            turn=item.turn,
            content=message.content,
            reasoning=message.reasoning,
            prompt_tokens=len(question.prompt_ids),
            tokens=answer.tokens,
            finish_reason=answer.finish_reason,
            exact=exact,
        )

    def _message(self, item: OpenConversation, question: Question, answer: Answer) -> tuple[Message, bool]:
        """The answer in the form that renders as the generated tokens, or else its literal text."""
        text = self._renderer.tokenizer.decode(answer.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        end = [] if answer.stop_id is None else [answer.stop_id]
        wanted = [*question.prompt_ids, *answer.ids, *end]
        for message in answer_forms(text):
            if self._renders_as(wanted, item, message):
                return message, answer.generated_ids
        return Message("assistant", text), False

    def _renders_as(self, wanted: Sequence[int], item: OpenConversation, message: Message) -> bool:
        try:
            rendered = self._renderer.render([*item.messages, message], item.source.tools).input_ids
        except BadRowError:  # met again, with its origin, when the sample is built
            return False
        return bool(np.array_equal(rendered[: len(wanted)], wanted))

    def _apply(self, item: OpenConversation, entry: AnswerEntry) -> None:
        item.messages.append(Message("assistant", entry.content, reasoning=entry.reasoning))
        item.finished = entry.finished
        item.exact = item.exact and entry.exact
        if not entry.finished and not (self._answers.keep_unfinished and item.last_turn):
            item.reject("unfinished", f"answer {item.turn} has no stop token within {entry.tokens} tokens")
        elif entry.tokens <= entry.finished:
            item.reject("empty_answer", f"the target says nothing in answer {item.turn}")
        item.turn += 1
        self.settled += 1
