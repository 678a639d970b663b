"""The shipped target: small, loadable, truly able to answer, and never trained on a held-out prompt."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.synthetic import TASK_KINDS, SyntheticConversation, generate_conversations, prompt_hash
from dflash.demo.build_target import REPORT_NAME, grade
from dflash.demo.examples import pool_seed
from dflash.demo.recipe import SHIPPED_RECIPE
from dflash.demo.tokenizer import MASK
from tests.support.demo_target import DEMO_TARGET

MAX_FOLDER_BYTES = 5 * 1024**2


def user_turns(chat: SyntheticConversation) -> list[str]:
    return [content for role, content in chat.messages if role == "user"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_TARGET)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO_TARGET)


def test_folder_is_small_and_its_weights_are_full_precision(model: PreTrainedModel) -> None:
    assert sum(path.stat().st_size for path in DEMO_TARGET.rglob("*")) <= MAX_FOLDER_BYTES
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 0.8e6 <= model.num_parameters() <= 1.8e6
    assert torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def test_report_belongs_to_the_shipped_recipe_and_reaches_the_promised_rate() -> None:
    report = json.loads((DEMO_TARGET / REPORT_NAME).read_text())
    assert report["recipe"] == {**SHIPPED_RECIPE.__dict__}
    assert report["steps_done"] == SHIPPED_RECIPE.steps
    assert report["heldout_exact_frac"] >= 0.7
    assert set(report["heldout_exact_frac_by_kind"]) == set(TASK_KINDS)


def test_grading_again_on_fresh_heldout_prompts_confirms_the_rate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    fresh = SHIPPED_RECIPE.__class__(**{**SHIPPED_RECIPE.__dict__, "seed": 77, "heldout_conversations": 270})
    assert grade(model, tokenizer, recipe=fresh)["heldout_exact_frac"] >= 0.7


@torch.no_grad()
def test_target_answers_heldout_arithmetic_by_greedy_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    right = 0
    for chat in generate_conversations(seed=78, count=10, split="heldout", kinds=("arithmetic",)):
        messages = chat.as_messages()
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        produced = model.generate(**prompt, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(produced) == messages[-1]["content"] + "<|im_end|>"
    assert right >= 7


def test_answers_depend_on_the_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Without the prompt's digits the same weights are lost: the target reads its prompt."""
    texts = ["What is 31 + 24?", "What is 55 + 13?", "What is 47 + 40?"]
    answers = set()
    for text in texts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answers.add(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]))
    assert len(answers) == 3


def test_mask_row_exists_and_was_never_a_training_token(tokenizer: PreTrainedTokenizerBase) -> None:
    mask_id = tokenizer.convert_tokens_to_ids(MASK)
    assert 0 <= mask_id < len(tokenizer)
    assert mask_id not in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    seed = pool_seed(seed=SHIPPED_RECIPE.seed, pool=0)
    chats = generate_conversations(seed=seed, count=SHIPPED_RECIPE.pool_conversations, split="train")
    texts = [tokenizer.apply_chat_template(chat.as_messages(), tokenize=False) for chat in chats]
    assert all(mask_id not in row for row in tokenizer(texts, add_special_tokens=False)["input_ids"])


def test_no_heldout_prompt_occurs_in_the_targets_own_training_stream() -> None:
    trained = {
        prompt_hash(text)
        for pool in range(6)
        for chat in generate_conversations(
            seed=pool_seed(seed=SHIPPED_RECIPE.seed, pool=pool), count=SHIPPED_RECIPE.pool_conversations, split="train"
        )
        for text in user_turns(chat)
    }
    heldout = {
        prompt_hash(text) for chat in generate_conversations(seed=79, count=2000, split="heldout") for text in user_turns(chat)
    }
    assert len(trained) > 15_000
    assert not heldout & trained
