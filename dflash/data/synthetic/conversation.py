"""The values that the synthetic generator hands out: one turn, one conversation, the two splits.

Invariant: messages are plain (role, content) pairs, roles alternate user / assistant after an optional system message,
and every assistant content is a function of the user turns before it, so an answer can be checked without the generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Split = Literal["train", "heldout"]


class Turn(NamedTuple):
    """One question with its only correct answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class SyntheticConversation:
    """One chat of the generator: a stable id, its task kind, and (role, content) messages in order."""

    id: str
    kind: str
    messages: tuple[tuple[str, str], ...]

    def as_messages(self) -> list[dict[str, str]]:
        """Return the messages as chat-template input, a list of `{"role": ..., "content": ...}`."""
        return [{"role": role, "content": content} for role, content in self.messages]
