"""Chats for the data benchmarks, cheap to make in any number: turns of the synthetic generator, put together to wanted lengths."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from dflash.data.synthetic import generate_conversations

_POOL = 2000


def write_chats(path: Path, *, count: int, mean_turns: int, mean_characters: int, seed: int) -> int:
    """Write a JSONL file of chats.

    Args:
        path: file to write.
        count: chats.
        mean_turns: pairs of turns a chat, 1 to twice as many.
        mean_characters: characters of a turn, roughly.
        seed: decides everything.

    Returns:
        Bytes written.
    """
    draw = random.Random(seed)
    texts = list(itertools.islice(_texts(seed), _POOL))
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            turns = draw.randint(1, 2 * mean_turns - 1)
            messages = [
                {"role": role, "content": _text(draw, texts, mean_characters)}
                for _ in range(turns)
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"id": f"chat-{number}", "source": "benchmark", "messages": messages}, ensure_ascii=False) + "\n")
        return file.tell()


def _text(draw: random.Random, texts: list[str], mean_characters: int) -> str:
    wanted = max(1, round(mean_characters * draw.uniform(0.5, 1.5)))
    parts: list[str] = []
    while sum(map(len, parts)) < wanted:
        parts.append(draw.choice(texts))
    return " ".join(parts)[: max(wanted, 8)]


def _texts(seed: int) -> Iterator[str]:
    for chat in generate_conversations(seed=seed, count=_POOL, split="train"):
        for _, text in chat.messages:
            yield text
