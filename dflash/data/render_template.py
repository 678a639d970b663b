"""The target's chat template as a function from turns to text.

The template is compiled once by transformers' own function, so that it sees the very environment (sandbox, filters) and
variables that serving gives it; what `apply_chat_template` does beside that costs as much again and is left out.

Decisions about what a turn hands to the template:
- `reasoning` goes in as `reasoning_content`, and as `thinking`, which some families read. A template that knows neither
  leaves it out, as it would when the target is served; that is said once, in the log.
- reasoning inside the content (`<think>...</think>`) stays where it is: templates that know it take it apart themselves.
- tool calls go in the shape of the OpenAI interface, tools as JSON schemas.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash.data.quarantine import BadRowError
from dflash.data.render_growth import Growth, growing_loop, grown
from dflash.errors import DataError, TargetError
from dflash.records import Message

logger = logging.getLogger(__name__)

Turn = dict[str, Any]
"""One message as a chat template sees it."""

RESERVED_FLAGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip

# What running a template can raise on turns that it was not written for (`None + text`, a missing key, a zero division).
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A compiled chat template with its flags.

    Args:
        tokenizer: the target's.
        flags: extra template variables.

    Raises:
        DataError: a flag has the name of an argument of the rendering itself.
        TargetError: the template is no valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, flags: Mapping[str, Any]) -> None:
        taken = sorted(RESERVED_FLAGS & set(flags))
        if taken:
            raise DataError(
                f"data.template_flags sets {taken}, which the rendering itself decides",
                remedy="pass only variables that the chat template defines, e.g. enable_thinking",
            )
        try:
            self._plain, self._with_tools = (_compiled(tokenizer, with_tools=flag) for flag in (False, True))
        except TemplateSyntaxError as error:
            raise TargetError(
                f"the chat template is no valid Jinja: {error.message} (line {error.lineno})",
                remedy="mend the target's chat_template.jinja",
            ) from error
        self._variables = {**tokenizer.special_tokens_map, **flags, "documents": None}
        self._generation_prompts: dict[bool, str] = {}
        source = str(tokenizer.get_chat_template(tools=None))
        if "strftime_now" in source and "date_string" not in flags:
            logger.warning(
                "the chat template writes today's date into prompts, so data built on another day differs; "
                "fix it in data.template_flags (date_string in the Llama family)"
            )

    def text(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], *, for_generation: bool) -> str:
        """The rendering of some turns.

        Args:
            turns: in order.
            tools: JSON schemas that the template is given; none if empty.
            for_generation: end with the generation prompt.

        Raises:
            BadRowError: the template refuses these turns.
        """
        template = (self._with_tools if tools else self._plain).template
        try:
            rendered: str = template.render(
                messages=turns, tools=list(tools) or None, add_generation_prompt=for_generation, **self._variables
            )
        except _REFUSALS as error:
            raise _refusal(turns, error) from error
        return rendered

    def growth(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> Growth | None:
        """The rendering of whole turns with the places where it went on to the next one; None if the template may look ahead.

        Raises:
            BadRowError: the template refuses these turns.
        """
        compiled = self._with_tools if tools else self._plain
        if not compiled.grows_with_tool_turns and (not compiled.grows_without or any(turn["role"] == "tool" for turn in turns)):
            return None
        try:
            return grown(compiled.template, {"tools": list(tools) or None, **self._variables}, turns)
        except _REFUSALS as error:
            raise _refusal(turns, error) from error

    def generation_prompt(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], *, start: int) -> str:
        """What a growing template puts behind any turns to have them answered.

        Args:
            turns: whose rendering shows it, the first time.
            tools: as for `growth`.
            start: length of their rendering without it.
        """
        key = bool(tools)
        if key not in self._generation_prompts:
            self._generation_prompts[key] = self.text(turns, tools, for_generation=True)[start:]
        return self._generation_prompts[key]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template, and whether its text only grows with a conversation that has tool turns or none."""

    template: Template
    grows_with_tool_turns: bool
    grows_without: bool


def _compiled(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool) -> _Compiled:
    """The template that is used with or without tools."""
    source = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
    template: Template = _compile_jinja_template(source)
    with_tool_turns, without = (
        growing_loop(template.environment.parse(source), tool_turns=tool_turns) for tool_turns in (True, False)
    )
    return _Compiled(template, with_tool_turns, without)


def _refusal(turns: Sequence[Turn], error: Exception) -> BadRowError:
    roles = ", ".join(turn["role"] for turn in turns)
    return BadRowError("template", f"the chat template refuses the turns ({roles}): {error}", origin="chat template")


def template_turns(messages: Sequence[Message]) -> list[Turn]:
    """Messages as a chat template sees them; absent parts are absent keys, as templates test for them."""
    return [_turn(message) for message in messages]


def _turn(message: Message) -> Turn:
    turn: Turn = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = turn["thinking"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = list(message.tool_calls)
    if message.name is not None:
        turn["name"] = message.name
    return turn
