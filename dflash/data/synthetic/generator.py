"""Deterministic synthetic chats whose held-out prompts can never have been trained on.

Invariant: conversation `i` of (seed, split, kinds) depends on nothing else, so streams can be cut, repeated and compared
freely; and every user turn of a conversation lies on that conversation's side of the border of `prompts.split_of`
(turns are redrawn until they do, about 8 draws for a held-out turn and 8/7 for a training turn).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from dflash.data.synthetic import code_tasks, number_tasks, text_tasks
from dflash.data.synthetic.conversation import Split, SyntheticConversation, Turn
from dflash.data.synthetic.lengths import estimated_tokens
from dflash.data.synthetic.prompts import split_of
from dflash.data.synthetic.words import SYSTEM_PROMPTS
from dflash.errors import DataError

_SINGLE: dict[str, Callable[[Random], Turn]] = {
    "arithmetic": number_tasks.arithmetic,
    "word_problem": number_tasks.word_problem,
    "counting": number_tasks.counting,
    "sorting": number_tasks.sorting,
    "times_table": number_tasks.times_table,
    "python_function": code_tasks.python_function,
    "json_record": text_tasks.json_record,
    "letters": text_tasks.letters,
}
TASK_KINDS: tuple[str, ...] = (*_SINGLE, "multi_turn")

_SYSTEM_SHARE = 0.25
_MAX_TURNS = 6
_MAX_CHAT_TOKENS = 210
"""Upper limit of a multi-turn chat by `estimated_tokens`; real counts stay below 256 (asserted by the tests)."""
_SHORT_TURN_TOKENS = 40
"""Room that the first turn must leave so that some second turn can always be found."""


def _draw_turn(rng: Random, kind: str, split: Split) -> Turn:
    """Draw turns of one kind until one belongs to the split."""
    while True:
        turn = _SINGLE[kind](rng)
        if split_of(turn.prompt) == split:
            return turn


def _draw_turns(rng: Random, kind: str, split: Split) -> list[Turn]:
    """Draw the turns of one conversation: one, or for `multi_turn` two to six that fit the length limit."""
    if kind != "multi_turn":
        return [_draw_turn(rng, kind, split)]
    wanted = rng.randint(2, _MAX_TURNS)
    turns: list[Turn] = []
    room_tokens = _MAX_CHAT_TOKENS
    while len(turns) < wanted:
        turn = _draw_turn(rng, rng.choice(tuple(_SINGLE)), split)
        left_tokens = room_tokens - estimated_tokens(turn.prompt) - estimated_tokens(turn.answer)
        if left_tokens < 0 and len(turns) >= 2:
            break
        if left_tokens < (0 if turns else _SHORT_TURN_TOKENS):
            continue
        turns.append(turn)
        room_tokens = left_tokens
    return turns


def generate_conversations(
    *, seed: int, count: int, split: Split, kinds: Sequence[str] | None = None
) -> Iterator[SyntheticConversation]:
    """Yield `count` conversations of the given kinds (None: all kinds, equally often), each wholly within one split.

    Raises DataError on the first step if a kind is not one of `TASK_KINDS` or no kind is given.
    """
    chosen = tuple(TASK_KINDS if kinds is None else kinds)
    unknown = sorted(set(chosen) - set(TASK_KINDS))
    if unknown or not chosen:
        named = ", ".join(unknown) or "none given"
        raise DataError(f"unknown synthetic task kinds: {named}", remedy=f"choose from {', '.join(TASK_KINDS)}")
    for index in range(count):
        rng = Random(f"{seed}/{split}/{index}")
        kind = rng.choice(chosen)
        messages: list[tuple[str, str]] = []
        if rng.random() < _SYSTEM_SHARE:
            messages.append(("system", rng.choice(SYSTEM_PROMPTS)))
        for turn in _draw_turns(rng, kind, split):
            messages += [("user", turn.prompt), ("assistant", turn.answer)]
        yield SyntheticConversation(id=f"{split}-{seed}-{index:06d}", kind=kind, messages=tuple(messages))
