"""Conversations as token ids with a loss mask, cut where the chat template's own renderings say.

The text that the target is prompted with for a turn is the rendering of everything before it, with the generation prompt.
That text must be a prefix of the rendering that ends with the answer; what follows it, up to and including the end-of-turn
token, is what the target would have to write, and carries loss. `render_contexts` tells what happens under templates that
render earlier turns differently once later ones follow.

Invariant: the ids are those of a whole rendering; a token is supervised only if all its characters belong to an answer.
The price: one rendering per conversation (two per supervised turn under templates that may look ahead, see `render_growth`)
and one tokenization per sample, done for a whole batch in one call (`benchmarks/tokenize_throughput.py`).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from dflash.data.quarantine import BadRowError
from dflash.data.render_contexts import Context, Conversing, answer_turns, without_reasoning
from dflash.data.render_spans import Span, merged, token_span
from dflash.data.render_template import ChatTemplate, template_turns
from dflash.records import Conversation, Message, QuarantinedRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """One sample as tokens.

    Attributes:
        input_ids: [n] int32 token ids.
        loss_spans: tokens [start, end) that belong to an answer, its end-of-turn token included; ascending and apart.
        turns: messages that it shows, of any role; 0 for plain text.
    """

    input_ids: npt.NDArray[np.int32]
    loss_spans: tuple[Span, ...]
    turns: int

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[n] whether the token belongs to an answer."""
        mask = np.zeros(len(self.input_ids), dtype=np.bool_)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(end - start for start, end in self.loss_spans)

    @property
    def has_pair(self) -> bool:
        """Whether two consecutive tokens are supervised: without such a pair a sample has no anchor."""
        return any(end - start >= 2 for start, end in self.loss_spans)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rendered):
            return NotImplemented
        same = self.loss_spans == other.loss_spans and self.turns == other.turns
        return same and np.array_equal(self.input_ids, other.input_ids)

    __hash__ = None  # type: ignore[assignment]


class ChatRenderer:
    """Renders conversations through the target's chat template.

    Args:
        tokenizer: the target's, with character offsets.
        supervise: `all` or only the `last` assistant turn.
        supervise_reasoning: whether the part before the answer proper (`<think>` block) carries loss.
        template_flags: extra template variables (thinking mode and the like).

    Raises:
        DataError: a flag has the name of an argument of the rendering itself.
        TargetError: the template is no valid Jinja.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        supervise: Literal["all", "last"],
        supervise_reasoning: bool,
        template_flags: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template_flags)
        self._supervise = supervise
        self._supervise_reasoning = supervise_reasoning
        # Every added token, not only those marked special: some families end a turn with an unmarked one.
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._reasoning_seen = False

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids that the target is prompted with to write the next turn, generation prompt included.

        Raises:
            BadRowError: the template refuses these turns.
        """
        text = self._template.text(template_turns(messages), tools, for_generation=True)
        ids: list[int] = self._encode([text])[0].ids
        return ids

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        """The sample that ends with the conversation's last answer; turns after it are left out.

        Raises:
            BadRowError: there is no answer, or the template refuses these turns or contradicts itself.
        """
        context = self._contexts(messages, tools)[-1]
        return self._sample(context, self._encode([context.text])[0])

    def render_batch(
        self, conversations: Sequence[Conversation], *, finished: Sequence[bool] | None = None
    ) -> list[tuple[Rendered, ...] | QuarantinedRow]:
        """Render many conversations, tokenizing all their texts in one call.

        Args:
            conversations: with turns, or with plain text, of which every token is supervised.
            finished: whether the last answer of each ends with its end-of-turn token; all of them if None.

        Returns:
            In order: the samples of a conversation (one, unless its template rewrites earlier turns), or why there is none.
        """
        outcomes: list[list[Context] | QuarantinedRow] = [self._contexts_or_reason(each) for each in conversations]
        encodings = iter(self._encode([c.text for found in outcomes if isinstance(found, list) for c in found]))
        samples: list[tuple[Rendered, ...] | QuarantinedRow] = []
        for index, found in enumerate(outcomes):
            if isinstance(found, QuarantinedRow):
                samples.append(found)
                continue
            rendered = [self._sample(context, next(encodings)) for context in found]
            if finished is not None and not finished[index]:
                rendered[-1] = self._without_end_of_turn(rendered[-1])
            samples.append(tuple(rendered))
        return samples

    def _contexts_or_reason(self, conversation: Conversation) -> list[Context] | QuarantinedRow:
        if conversation.text is not None:
            return [Context(conversation.text, (), turns=0)]
        try:
            return self._contexts(conversation.messages, conversation.tools)
        except BadRowError as error:
            # The template does not know where a conversation came from.
            return QuarantinedRow(conversation.origin, error.row.reason)

    def _contexts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Context]:
        answers = answer_turns(messages, self._supervise)
        if not self._reasoning_seen:
            self._say_if_reasoning_is_ignored(messages, tools)
        conversing = Conversing(self._template, messages, tools, supervise_reasoning=self._supervise_reasoning)
        return conversing.contexts(answers)

    def _sample(self, context: Context, encoding: Encoding) -> Rendered:
        listed = encoding.ids
        # Through a buffer: numpy looks at every number of a list twice.
        ids = np.frombuffer(struct.pack(f"={len(listed)}i", *listed), dtype=np.int32)
        if context.turns == 0:  # plain text: its last line break is its own
            return Rendered(ids, merged([(0, len(ids))]), turns=0)
        spans = [token_span(encoding, ids, context.text, part, self._added_ids) for part in context.answers]
        return Rendered(ids, merged(spans), context.turns)

    def _without_end_of_turn(self, whole: Rendered) -> Rendered:
        if not whole.loss_spans:
            return whole
        start, end = whole.loss_spans[-1]
        if int(whole.input_ids[end - 1]) in self._added_ids:
            end -= 1
        return Rendered(whole.input_ids[:end], merged([*whole.loss_spans[:-1], (start, end)]), whole.turns)

    def _encode(self, texts: list[str]) -> list[Encoding]:
        backend = self.tokenizer.backend_tokenizer
        # A call of the tokenizer with padding or truncation leaves these two behind.
        if backend.padding is not None:
            backend.no_padding()
        if backend.truncation is not None:
            backend.no_truncation()
        encodings: list[Encoding] = backend.encode_batch(texts, add_special_tokens=False)
        return encodings

    def _say_if_reasoning_is_ignored(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Warn, once, if the template does not show the reasoning that the source keeps apart."""
        last = max((i for i, message in enumerate(messages) if message.reasoning), default=None)
        if last is None:
            return
        self._reasoning_seen = True
        shown, hidden = (
            self._template.text(template_turns([*messages[:last], answer]), tools, for_generation=False)
            for answer in (messages[last], without_reasoning(messages[last]))
        )
        if shown == hidden:
            logger.warning(
                "the chat template shows no reasoning that comes in a field of its own: the samples lack it; "
                "put it into the content if the target is to be trained on it"
            )
