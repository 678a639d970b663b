"""Prompt sets: known names in the hub's columns, local files, pins, labels, several sets in one evaluation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PreTrainedTokenizerBase

from dflash.config import KNOWN_SETS, Config, DataConfig, EvaluateConfig, PromptSetConfig, TargetConfig
from dflash.data.prompt_hashes import PromptTable, write_table
from dflash.data.put import put_data_file
from dflash.data.synthetic import prompt_hash
from dflash.data.tokenizer import load_tokenizer, template_sha256, tokenizer_sha256
from dflash.errors import EvaluationError, StorageError
from dflash.evaluate import prompt_sets
from dflash.evaluate.known_sets import KNOWN
from dflash.evaluate.prompt_sets import PromptSet, read_prompt_set
from dflash.evaluate.prompts import EvalPrompt, load_eval_prompts
from dflash.evaluate.result_slices import prompt_set_entries
from dflash.storage import open_store
from tests.support.data_sets import write_samples

TARGET = TargetConfig(path="demo", mask_token="<|mask|>")

HUB_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many eggs?", "answer": "Nine.\n#### 9"},
    "math500": {"problem": "Solve x + 1 = 2.", "answer": "1", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass", "entry_point": "f"},
    "mbpp": {"task_id": 2, "prompt": "Write f. ", "code": "...", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now in rhymes."]},
    "alpaca": {"instruction": "Sort these.", "input": "b, a", "output": "a, b"},
}
"""One row of each set, with the columns of its data set on the hub."""

WANTED: dict[str, tuple[str, str, tuple[str, ...], str, str | None]] = {
    "gsm8k": ("gsm8k:1", "How many eggs?", (), "gsm8k", "math"),
    "math500": ("test/algebra/1.json", "Solve x + 1 = 2.", (), "Algebra", "math"),
    "humaneval": ("HumanEval/0", "def f():\n", (), "humaneval", "code"),
    "mbpp": ("2", "Write f.\n\nassert f(1) == 2\nassert f(2) == 3", (), "mbpp", "code"),
    "mt-bench": ("81", "Write a poem.", ("Now in rhymes.",), "writing", "writing"),
    "alpaca": ("alpaca:1", "Sort these.\n\nb, a", (), "alpaca", "instructions"),
}


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(name: str, file: str, **changes: Any) -> PromptSet:
    return read_prompt_set(PromptSetConfig(name=name, file=file, **changes), system_prompt=None)


def test_every_set_that_is_known_by_name_has_a_place_on_the_hub() -> None:
    assert set(KNOWN) == set(KNOWN_SETS) == set(HUB_ROWS)
    for known in KNOWN.values():
        assert len(known.revision) == 40 and known.repository.count("/") == 1 and known.path.endswith((".parquet", ".jsonl"))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_known_set_is_read_by_the_columns_it_has_on_the_hub(name: str, form: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([HUB_ROWS[name]]), file)
    else:
        jsonl(file, [HUB_ROWS[name]])
    found = read(name, str(file))
    (question,) = found.questions
    identifier, text, later, kind, domain = WANTED[name]
    assert (question.conversation.id, question.later_turns, question.conversation.kind) == (identifier, later, kind)
    assert [(message.role, message.content) for message in question.conversation.messages] == [("user", text)]
    assert (question.language, question.domain) == ("en", domain)
    assert (found.name, found.origin) == (name, file.name)
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_copy_in_the_projects_own_shape_is_read_too(tmp_path: Path) -> None:
    rows = [{"id": "gsm8k-test-0", "source": "gsm8k", "prompt": "How many eggs?", "reference": "#### 9"}]
    (question,) = read("gsm8k", jsonl(tmp_path / "own.jsonl", rows)).questions
    assert (question.conversation.id, question.conversation.messages[-1].content) == ("gsm8k-test-0", "How many eggs?")


def test_any_file_may_hold_prompts_turns_or_conversations_and_label_its_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Hallo?", "language": "de", "domain": "chat", "kind": "greeting"},
        {"turns": ["One.", "Two.", "Three."], "id": 7},
        {
            "messages": [
                {"role": "user", "content": "Hi."},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Go."},
            ]
        },
    ]
    first, second, third = read("mine", jsonl(tmp_path / "mine.jsonl", rows), language="en").questions
    assert (first.language, first.domain, first.conversation.kind) == ("de", "chat", "greeting")
    assert (second.language, second.domain, second.conversation.id) == ("en", None, "7")
    assert second.later_turns == ("Two.", "Three.") and second.user_turns() == ["One.", "Two.", "Three."]
    assert [message.content for message in third.conversation.messages] == ["Hi.", "Yes?", "Go."]
    assert third.conversation.id == "mine:3"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "no turn"}, "it has no user turn"),
        ({"question": "?"}, "none of messages"),
        ({"turns": ["Fine.", " "]}, "a turn has no text"),
        ([1], "the row holds list"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(row: Any, reason: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "bad.jsonl", [{"prompt": "Fine."}, row])
    with pytest.raises(EvaluationError, match=f"bad.jsonl:2 is no prompt of 'mine': .*{reason}"):
        read("mine", file)


def test_lines_that_are_no_json_empty_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl").write_text('{"prompt": "Fine."}\n{"prompt": "torn')
    with pytest.raises(EvaluationError, match=r"torn.jsonl:2 is no prompt of 'mine': not_json"):
        read("mine", str(tmp_path / "torn.jsonl"))
    with pytest.raises(EvaluationError, match="holds no prompt"):
        read("mine", jsonl(tmp_path / "empty.jsonl", []))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(EvaluationError, match=r"damaged\.parquet is a damaged Parquet file"):
        read("mine", str(tmp_path / "damaged.parquet"))
    with pytest.raises(StorageError, match=r"absent\.jsonl"):
        read("mine", str(tmp_path / "absent.jsonl"))


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    file = Path(jsonl(tmp_path / "q.jsonl", [{"prompt": "Hi."}]))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert read("mine", str(file), sha256=digest).sha256 == digest
    file.write_text('{"prompt": "Hi!"}\n')
    with pytest.raises(EvaluationError, match=rf"SHA-256 [0-9a-f]{{64}}, expected {digest}"):
        read("mine", str(file), sha256=digest)


def test_the_hub_is_asked_for_the_recorded_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str, str]] = []

    def download(repository: str, path: str, *, repo_type: str, revision: str) -> str:
        asked.append((repository, path, repo_type, revision))
        return jsonl(tmp_path / "cached.jsonl", [HUB_ROWS["mt-bench"]])

    monkeypatch.setattr(prompt_sets.huggingface_hub, "hf_hub_download", download)
    known = KNOWN["mt-bench"]
    found = read_prompt_set(PromptSetConfig(name="mt-bench"), system_prompt="Be brief.")
    assert asked == [(known.repository, known.path, "dataset", known.revision)]
    assert found.origin == f"{known.repository}@{known.revision}:{known.path}"
    assert [message.role for message in found.questions[0].conversation.messages] == ["system", "user"]
    read_prompt_set(PromptSetConfig(name="mt-bench", revision="abc"), system_prompt=None)
    assert asked[1][3] == "abc"


def test_a_hub_out_of_reach_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(prompt_sets.huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(EvaluationError, match=r"the hub does not give prompt set 'alpaca' \(tatsu-lab/alpaca@") as caught:
        read_prompt_set(PromptSetConfig(name="alpaca"), system_prompt=None)
    assert "evaluate.sets=[{name: alpaca, file: path/to/it}]" in caught.value.remedy


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TARGET)


def loaded(
    folder: Path, tokenizer: PreTrainedTokenizerBase, sets: list[PromptSetConfig], *, trained: tuple[str, ...] = (), **changes: Any
) -> list[EvalPrompt]:
    store, table = open_store(folder), PromptTable()
    table.add(b"".join(bytes.fromhex(prompt_hash(text))[:16] for text in trained))
    write_table(folder / "table.npy", table.table())
    manifest = write_samples(
        store, [[]], edges=(256,), rows_per_shard=8, rows_per_group=8, tokenizer_sha256=tokenizer_sha256(tokenizer),
        template_sha256=template_sha256(tokenizer),
        prompt_files=(put_data_file(store, "units/unit.prompts", folder / "table.npy", rows=len(trained)),),
    )  # fmt: skip
    config = Config(
        target=TARGET,
        data=DataConfig(num_conversations=10),
        evaluate=EvaluateConfig(**{"source": "sets", "sets": tuple(sets), "num_prompts": 3, **changes}),
    )
    return load_eval_prompts(config, tokenizer=tokenizer, manifest=manifest, store=store)


def counting(path: Path, count: int, word: str) -> PromptSetConfig:
    rows = [{"id": f"q{i}", "prompt": f"{word} to {i}."} for i in range(count)]
    return PromptSetConfig(name=path.stem, file=jsonl(path, rows), domain=word)


def test_several_sets_take_turns_and_keep_their_labels(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sets = [counting(tmp_path / "up.jsonl", 20, "Count"), counting(tmp_path / "down.jsonl", 2, "Descend")]
    found = loaded(tmp_path, tokenizer, sets)
    assert [prompt.dataset for prompt in found] == ["up", "down", "up", "down", "up"]
    assert len({prompt.id for prompt in found}) == 5, "both files number their rows alike"
    assert {(prompt.dataset, prompt.domain) for prompt in found} == {("up", "Count"), ("down", "Descend")}
    assert all(prompt.origin.sha256 == hashlib.sha256(Path(tmp_path / f"{prompt.dataset}.jsonl").read_bytes()).hexdigest()
               for prompt in found)  # fmt: skip
    # What a probe asks for beyond the evaluation's prompts: more of every set, the first ones unchanged.
    more = loaded(tmp_path, tokenizer, sets, num_prompts=6)
    assert [prompt.id for prompt in more if prompt.dataset == "up"][:3] == [p.id for p in found if p.dataset == "up"]


def test_a_result_names_the_sets_that_its_prompts_came_from(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sets = [counting(tmp_path / "up.jsonl", 20, "Count"), counting(tmp_path / "down.jsonl", 2, "Descend")]
    prompts = loaded(tmp_path, tokenizer, sets)
    second_turn = replace(prompts[1], id="second", turn=2)
    entries = prompt_set_entries([*prompts, second_turn, replace(prompts[0], id="elsewhere", origin=None)])
    assert [(entry.name, entry.origin, entry.prompts) for entry in entries] == [("up", "up.jsonl", 3), ("down", "down.jsonl", 3)]
    assert entries[0].sha256 == hashlib.sha256((tmp_path / "up.jsonl").read_bytes()).hexdigest()


def test_an_id_that_stands_twice_in_a_set_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = jsonl(tmp_path / "q.jsonl", [{"id": "a", "prompt": "One."}, {"id": "a", "prompt": "Two."}])
    with pytest.raises(EvaluationError, match="two rows of the id 'a'"):
        loaded(tmp_path, tokenizer, [PromptSetConfig(name="mine", file=file)])


def test_a_template_goes_around_the_prompt_and_hides_no_trained_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = jsonl(tmp_path / "q.jsonl", [{"prompt": "What is 2 + 3?"}])
    around = PromptSetConfig(name="mine", file=file, template="Think first.\n\n{prompt}\n\nAnswer in one word.")
    (prompt,) = loaded(tmp_path, tokenizer, [around])
    assert "Think first.\n\nWhat is 2 + 3?\n\nAnswer in one word.<|im_end|>" in tokenizer.decode(list(prompt.prompt_ids))
    for trained in ("what is 2 + 3?", "Think first. What is 2 + 3? Answer in one word."):
        with pytest.raises(EvaluationError, match="1 of 1 evaluation prompts are in the training data"):
            loaded(tmp_path, tokenizer, [around], trained=(trained,))


def test_a_later_turn_that_was_trained_on_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    mine = PromptSetConfig(name="mine", file=jsonl(tmp_path / "q.jsonl", [{"turns": ["Write a poem.", "Now in rhymes."]}]))
    with pytest.raises(EvaluationError, match="1 of 1"):
        loaded(tmp_path, tokenizer, [mine], trained=("now in rhymes",))
    (prompt,) = loaded(tmp_path, tokenizer, [mine], trained=("write a novel",))
    assert prompt.turn == 1 and prompt.question.later_turns == ("Now in rhymes.",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "mine"}, "has no file and is none of gsm8k"),
        ({"name": "gsm8k", "file": "a.jsonl", "revision": "abc"}, "its revision would be ignored"),
        ({"name": "gsm8k", "template": "no place"}, "lacks {prompt}"),
        ({"name": "../up"}, "pattern"),
        ({"name": "gsm8k", "sha256": "ABC"}, "pattern"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused_by_the_configuration(value: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSetConfig.model_validate(value)


def test_sets_and_their_source_go_together() -> None:
    assert EvaluateConfig(source="sets", sets=("gsm8k", "mt-bench")).sets[1] == PromptSetConfig(name="mt-bench")
    for changes in ({"source": "sets"}, {"sets": ("gsm8k",)}, {"source": "sets", "sets": ("gsm8k", "gsm8k")}):
        with pytest.raises(ValueError, match="sets"):
            EvaluateConfig(**changes)
