"""Training and grading: schedule, bit-equal repetition, and a grade that equals real greedy decoding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from dflash.data.synthetic import generate_conversations
from dflash.demo.examples import Batch, Example, collate, encode, length_batches
from dflash.demo.recipe import SHIPPED_RECIPE, TargetRecipe, model_config
from dflash.demo.training import exact_answers, learning_rate, train
from tests.support.demo_target import DEMO_TARGET

TINY = dataclasses.replace(
    SHIPPED_RECIPE, steps=30, warmup_steps=5, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16,
    intermediate_size=64, peak_lr=1e-2, checkpoint_every_steps=10,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(recipe: TargetRecipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(model_config(recipe, vocab_size=20, max_positions=64, pad_id=0, end_id=2))


def copy_example(a: int, b: int) -> Example:
    """The answer repeats the two tokens before it."""
    return Example(kind="copy", ids=(1, a, b, 3, a, b, 2), answer_of=(-1, -1, -1, -1, 0, 0, 0))


def copy_steps() -> Iterator[list[Batch]]:
    """Endless steps of one learnable pattern, 16 examples in two batches."""
    generator = torch.Generator().manual_seed(1)
    while True:
        examples = [copy_example(a, b) for a, b in torch.randint(4, 20, (16, 2), generator=generator).tolist()]
        yield [collate(part, pad_id=0, end_weight=1.0) for part in (examples[:10], examples[10:])]


def copy_grade(model: PreTrainedModel) -> tuple[int, int]:
    batches = itertools.chain.from_iterable(itertools.islice(copy_steps(), 4))
    return exact_answers(model, batches)["copy"]


def test_learning_rate_warms_up_then_falls_to_a_hundredth() -> None:
    rates = [learning_rate(TINY, step=step) for step in range(TINY.steps)]
    assert rates[0] == pytest.approx(TINY.peak_lr / 5)
    assert max(rates) == rates[4] == pytest.approx(TINY.peak_lr)
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))
    assert learning_rate(TINY, step=TINY.steps) == pytest.approx(TINY.peak_lr / 100)


def test_training_learns_counts_what_it_used_and_calls_checkpoints_between_steps() -> None:
    recipe = dataclasses.replace(TINY, steps=150)
    model = tiny_model(recipe)
    before = copy_grade(model)
    seen: list[int] = []
    used = train(model, copy_steps(), recipe=dataclasses.replace(recipe, checkpoint_every_steps=50), on_checkpoint=seen.append)
    after = copy_grade(model)
    assert used == (150 * 16, 150 * 16 * 7)
    assert seen == [50, 100]
    assert before[0] <= 2
    assert after[0] > 32
    assert after[1] == 64


def test_same_seed_and_steps_give_bit_equal_weights() -> None:
    models = [tiny_model(TINY) for _ in range(2)]
    for model in models:
        train(model, copy_steps(), recipe=TINY, on_checkpoint=lambda step: None)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def trained_on(step: list[Batch]) -> dict[str, torch.Tensor]:
    model = tiny_model(TINY)
    train(model, itertools.repeat(step), recipe=dataclasses.replace(TINY, steps=5), on_checkpoint=lambda step: None)
    return dict(model.state_dict())


def test_unsupervised_tokens_after_the_last_answer_do_not_influence_the_training() -> None:
    def step(trailing: int) -> list[Batch]:
        long = Example(kind="x", ids=(1, 7, 8, 2, 9, trailing), answer_of=(-1, -1, 0, 0, -1, -1))
        short = Example(kind="x", ids=(1, 5, 6, 2), answer_of=(-1, -1, 0, 0))
        return [collate([short, long], pad_id=0, end_weight=1.0)]

    first, second = trained_on(step(10)), trained_on(step(11))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_how_a_step_is_cut_into_batches_does_not_change_it() -> None:
    examples = [copy_example(a, a + 3) for a in range(4, 16)]
    whole = trained_on([collate(examples, pad_id=0, end_weight=2.0)])
    cut = trained_on([collate(part, pad_id=0, end_weight=2.0) for part in (examples[:2], examples[2:])])
    assert all(torch.allclose(whole[name], cut[name], atol=1e-4) for name in whole)
    uneven = trained_on([collate(examples[:2], pad_id=0, end_weight=2.0)])
    assert not all(torch.allclose(whole[name], uneven[name], atol=1e-4) for name in whole)


def greedy_is_exact(model: PreTrainedModel, example: Example, answer: int, *, end_id: int) -> bool:
    """Decode one answer token by token from its true context, without any cache."""
    positions = [index for index, of in enumerate(example.answer_of) if of == answer]
    truth = [example.ids[index] for index in positions]
    ids = list(example.ids[: positions[0]])
    produced: list[int] = []
    while len(produced) < len(truth) and (not produced or produced[-1] != end_id):
        produced.append(int(model(torch.tensor([ids + produced])).logits[0, -1].argmax()))
    return produced == truth


@torch.no_grad()
def test_grade_equals_real_greedy_decoding_with_the_shipped_target() -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(DEMO_TARGET)
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET)
    kinds = ("arithmetic", "sorting", "multi_turn", "letters")
    examples: list[Example] = []
    for kind in kinds:
        chats = generate_conversations(seed=51, count=6, split="heldout", kinds=(kind,))
        examples += [example for example in encode(tokenizer, list(chats)) if len(example.ids) < 120]
    graded = exact_answers(model, length_batches(examples, batch_tokens=1024, pad_id=tokenizer.pad_token_id, end_weight=1.0))
    for kind in {example.kind for example in examples}:
        of_kind = [example for example in examples if example.kind == kind]
        decoded = [
            greedy_is_exact(model, example, answer, end_id=tokenizer.eos_token_id)
            for example in of_kind
            for answer in range(max(example.answer_of) + 1)
        ]
        assert graded[kind] == (sum(decoded), len(decoded))


def test_grade_counts_each_answer_of_a_conversation_by_itself() -> None:
    model = tiny_model(TINY)
    with torch.no_grad():
        greedy = int(model(torch.tensor([[1, 4]])).logits[0, -1].argmax())
    right_then_wrong = Example(kind="k", ids=(1, 4, greedy, 5, 0, 0), answer_of=(-1, -1, 0, -1, -1, -1))
    wrong = dataclasses.replace(right_then_wrong, ids=(1, 4, (greedy + 1) % 20, 5, 0, 0))
    assert exact_answers(model, [collate([right_then_wrong, wrong], pad_id=0, end_weight=1.0)]) == {"k": (1, 2)}
