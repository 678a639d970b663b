"""Chats as token ids with a loss mask, and batches of similar length within a token budget.

Invariant: exactly the assistant contents and the `<|im_end|>` that closes each of them are supervised. Padding is on the
right and unsupervised, so causal attention never sees it and no attention mask is needed.
The price: about a quarter of the tokens are padding, because a step mixes chats of all lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from dflash.data.synthetic import SyntheticConversation, generate_conversations
from dflash.demo.tokenizer import TURN_END, TURN_START


@dataclass(frozen=True)
class Example:
    """One chat: ids and, per id, the ordinal of the assistant answer it belongs to (-1: not supervised)."""

    kind: str
    ids: tuple[int, ...]
    answer_of: tuple[int, ...]

    def weights(self, *, end_weight: float) -> tuple[float, ...]:
        """Loss weight per id: 1 / sqrt(tokens of its answer), the token that ends the answer `end_weight` times that.

        So short answers are not drowned by long ones, nor the one decision to stop by the many to go on.
        """
        lengths = Counter(self.answer_of)
        following = (*self.answer_of[1:], -1)
        return tuple(
            0.0 if answer < 0 else (1.0 if after == answer else end_weight) * lengths[answer] ** -0.5
            for answer, after in zip(self.answer_of, following, strict=True)
        )


@dataclass(frozen=True)
class Batch:
    """Right-padded examples: `ids`, `answer_of` (-1: not supervised) int64 [B, S], `weights` float32 [B, S], kinds."""

    ids: torch.Tensor
    answer_of: torch.Tensor
    weights: torch.Tensor
    kinds: tuple[str, ...]


def _answer_of(ids: Sequence[int], roles: Sequence[str], *, start_id: int, end_id: int, role_tokens: int) -> list[int]:
    """Number the supervised tokens by walking over the turns: after the role line, up to and with the closing token."""
    numbers = [-1] * len(ids)
    turn, answer, content_from = -1, -1, len(ids)
    for position, token in enumerate(ids):
        if token == start_id:
            turn += 1
            content_from = position + 1 + role_tokens
            answer += roles[turn] == "assistant"
        elif position >= content_from and roles[turn] == "assistant":
            numbers[position] = answer
            if token == end_id:
                content_from = len(ids)
    return numbers


def encode(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[SyntheticConversation]) -> list[Example]:
    """Render and tokenize conversations with the tokenizer's own chat template."""
    texts = [tokenizer.apply_chat_template(chat.as_messages(), tokenize=False) for chat in conversations]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    start_id, end_id = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
    role_tokens = len(tokenizer("assistant\n", add_special_tokens=False)["input_ids"])
    examples = []
    for chat, ids in zip(conversations, rows, strict=True):
        roles = [role for role, _ in chat.messages]
        numbers = _answer_of(ids, roles, start_id=start_id, end_id=end_id, role_tokens=role_tokens)
        examples.append(Example(kind=chat.kind, ids=tuple(ids), answer_of=tuple(numbers)))
    return examples


def collate(examples: Sequence[Example], *, pad_id: int, end_weight: float) -> Batch:
    """Pad examples on the right to the longest of them."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    answer_of = torch.full((len(examples), width), -1, dtype=torch.int64)
    weights = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        weights[row, : len(example.ids)] = torch.tensor(example.weights(end_weight=end_weight))
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        answer_of[row, : len(example.ids)] = torch.tensor(example.answer_of)
    return Batch(ids=ids, answer_of=answer_of, weights=weights, kinds=tuple(example.kind for example in examples))


def length_batches(examples: Sequence[Example], *, batch_tokens: int, pad_id: int, end_weight: float) -> list[Batch]:
    """Cut examples, sorted by length, into batches of at most `batch_tokens` padded tokens (at least one example)."""
    batches: list[Batch] = []
    group: list[Example] = []
    for example in sorted(examples, key=lambda item: len(item.ids)):
        if group and (len(group) + 1) * len(example.ids) > batch_tokens:
            batches.append(collate(group, pad_id=pad_id, end_weight=end_weight))
            group = []
        group.append(example)
    if group:
        batches.append(collate(group, pad_id=pad_id, end_weight=end_weight))
    return batches


def training_steps(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    pool_conversations: int,
    step_conversations: int,
    batch_tokens: int,
    end_weight: float,
) -> Iterator[list[Batch]]:
    """Yield without end the batches of one optimizer step: fresh training conversations of every kind and length.

    Each step mixes all lengths (a step of equal lengths would be a step of one task kind); only inside the step are
    conversations sorted into batches of similar length.
    """
    pool = 0
    while True:
        # A pool is its own seed, so the stream needs no state and never repeats a conversation's random numbers.
        chats = list(generate_conversations(seed=pool_seed(seed=seed, pool=pool), count=pool_conversations, split="train"))
        examples = encode(tokenizer, chats)
        for start in range(0, pool_conversations, step_conversations):
            chosen = examples[start : start + step_conversations]
            yield length_batches(chosen, batch_tokens=batch_tokens, pad_id=tokenizer.pad_token_id, end_weight=end_weight)
        pool += 1


def pool_seed(*, seed: int, pool: int) -> int:
    """Return the generator seed of one pool of the target's training stream."""
    return seed * 1_000_000 + pool
