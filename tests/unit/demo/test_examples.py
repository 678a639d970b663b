"""Rendered examples: exactly the answers are supervised, every example lands in one batch, batches keep the budget."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash.data.synthetic import SyntheticConversation, generate_conversations
from dflash.demo.examples import Batch, Example, collate, encode, length_batches, pool_seed, training_steps
from tests.support.demo_target import DEMO_TARGET


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_TARGET)


@pytest.fixture(scope="module")
def chats() -> list[SyntheticConversation]:
    return list(generate_conversations(seed=41, count=300, split="train"))


def test_supervised_tokens_decode_to_the_answers_and_their_end(
    tokenizer: PreTrainedTokenizerBase, chats: list[SyntheticConversation]
) -> None:
    for chat, example in zip(chats, encode(tokenizer, chats), strict=True):
        answers = [content for role, content in chat.messages if role == "assistant"]
        for number, answer in enumerate(answers):
            ids = [token for token, of in zip(example.ids, example.answer_of, strict=True) if of == number]
            assert tokenizer.decode(ids) == answer + "<|im_end|>"
        assert set(example.answer_of) == {-1, *range(len(answers))}


def test_ids_are_the_rendered_chat(tokenizer: PreTrainedTokenizerBase, chats: list[SyntheticConversation]) -> None:
    for chat, example in zip(chats[:20], encode(tokenizer, chats[:20]), strict=True):
        assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(chat.as_messages(), tokenize=False)


def test_collate_pads_on_the_right_without_supervision() -> None:
    batch = collate(
        [
            Example(kind="a", ids=(5, 6, 7), answer_of=(-1, 0, 0)),
            Example(kind="b", ids=(8,), answer_of=(0,)),
        ],
        pad_id=0,
        end_weight=3.0,
    )
    assert torch.equal(batch.ids, torch.tensor([[5, 6, 7], [8, 0, 0]]))
    assert torch.equal(batch.answer_of, torch.tensor([[-1, 0, 0], [0, -1, -1]]))
    assert torch.allclose(batch.weights, torch.tensor([[0.0, 0.5**0.5, 3 * 0.5**0.5], [3.0, 0.0, 0.0]]))
    assert batch.kinds == ("a", "b")


def test_weights_are_per_answer_and_the_closing_token_counts_more() -> None:
    example = Example(kind="a", ids=(1,) * 9, answer_of=(-1, 0, 0, 0, 0, -1, -1, 1, -1))
    assert example.weights(end_weight=4.0) == (0, 0.5, 0.5, 0.5, 2.0, 0, 0, 4.0, 0)


def test_length_batches_hold_every_example_once_within_the_budget_and_waste_little() -> None:
    examples = [Example(kind=str(n), ids=(n,) * (n % 60 + 1), answer_of=(0,) * (n % 60 + 1)) for n in range(1, 600)]
    batches = length_batches(examples, batch_tokens=512, pad_id=0, end_weight=1.0)
    assert Counter(kind for batch in batches for kind in batch.kinds) == Counter(example.kind for example in examples)
    assert all(batch.ids.numel() <= 512 for batch in batches)
    padded = sum(batch.ids.numel() for batch in batches)
    assert sum(len(example.ids) for example in examples) / padded > 0.95


def test_an_example_longer_than_the_budget_makes_a_batch_of_one() -> None:
    long = Example(kind="long", ids=(1,) * 50, answer_of=(0,) * 50)
    assert [batch.ids.shape for batch in length_batches([long, long], batch_tokens=10, pad_id=0, end_weight=1.0)] == [
        (1, 50),
        (1, 50),
    ]


def test_training_stream_is_reproducible_and_uses_every_conversation_of_a_pool_once(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def stream(steps: int) -> list[list[Batch]]:
        source = training_steps(tokenizer, seed=4, pool_conversations=64, step_conversations=16, batch_tokens=1024, end_weight=2.0)
        return list(itertools.islice(source, steps))

    first, second = stream(5), stream(5)
    assert [[batch.ids.tolist() for batch in step] for step in first] == [[batch.ids.tolist() for batch in step] for step in second]
    assert all(sum(len(batch.kinds) for batch in step) == 16 for step in first)
    assert all(len({kind for batch in step for kind in batch.kinds}) >= 4 for step in first)
    chats = list(generate_conversations(seed=pool_seed(seed=4, pool=0), count=64, split="train"))
    expected = Counter(tokenizer.decode(example.ids) for example in encode(tokenizer, chats))
    rows = [row.tolist() for step in first[:4] for batch in step for row in batch.ids]
    assert Counter(tokenizer.decode([token for token in row if token != tokenizer.pad_token_id]) for row in rows) == expected


def test_pools_of_different_seeds_never_share_a_generator_seed() -> None:
    assert len({pool_seed(seed=seed, pool=pool) for seed in range(20) for pool in range(200)}) == 4000
