"""A conversation on its way to being answered: what is asked in which order, and what becomes of it.

Every run of assistant turns is one answer of the target, given to everything before it that is not an answer, and to the
target's own earlier answers. A last user turn is answered too; assistant turns before the first user turn are dropped.

Hard decision: a conversation is cut before its first tool result. The result belongs to a call that the target did not
make, so behind it there is no conversation that the target could have had; the call itself is the target's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dflash.data.quarantine import BadRowCode
from dflash.records import Conversation, Message, QuarantinedRow


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
class OpenConversation:
    """A conversation under way: `messages` grows by what is asked and by one answer a turn.

    Attributes:
        asked: for every answer, the messages that come between it and the answer before.
        turn: answers that are there.
        bad: why it is set aside, if it is.
    """

    source: Conversation
    asked: tuple[tuple[Message, ...], ...]
    messages: list[Message]
    turn: int = 0
    finished: bool = True
    exact: bool = True
    bad: QuarantinedRow | None = None

    @classmethod
    def of(cls, conversation: Conversation) -> OpenConversation:
        """Begin; a conversation without anything to answer is bad at once."""
        item = cls(conversation, turns_to_answer(conversation), [])
        if not item.asked:
            item.reject("no_answer", "there is no user turn that the target could answer")
        return item

    @property
    def done(self) -> bool:
        """Answered throughout, or set aside."""
        return self.bad is not None or self.turn == len(self.asked)

    @property
    def last_turn(self) -> bool:
        """Whether the next answer is the last one."""
        return self.turn == len(self.asked) - 1

    @property
    def key(self) -> str:
        """Names the next answer: samples are keyed by it."""
        return f"{self.source.id}/{self.turn}"

    def ask(self) -> None:
        """Put what the next answer is given to behind the messages."""
        self.messages.extend(self.asked[self.turn])

    def reject(self, code: BadRowCode, detail: str) -> None:
        """Set the conversation aside whole: what follows would be said in answer to something that was not said."""
        self.bad = QuarantinedRow(self.source.origin, f"{code}: {detail}")

    def close(self) -> AnsweredConversation | QuarantinedRow:
        """What leaves."""
        if self.bad is not None:
            return self.bad
        source = self.source
        answered = Conversation(
            id=source.id, messages=tuple(self.messages), origin=source.origin, kind=source.kind, tools=source.tools
        )
        return AnsweredConversation(answered, finished=self.finished, exact=self.exact)


def turns_to_answer(conversation: Conversation) -> tuple[tuple[Message, ...], ...]:
    """For every answer of the target, the messages that come between it and the answer before."""
    asked: list[tuple[Message, ...]] = []
    pending: list[Message] = []
    for message in conversation.messages:
        if message.role == "tool":
            break
        if message.role != "assistant":
            pending.append(message)
        elif _has_question(pending):
            asked.append(tuple(pending))
            pending = []
    if _has_question(pending):
        asked.append(tuple(pending))
    return tuple(asked)


def count_answers(conversations: Iterable[Conversation | QuarantinedRow]) -> int:
    """Answers that the target has to write in all."""
    return sum(len(turns_to_answer(row)) for row in conversations if isinstance(row, Conversation))


def answer_forms(text: str) -> Iterator[Message]:
    """The messages that an answer's text can be kept as, most literal first.

    Some chat templates take the thoughts apart from the content and put their own marks around them; which form is the
    right one is for the rendering to prove.
    """
    yield Message("assistant", text)
    thoughts, mark, content = text.partition("</think>")
    if mark:
        yield Message("assistant", content.lstrip("\n"), reasoning=thoughts.removeprefix("<think>").strip("\n"))


def _has_question(messages: Iterable[Message]) -> bool:
    return any(message.role == "user" for message in messages)
