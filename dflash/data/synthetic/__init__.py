"""Seeded generator of synthetic chats: deterministic, pure standard library, held-out prompts disjoint by construction."""

from __future__ import annotations

from dflash.data.synthetic.conversation import Split, SyntheticConversation, Turn
from dflash.data.synthetic.generator import TASK_KINDS, generate_conversations
from dflash.data.synthetic.prompts import normalise_prompt, prompt_hash, split_of

__all__ = [
    "TASK_KINDS",
    "Split",
    "SyntheticConversation",
    "Turn",
    "generate_conversations",
    "normalise_prompt",
    "prompt_hash",
    "split_of",
]
