"""Acceptance probes: the evaluation's own figures, in batches, and comparisons in pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from families import MASK_ID, make_drafter, make_target, prompts

from dflash.config import EvaluateConfig, ProbeConfig, parse_config
from dflash.errors import EvaluationError
from dflash.evaluate.candidates import Candidate, drafter_candidate
from dflash.evaluate.probe import paired_gain, probe_drafter, probe_identity, shown_better
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.run import evaluate_drafter
from dflash.model.target import Target
from dflash.records import ProbeFigures

torch.set_num_threads(1)
EVALUATE = EvaluateConfig(num_prompts=5, max_new_tokens=16, bootstrap_samples=200)
PROBE = ProbeConfig(every_steps=1, max_new_tokens=16, batch_size=2)


def questions(count: int = 5) -> list[EvalPrompt]:
    return [EvalPrompt(f"q{i}", "kind", "toys", tuple(ids), f"{i:064d}", {}) for i, ids in enumerate(prompts(count))]


def drafter_of(target: Target) -> Candidate:
    return drafter_candidate(target, make_drafter(), block_size=None, mask_token_id=MASK_ID, label="probe", step=1)


def measure(target: Target, *, batch_size: int = 2, stop_ids: tuple[int, ...] = (), tokens: int = 16) -> ProbeFigures:
    probe = PROBE.model_copy(update={"batch_size": batch_size, "max_new_tokens": tokens})
    proposer = drafter_of(target).proposer
    return probe_drafter(target, proposer, questions(), probe=probe, evaluate=EVALUATE, stop_ids=stop_ids)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


def test_the_figures_are_those_of_the_evaluation(target: Target) -> None:
    found = measure(target)
    result = evaluate_drafter(
        target, drafter_of(target), questions(), evaluate=EVALUATE, stop_ids=(), progress=lambda *_: None
    ).result  # fmt: skip
    assert found.acceptance_length == pytest.approx(result.acceptance_length)
    assert found.survival_per_position == pytest.approx(result.survival_per_position)
    assert sum(found.verifications) == result.verifications
    assert sum(found.counted) == result.committed_tokens
    assert found.acceptance_ci[0] <= found.acceptance_length <= found.acceptance_ci[1]
    assert len(found.counted) == len(found.verifications) == 5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_hybrid"])
def test_batches_change_nothing(family: str) -> None:
    target = make_target(family)
    alone, together = measure(target, batch_size=1, tokens=6), measure(target, batch_size=5, tokens=6)
    assert (alone.counted, alone.verifications) == (together.counted, together.verifications)


def test_a_probe_of_one_prompt_has_a_length_and_no_interval(target: Target) -> None:
    found = probe_drafter(
        target, drafter_of(target).proposer, questions()[:1], probe=PROBE, evaluate=EVALUATE, stop_ids=()
    )  # fmt: skip
    assert found.acceptance_length >= 1 and found.acceptance_ci is None


def test_answers_of_one_token_are_an_error_and_not_a_length(target: Target) -> None:
    with pytest.raises(EvaluationError, match="nothing was verified"):
        measure(target, tokens=1)


def figures(lengths: np.ndarray) -> ProbeFigures:
    passes = np.full(lengths.size, 20)
    counted = np.round(lengths * passes).astype(int)
    return ProbeFigures(float(counted.sum() / passes.sum()), (1.0, 1.0), tuple(counted.tolist()), tuple(passes.tolist()), (), 0.0)


def test_a_prompt_that_is_too_long_for_the_target_is_named(target: Target) -> None:
    asked = [*questions(1), EvalPrompt("long", "kind", "toys", (1,) * 500, "0" * 64, {})]
    with pytest.raises(EvaluationError, match=r"'long' has 500 tokens; with probe.max_new_tokens 16 .* the target has 512"):
        probe_drafter(target, drafter_of(target).proposer, asked, probe=PROBE, evaluate=EVALUATE, stop_ids=())


def test_pairs_see_what_two_intervals_cannot() -> None:
    generator = np.random.default_rng(0)
    base = 1.5 + 2 * generator.random(24)  # prompts differ far more than the two drafters do
    old, new = figures(base), figures(base + 0.1 + 0.05 * generator.random(24))
    low, high = paired_gain(new, old, evaluate=EVALUATE)
    assert 0 < low < 0.125 < high
    back = paired_gain(old, new, evaluate=EVALUATE)
    assert back == pytest.approx((-high, -low))
    assert paired_gain(old, old, evaluate=EVALUATE) == (0.0, 0.0)
    with pytest.raises(EvaluationError, match="pairs"):
        paired_gain(new, figures(base[:5]), evaluate=EVALUATE)


def test_one_prompt_shows_nobody_to_be_better() -> None:
    old, new = figures(np.array([1.5, 1.5])), figures(np.array([3.0, 2.9]))
    assert shown_better(new, old, evaluate=EVALUATE) and not shown_better(old, new, evaluate=EVALUATE)
    assert not shown_better(figures(np.array([3.0])), figures(np.array([1.5])), evaluate=EVALUATE)
    # A prompt whose answer ended with its first token says nothing either.
    old, new = (replace(each, counted=(each.counted[0], 0), verifications=(20, 0)) for each in (old, new))
    assert paired_gain(new, old, evaluate=EVALUATE) is None and not shown_better(new, old, evaluate=EVALUATE)


def test_chance_moves_the_best_as_rarely_as_the_level_says() -> None:
    generator = np.random.default_rng(1)
    moved = 0
    for _ in range(200):
        base = 1.5 + generator.random(24)
        noisy = [figures(base + 0.3 * generator.standard_normal(24)) for _ in range(2)]
        moved += paired_gain(noisy[0], noisy[1], evaluate=EVALUATE)[0] > 0
    assert moved <= 14, "about 2.5 % of 200 are expected"


def test_equal_identities_mean_comparable_probes() -> None:
    text = "run: {root: x}\ntarget: {mask_token: x}\ndata: {num_conversations: 3}\n"
    config = parse_config(text, origin="test")
    same = parse_config(text, origin="test", overrides=("probe.every_steps=7", "probe.batch_size=3", "train.lr=1"))
    identity = probe_identity(config, questions())
    assert probe_identity(same, questions()) == identity
    assert probe_identity(config, questions(4)) != identity
    for override in ("probe.max_new_tokens=9", "evaluate.block_size=3", "target.revision=abc"):
        assert probe_identity(parse_config(text, origin="test", overrides=(override,)), questions()) != identity, override
