"""Baselines: everyone on the same prompts, compared in pairs; drafters with other taps on one target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import MASK_ID, VOCAB, WIDTH, make_drafter, make_target, prompts

from dflash.config import DrafterConfig, EvaluateConfig
from dflash.evaluate.bootstrap import percentile_interval, resample_counts, widened
from dflash.evaluate.candidates import Candidate, drafter_candidate, lookup_candidate
from dflash.evaluate.decode import DecodeLimits, speculative_decode_batch
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.proposers import DrafterProposer, OracleProposer
from dflash.evaluate.rivals import PLAIN, rival_lines, rival_table
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.evaluate.tap_choice import reading_own_taps, target_tapping
from dflash.model.drafter import Drafter
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY
from dflash.model.target import Target
from dflash.records import RivalTable, from_json, to_json

torch.set_num_threads(1)
SETTINGS = EvaluateConfig(max_new_tokens=20, bootstrap_samples=200, batch_size=2)
QUESTIONS = [EvalPrompt(f"q{i}", "toy", "toys", tuple(ids), f"{i:064d}", {}) for i, ids in enumerate(prompts(6))]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def evaluations(target: Target) -> tuple[Evaluation, ...]:
    keys, texts = [each.id for each in QUESTIONS], [each.prompt_ids for each in QUESTIONS]
    answers = generate_batch(target, texts, keys=keys, max_new_tokens=30, temperature=0.0, seed=0, stop_ids=())
    oracle = OracleProposer(
        target, dict(zip(keys, answers, strict=True)), {key: len(text) for key, text in zip(keys, texts, strict=True)},
        max_drafts=5, right_frac=0.8, seed=1,
    )  # fmt: skip
    untrained = drafter_candidate(target, make_drafter(), block_size=None, mask_token_id=MASK_ID, label="untrained", step=0)
    candidates = [Candidate("trained", 9, oracle), untrained, lookup_candidate(target, block_size=6)]
    return evaluate_candidates(target, candidates, QUESTIONS, evaluate=SETTINGS, stop_ids=(), progress=lambda *_: None)


@pytest.fixture(scope="module")
def table(evaluations: tuple[Evaluation, ...]) -> RivalTable:
    return rival_table(evaluations[0], evaluations[1:], evaluate=SETTINGS, machine="a machine")


def test_the_table_begins_with_plain_decoding_and_ends_with_the_judged_drafter(table: RivalTable) -> None:
    assert [row.label for row in table.rows] == [PLAIN, "untrained", "prompt_lookup", "trained"]
    plain, *_, trained = table.rows
    assert (plain.acceptance_length, plain.speedup, plain.lossless, plain.block_size) == (1.0, 1.0, None, 1)
    assert trained.gain is trained.gain_ci is trained.faster is None and trained.lossless is True and trained.step == 9
    assert (table.dataset, table.temperature, table.batch_size) == ("toys", 0.0, 2)
    assert all(row.prompts == 6 for row in table.rows)


def test_gains_are_differences_of_the_same_prompts(evaluations: tuple[Evaluation, ...], table: RivalTable) -> None:
    """Brute force: each resample's prompts pooled for both, then subtracted."""
    counts = resample_counts(6, samples=200, seed=SETTINGS.seed)

    def tau(evaluation: Evaluation, chosen: list[int]) -> float:
        traces = [evaluation.contests[prompt].speculative[evaluation.position] for prompt in chosen]
        return sum(step.counted for trace in traces for step in trace.verifications) / sum(len(t.verifications) for t in traces)

    draws = [[prompt for prompt, times in enumerate(row.tolist()) for _ in range(times)] for row in counts]
    judged = evaluations[0]
    for other, row in zip(evaluations[1:], table.rows[1:-1], strict=True):
        assert row.gain == pytest.approx(tau(judged, [*range(6)]) - tau(other, [*range(6)]))
        differences = [tau(judged, draw) - tau(other, draw) for draw in draws]
        wanted = percentile_interval(differences, confidence=widened(0.95, prompts=6))
        assert row.gain_ci == pytest.approx(wanted)


def test_speeds_are_compared_in_pairs_too(evaluations: tuple[Evaluation, ...], table: RivalTable) -> None:
    trained = table.rows[-1]
    for row in table.rows[:-1]:
        assert row.faster == pytest.approx(trained.tokens_per_s / row.tokens_per_s)
        assert row.faster_ci is not None and row.faster_ci[0] <= row.faster_ci[1]
        assert row.speedup == pytest.approx(row.tokens_per_s / table.rows[0].tokens_per_s)
    assert trained.speedup == pytest.approx(evaluations[0].result.speedup)
    assert trained.acceptance_ci == evaluations[0].result.acceptance_ci


def test_the_lines_fit_a_terminal_and_hide_no_fault(table: RivalTable) -> None:
    lines = rival_lines(table)
    assert len(lines) == 5 and all(len(line) <= 80 for line in lines)
    assert f"{table.rows[1].gain:.2f} [" in lines[2]
    broken = replace(table, rows=(*table.rows[:-1], replace(table.rows[-1], label="a\x1bb", lossless=False)))
    assert "a?b (NOT LOSSLESS)" in rival_lines(broken)[-1]
    assert from_json(RivalTable, to_json(table), origin="baselines.json") == table


def other_drafter() -> Drafter:
    config = DrafterConfig(
        num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=4, target_layer_ids=(1, 2), rope_theta=10_000.0, max_position_embeddings=512,
    )  # fmt: skip
    drafter = Drafter(config, target_hidden_size=WIDTH)
    drafter.init_weights(5)
    return drafter.eval()


def test_a_drafter_reads_its_own_taps_of_a_target_that_has_more(target: Target) -> None:
    """On the wide target each drafts what it drafts on a target made for it alone, in rows that prompts join."""
    wide = target_tapping(target, (1, 2))
    assert wide.target_layer_ids == (0, 1, 2) and target.target_layer_ids == (0, 2)
    assert target_tapping(wide, (0, 2)) is wide
    own = Target(target.model, info=target.info, target_layer_ids=(1, 2))
    limits = DecodeLimits(16, frozenset())
    for alone, drafter in ((target, make_drafter(block_size=4)), (own, other_drafter())):
        found = []
        for on in (alone, wide):
            proposer = DrafterProposer(on, drafter, block_size=4, mask_token_id=MASK_ID, drawing=GREEDY)
            reading = reading_own_taps(proposer, own=drafter.config.target_layer_ids, target=on)
            assert (reading is proposer) == (on is alone)
            traces = speculative_decode_batch(
                on, reading, [each.prompt_ids for each in QUESTIONS], keys=[each.id for each in QUESTIONS], limits=limits,
                sampling=GREEDY, rollback=on.keep, rows=2,
            )  # fmt: skip
            found.append([(trace.tokens, trace.verifications) for trace in traces])
        assert found[0] == found[1]
        assert all(0 <= token < VOCAB for tokens, _ in found[0] for token in tokens)
