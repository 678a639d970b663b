"""The target's tokenizer: what is refused at load, which token may be the mask, what ends an answer, identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_toys import CHATML, HEADERS, MASK_ID, toy_tokenizer

from dflash.config import TargetConfig
from dflash.data.tokenizer import (
    load_tokenizer,
    resolve_mask_token_id,
    stop_token_ids,
    template_sha256,
    tokenizer_sha256,
)
from dflash.errors import TargetError

TOKENIZER = toy_tokenizer(CHATML)
VOCAB_SIZE = len(TOKENIZER) + 10  # embeddings are often padded beyond the tokenizer's vocabulary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(str(tmp_path / "toy"))
    return tmp_path / "toy"


def target(path: Any, **mask: Any) -> TargetConfig:
    return TargetConfig(path=str(path), **(mask or {"mask_token": "<|mask|>"}))


class TestLoading:
    def test_a_folder_gives_the_tokenizer_that_was_saved(self, folder: Path) -> None:
        loaded = load_tokenizer(target(folder))
        assert tokenizer_sha256(loaded) == tokenizer_sha256(TOKENIZER)
        assert template_sha256(loaded) == template_sha256(TOKENIZER)

    def test_the_shipped_demo_target_loads_and_its_mask_is_usable(self) -> None:
        demo = target("demo", mask_token="<|mask|>")
        tokenizer = load_tokenizer(demo)
        assert resolve_mask_token_id(demo, tokenizer, vocab_size=len(tokenizer)) not in stop_token_ids(tokenizer, demo)

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TargetError, match=r"nowhere.*cannot be loaded"):
            load_tokenizer(target(tmp_path / "nowhere"))

    def test_a_folder_without_a_tokenizer_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(TargetError, match="cannot be loaded"):
            load_tokenizer(target(tmp_path))

    def test_a_tokenizer_without_a_chat_template_is_refused(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(TargetError, match="no chat template"):
            load_tokenizer(target(folder))


class TestMaskToken:
    @pytest.mark.parametrize("mask", [{"mask_token": "<|mask|>"}, {"mask_token_id": MASK_ID}])
    def test_by_text_or_id(self, mask: dict[str, Any]) -> None:
        assert resolve_mask_token_id(target("x", **mask), TOKENIZER, vocab_size=VOCAB_SIZE) == MASK_ID

    def test_a_row_beyond_the_tokenizer_will_do_if_the_embedding_has_it(self) -> None:
        spare = target("x", mask_token_id=VOCAB_SIZE - 1)
        assert resolve_mask_token_id(spare, TOKENIZER, vocab_size=VOCAB_SIZE) == VOCAB_SIZE - 1
        with pytest.raises(TargetError, match=rf"outside the target's {VOCAB_SIZE - 1} embedding rows"):
            resolve_mask_token_id(spare, TOKENIZER, vocab_size=VOCAB_SIZE - 1)

    def test_an_unknown_text_is_refused_and_never_becomes_the_unknown_token(self) -> None:
        with pytest.raises(TargetError, match=r"'<\|nothing\|>' is not in the vocabulary"):
            resolve_mask_token_id(target("x", mask_token="<|nothing|>"), TOKENIZER, vocab_size=VOCAB_SIZE)

    @pytest.mark.parametrize(("token", "role"), [("<|pad|>", "pad"), ("<|im_end|>", "eos")])
    def test_pad_and_eos_are_refused(self, token: str, role: str) -> None:
        with pytest.raises(TargetError, match=f"is the target's {role} token"):
            resolve_mask_token_id(target("x", mask_token=token), TOKENIZER, vocab_size=VOCAB_SIZE)


class TestStopTokens:
    def test_the_tokenizers_eos_alone(self, folder: Path) -> None:
        assert stop_token_ids(TOKENIZER, target(folder)) == (TOKENIZER.eos_token_id,)

    @pytest.mark.parametrize("eos", [7, [7], [7, 0], [4, 7]])
    def test_those_of_the_generation_configuration_count_as_well(self, folder: Path, eos: int | list[int]) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        wanted = {TOKENIZER.eos_token_id} | set(eos if isinstance(eos, list) else [eos])
        assert stop_token_ids(TOKENIZER, target(folder)) == tuple(sorted(wanted))

    def test_a_broken_generation_configuration_is_not_passed_over(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text("{oops")
        with pytest.raises(TargetError, match="generation configuration"):
            stop_token_ids(TOKENIZER, target(folder))

    def test_a_target_that_never_stops_is_refused(self, folder: Path) -> None:
        endless = toy_tokenizer(HEADERS, "<|eot|>")
        endless.eos_token = None
        with pytest.raises(TargetError, match="no eos token"):
            stop_token_ids(endless, target(folder))


class TestIdentity:
    def test_the_state_of_the_last_call_is_not_identity(self) -> None:
        before = tokenizer_sha256(TOKENIZER)
        TOKENIZER(["a", "a longer text"], padding=True, truncation=True, max_length=3)
        assert tokenizer_sha256(TOKENIZER) == before

    def test_another_vocabulary_or_template_is(self) -> None:
        other = toy_tokenizer(HEADERS, trim_offsets=True)
        assert tokenizer_sha256(other) != tokenizer_sha256(TOKENIZER)
        assert template_sha256(other) != template_sha256(TOKENIZER)
