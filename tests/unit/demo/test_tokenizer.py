"""The demo tokenizer: any text round-trips, digits stand alone, special tokens never come from ordinary text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash.data.synthetic import generate_conversations
from dflash.demo.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer, train_tokenizer
from tests.support.demo_target import DEMO_TARGET


@pytest.fixture(scope="module")
def shipped() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_TARGET)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_special_tokens_are_the_first_rows_and_keep_their_parts(shipped: PreTrainedTokenizerBase) -> None:
    assert len(shipped) == VOCAB_SIZE == 512
    assert shipped.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (shipped.eos_token, shipped.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_every_digit_is_a_token_of_its_own(shipped: PreTrainedTokenizerBase) -> None:
    for text in ("Count from 17 to 142.", "x=3007", "def add_12(x):", " 99 100"):
        pieces = [shipped.decode([token]) for token in ids_of(shipped, text)]
        assert [piece for piece in pieces if re.search(r"\d", piece)] == re.findall(r"\d", text)


def test_a_word_is_the_same_token_wherever_it_stands(shipped: PreTrainedTokenizerBase) -> None:
    (alone,) = ids_of(shipped, "Ben")
    for text in ("name Ben, age 3", '"Ben"', "Ben\nBen", "x Ben"):
        assert alone in ids_of(shipped, text)
    letters = [shipped.decode([token]) for token in ids_of(shipped, "b c d x y z")]
    assert letters == list("b c d x y z")


def test_corpus_text_round_trips_and_never_yields_a_special_token(shipped: PreTrainedTokenizerBase) -> None:
    for split in ("train", "heldout"):
        chats = list(generate_conversations(seed=31, count=1500, split=split))
        contents = [content for chat in chats for _, content in chat.messages]
        rows = shipped(contents, add_special_tokens=False)["input_ids"]
        assert min(min(row) for row in rows) >= len(SPECIAL_TOKENS)
        assert [shipped.decode(row) for row in rows] == contents


@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=st.text(max_size=50))
def test_any_text_round_trips(shipped: PreTrainedTokenizerBase, text: str) -> None:
    if not any(token in text for token in SPECIAL_TOKENS):
        ids = ids_of(shipped, text)
        assert shipped.decode(ids) == text
        assert all(token >= len(SPECIAL_TOKENS) for token in ids)


def test_chat_template_renders_chatml_and_opens_the_answer_on_request(shipped: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "1 + 1 = 2"},
    ]
    closed = (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n1 + 1 = 2<|im_end|>\n"
    )
    assert shipped.apply_chat_template(messages, tokenize=False) == closed
    opened = shipped.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert closed.startswith(opened)
    assert opened.endswith("<|im_start|>assistant\n")


def test_the_prompt_is_a_token_prefix_of_the_whole_chat(shipped: PreTrainedTokenizerBase) -> None:
    for chat in generate_conversations(seed=32, count=200, split="train"):
        messages = chat.as_messages()
        prompt = shipped.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = shipped.apply_chat_template(messages, tokenize=False)
        prompt_ids = ids_of(shipped, prompt)
        assert ids_of(shipped, whole)[: len(prompt_ids)] == prompt_ids


def test_lengths_spread_from_24_to_256_tokens(shipped: PreTrainedTokenizerBase) -> None:
    chats = list(generate_conversations(seed=33, count=6000, split="train"))
    texts = [shipped.apply_chat_template(chat.as_messages(), tokenize=False) for chat in chats]
    lengths = [len(row) for row in shipped(texts, add_special_tokens=False)["input_ids"]]
    assert min(lengths) >= 20
    assert max(lengths) <= 256
    for low, high, least in ((0, 40, 0.1), (40, 80, 0.2), (80, 120, 0.1), (120, 160, 0.08), (160, 256, 0.08)):
        assert sum(low <= length < high for length in lengths) / len(lengths) >= least


def test_training_is_reproducible_and_a_saved_folder_loads_the_same(tmp_path: Path) -> None:
    def trained() -> PreTrainedTokenizerBase:
        return train_tokenizer(generate_conversations(seed=34, count=800, split="train"))

    first, second = trained(), trained()
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    save_tokenizer(first, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Sort these numbers: 42, 7, 93.\n  {caf\u00e9}"
    assert ids_of(loaded, text) == ids_of(first, text)
    assert loaded.eos_token_id == first.eos_token_id
