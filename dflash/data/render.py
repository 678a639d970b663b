"""Conversations as token ids with a loss mask, cut where the chat template's own renderings say.

The text that the target is prompted with for a turn is the rendering of everything before it, with the generation prompt.
That text must be a prefix of the whole rendering; what follows, up to and including the end-of-turn token, is what the
target would have to write, and carries loss. No pattern is ever searched in the text.

Invariant: the ids are those of the whole rendering; a token is supervised only if all its characters belong to an answer.
Hard decision: a template that renders an earlier turn differently once later turns follow (many thinking templates drop
old reasoning) is an error, not a guess: under it no single sample shows every answer in the context it was written in.
The price: one rendering per supervised turn, and one tokenization of the whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash.data.quarantine import BadRowError
from dflash.errors import DataError
from dflash.records import Message

_RESERVED_FLAGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as tokens.

    Attributes:
        input_ids: [n] token ids.
        loss_mask: [n] whether the token belongs to an answer (its end-of-turn token included).
    """

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Token ids of `text` with the characters [start, end) that each covers; both ascend."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatRenderer:
    """Renders conversations through the target's chat template.

    Args:
        tokenizer: the target's, with character offsets.
        supervise: `all` or only the `last` assistant turn.
        template_flags: extra template variables (thinking mode and the like).

    Raises:
        DataError: a flag has the name of an argument of the rendering itself.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, supervise: Literal["all", "last"], template_flags: Mapping[str, Any]
    ) -> None:
        taken = sorted(_RESERVED_FLAGS & set(template_flags))
        if taken:
            raise DataError(
                f"data.template_flags sets {taken}, which the rendering itself decides",
                remedy="pass only variables that the chat template defines, e.g. enable_thinking",
            )
        self.tokenizer = tokenizer
        self._supervise = supervise
        self._flags = dict(template_flags)
        # Every added token, not only those marked special: some families end a turn with an unmarked one.
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that the target is prompted with to write the next turn, generation prompt included.

        Raises:
            BadRowError: the template refuses these turns.
        """
        text = self._text(messages, for_generation=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Ids and loss mask of a whole conversation; turns after the last answer are left out.

        Raises:
            BadRowError: there is no answer, or the template refuses these turns.
            DataError: the template renders earlier turns differently once later ones follow.
        """
        answered = _up_to_last_answer(messages)
        text = self._text(answered, for_generation=False)
        encoded = self._encode(text)
        mask = [False] * len(encoded.ids)
        for turn in self._supervised_turns(answered):
            self._mark(mask, encoded, self._answer_span(answered, turn, text))
        return Rendered(encoded.ids, mask)

    def render_unfinished(self, messages: Sequence[Message]) -> Rendered:
        """Like `render`, without the end-of-turn token of the last answer, which the target never wrote."""
        whole = self.render(messages)
        end = max((i for i, supervised in enumerate(whole.loss_mask) if supervised), default=-1)
        if end >= 0 and whole.input_ids[end] in self._added_ids:
            end -= 1
        return Rendered(whole.input_ids[: end + 1], whole.loss_mask[: end + 1])

    def _supervised_turns(self, messages: Sequence[Message]) -> list[int]:
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return turns if self._supervise == "all" else turns[-1:]

    def _answer_span(self, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
        """Characters [start, end) of `text` that belong to the answer at index `turn`."""
        prompt = self._text(messages[:turn], for_generation=True)
        through = text if turn == len(messages) - 1 else self._text(messages[: turn + 1], for_generation=False)
        for part, what in ((prompt, "prompt of"), (through, "rendering up to")):
            if not text.startswith(part):
                raise _disagreement(part, text, f"the {what} turn {turn}")
        if len(through) < len(prompt):
            raise _disagreement(through, prompt, f"the rendering up to turn {turn}")
        return len(prompt), len(through)

    def _mark(self, mask: list[bool], encoded: _Encoded, span: tuple[int, int]) -> None:
        """Set the mask of the tokens inside `span`, without the template's white space behind the end of the turn."""
        first = bisect_left(encoded.starts, span[0])
        stop = bisect_right(encoded.ends, span[1], lo=first)
        while stop > first and self._is_filler(encoded, stop - 1):
            stop -= 1
        mask[first:stop] = [True] * (stop - first)

    def _is_filler(self, encoded: _Encoded, token: int) -> bool:
        characters = encoded.text[encoded.starts[token] : encoded.ends[token]]
        return encoded.ids[token] not in self._added_ids and not characters.strip()

    def _encode(self, text: str) -> _Encoded:
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in tokens["offset_mapping"]]
        # Some tokenizers report a token's start behind its leading space: the space is the token's all the same.
        starts = [min(start, end) for (start, _), end in zip(tokens["offset_mapping"], [0, *ends], strict=False)]
        return _Encoded(text, tokens["input_ids"], starts, ends)

    def _text(self, messages: Sequence[Message], *, for_generation: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=for_generation, **self._flags
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            detail = f"the chat template refuses the turns ({roles}): {error}"
            raise BadRowError("template", detail, origin="chat template") from error
        return text


def has_supervised_pair(loss_mask: Sequence[bool]) -> bool:
    """Whether two consecutive tokens are supervised: without such a pair a sample has no anchor."""
    return any(first and second for first, second in pairwise(loss_mask))


def _up_to_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    count = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    if count == 0:
        raise BadRowError("no_answer", "no assistant turn to learn from", origin="conversation")
    return messages[:count]


def _disagreement(part: str, text: str, what: str) -> DataError:
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    return DataError(
        f"the chat template contradicts itself: {what} is no prefix of the whole conversation; from character {at} on it reads "
        f"{part[at : at + 40]!r}, the whole reads {text[at : at + 40]!r}",
        remedy="set data.supervise: last, or template_flags under which earlier turns keep their rendering "
        "(thinking templates drop or add reasoning in earlier turns)",
    )
