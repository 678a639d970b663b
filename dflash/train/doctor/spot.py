"""A few samples made on the spot, where no data set has been built yet: configured prompts, answered by the loaded target.

Invariant: the prompts are the configured source's own and go through the run's own chat template, so what is learnt by heart
is what will be trained on; the answers are short and greedy, whatever the configuration says about answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dflash.config import Config, DataConfig
from dflash.data.conversations import configured_conversations
from dflash.data.quarantine import BadRowError
from dflash.data.reader import Batch
from dflash.data.render import ChatRenderer
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.errors import DataError
from dflash.model.generate import generate_batch
from dflash.model.target import Target
from dflash.records import Conversation, Message, PlannedBatch, QuarantinedRow

PROMPTS = 4
ANSWER_TOKENS = 32
LEAST_ANSWER_TOKENS = 4
LOOKED_AT = 100
"""Conversations that are looked at for a usable prompt."""


def spot_batch(config: Config, target: Target) -> Batch:
    """A batch of prompts with the target's own answers.

    Raises:
        DataError: none of the first conversations gives a prompt that the target has something to say to.
        StorageError: a source file cannot be read.
    """
    tokenizer, data = load_tokenizer(config.target), config.data
    renderer = ChatRenderer(
        tokenizer,
        supervise=data.supervise,
        supervise_reasoning=data.supervise_reasoning,
        template_flags=data.template_flags,
    )
    prompts = list(itertools.islice(_prompts(data, renderer), PROMPTS))
    answers = generate_batch(
        target,
        prompts,
        keys=[f"doctor-{number}" for number in range(len(prompts))],
        max_new_tokens=ANSWER_TOKENS,
        temperature=0.0,
        seed=config.run.seed,
        stop_ids=stop_token_ids(tokenizer, config.target),
    )
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) >= LEAST_ANSWER_TOKENS]
    if not pairs:
        raise DataError(
            f"none of the first {LOOKED_AT} conversations gives a prompt that the target answers",
            remedy="look at data.files and at the target's chat template: python -m dflash data prepare shows what is refused",
        )
    return collated(pairs)


def collated(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    """Prompts and answers as one right-padded batch; the answers carry loss."""
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs], dtype=np.int64)
    width = int(lengths.max())
    input_ids = np.zeros((len(pairs), width), dtype=np.int64)
    loss_mask = np.zeros(input_ids.shape, dtype=np.bool_)
    for row, (prompt, answer) in enumerate(pairs):
        input_ids[row, : lengths[row]] = [*prompt, *answer]
        loss_mask[row, len(prompt) : lengths[row]] = True
    planned = PlannedBatch(position=0, epoch=0, bucket=0, padded_length_tokens=width, rows=tuple(range(len(pairs))))
    return Batch(planned, input_ids, loss_mask, lengths)


def _prompts(data: DataConfig, renderer: ChatRenderer) -> Iterator[list[int]]:
    for row in itertools.islice(configured_conversations(data), LOOKED_AT):
        turns = () if isinstance(row, QuarantinedRow) else _first_turn(row)
        if isinstance(row, QuarantinedRow) or not turns:
            continue
        try:
            ids = renderer.prompt_ids(turns, row.tools)
        except BadRowError:
            continue  # the data build counts and lists such rows; here another one will do
        if len(ids) + ANSWER_TOKENS <= data.max_length_tokens:
            yield ids


def _first_turn(conversation: Conversation) -> tuple[Message, ...]:
    """Everything up to the first user turn; empty for plain text."""
    for number, message in enumerate(conversation.messages):
        if message.role == "user":
            return conversation.messages[: number + 1]
    return ()
