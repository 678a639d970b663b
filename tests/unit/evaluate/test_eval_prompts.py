from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from dflash.config import Config, DataConfig, EvaluateConfig, TargetConfig
from dflash.data.prompt_hashes import DIGEST_BYTES, PromptTable, write_table
from dflash.data.put import put_data_file
from dflash.data.synthetic import generate_conversations, prompt_hash, split_of
from dflash.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from dflash.errors import EvaluationError
from dflash.evaluate.prompts import check_disjoint, load_eval_prompts
from dflash.records import Conversation, DataManifest, Message
from dflash.storage import open_store
from tests.support.data_sets import write_samples

TARGET = TargetConfig(path="demo", mask_token="<|mask|>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TARGET)


def config(*, data: dict[str, Any] | None = None, **evaluate: Any) -> Config:
    return Config(
        target=TARGET,
        data=DataConfig(num_conversations=10, **(data or {})),
        evaluate=EvaluateConfig(**{"num_prompts": 12, **evaluate}),
    )


def data_set(folder: Path, tokenizer: PreTrainedTokenizerBase, *, hashes: set[str], **changes: Any) -> DataManifest:
    store, table = open_store(folder), PromptTable()
    table.add(b"".join(bytes.fromhex(each)[:DIGEST_BYTES] for each in hashes))
    write_table(folder / "table.npy", table.table())
    prompts = put_data_file(store, "units/unit.prompts", folder / "table.npy", rows=len(hashes))
    return write_samples(
        store,
        [[]],
        edges=(256,),
        rows_per_shard=8,
        rows_per_group=8,
        **{
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "template_sha256": template_sha256(tokenizer),
            "prompt_files": (prompts,),
            **changes,
        },
    )


def trained_hashes(count: int = 300) -> set[str]:
    chats = generate_conversations(seed=7, count=count, split="train")
    return {prompt_hash(text) for chat in chats for role, text in chat.messages if role == "user"}


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_synthetic_prompts_are_held_out_rendered_and_reproducible(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes=trained_hashes())
    loaded = load_eval_prompts(config(), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
    assert len(loaded) == 12
    assert loaded == load_eval_prompts(config(), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
    other = load_eval_prompts(config(seed=12), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
    assert {prompt.prompt_hash for prompt in other} != {prompt.prompt_hash for prompt in loaded}
    chats = list(generate_conversations(seed=11, count=12, split="heldout"))
    for prompt, chat in zip(loaded, chats, strict=True):
        text = tokenizer.decode(list(prompt.prompt_ids))
        last_question = chat.messages[-2][1]
        assert text.endswith(f"{last_question}<|im_end|>\n<|im_start|>assistant\n")
        assert chat.messages[-1][1] not in text.rpartition(last_question)[2]
        assert split_of(last_question) == "heldout" and prompt.prompt_hash == prompt_hash(last_question)
        assert prompt.kind == chat.kind and prompt.dataset == "synthetic-11"


def test_a_prompt_that_was_trained_on_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes={prompt_hash("What is 2 + 3?"), prompt_hash("Say hello.")})
    file = jsonl(tmp_path / "mine.jsonl", [{"id": "a", "prompt": "What is 4 + 3?"}, {"id": "b", "prompt": "what   IS 2 + 3"}])
    settings = config(source="files", files=(file,))
    with pytest.raises(EvaluationError, match=r"1 of 2 evaluation prompts are in the training data, first 'b' \(.*mine.jsonl:2\)"):
        load_eval_prompts(settings, tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))


def test_an_earlier_turn_that_was_trained_on_is_refused_too() -> None:
    chat = Conversation(
        "c", (Message("user", "Say hello."), Message("assistant", "Hello."), Message("user", "Now in Latin.")), "x:1", "chat"
    )
    with pytest.raises(EvaluationError, match="1 of 1"):
        check_disjoint([chat], trained=frozenset({prompt_hash("say hello")}), synthetic=False)
    check_disjoint([chat], trained=frozenset({prompt_hash("something else")}), synthetic=False)


def test_a_synthetic_prompt_from_the_training_side_is_a_broken_invariant() -> None:
    (chat,) = generate_conversations(seed=1, count=1, split="train", kinds=["arithmetic"])
    question = next(text for role, text in chat.messages if role == "user")
    with pytest.raises(AssertionError, match="training side"):
        check_disjoint([Conversation("c", (Message("user", question),), "x", "k")], trained=frozenset(), synthetic=True)


def test_files_give_a_keyed_sample_that_does_not_depend_on_their_order(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes=set())
    rows = [{"id": f"q{i}", "prompt": f"Count to {i}.", "source": "counting", "reference": "1"} for i in range(30)]
    forward = jsonl(tmp_path / "forward.jsonl", rows)
    backward = jsonl(tmp_path / "backward.jsonl", rows[::-1])

    def ids(file: str, **changes: Any) -> list[str]:
        settings = config(source="files", files=(file,), **changes)
        loaded = load_eval_prompts(settings, tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
        assert {prompt.kind for prompt in loaded} == {"counting"}
        return [prompt.id for prompt in loaded]

    assert len(ids(forward)) == 12
    assert ids(forward) == ids(backward) != ids(forward, seed=99)
    assert len(ids(forward, num_prompts=100)) == 30


def test_the_system_prompt_of_training_is_put_before_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes=set())
    file = jsonl(tmp_path / "q.jsonl", [{"prompt": "Count to 3."}])
    settings = config(data={"system_prompt": "Be brief."}, source="files", files=(file,))
    (prompt,) = load_eval_prompts(settings, tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
    assert tokenizer.decode(list(prompt.prompt_ids)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template_flags": {"enable_thinking": True}}, "the drafter was trained with {'enable_thinking': True}"),
        ({"template_sha256": "0" * 64}, "chat template"),
        ({"tokenizer_sha256": "0" * 64}, "tokenizer"),
    ],
)
def test_another_rendering_than_in_training_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any], message: str
) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes=set(), **changes)
    with pytest.raises(EvaluationError, match=message):
        load_eval_prompts(config(), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))


def test_bad_rows_and_empty_files_are_errors(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = data_set(tmp_path, tokenizer, hashes=set())
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "Fine."}, {"question": "?"}])
    with pytest.raises(EvaluationError, match=r"bad.jsonl:2 is no prompt"):
        load_eval_prompts(config(source="files", files=(bad,)), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path))
    empty = jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(EvaluationError, match="no evaluation prompts"):
        load_eval_prompts(
            config(source="files", files=(empty,)), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path)
        )
    wordless = jsonl(tmp_path / "wordless.jsonl", [{"text": "no turn at all"}])
    with pytest.raises(EvaluationError, match=r"wordless.jsonl:1 is no prompt: it has no user turn"):
        load_eval_prompts(
            config(source="files", files=(wordless,)), tokenizer=tokenizer, manifest=manifest, store=open_store(tmp_path)
        )
