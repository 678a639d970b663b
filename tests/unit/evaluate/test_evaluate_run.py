from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from families import MASK_ID, make_drafter, make_target, prompts

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError, NotLosslessError
from dflash.evaluate import contest, write
from dflash.evaluate.candidates import Candidate, drafter_candidate, lookup_candidate
from dflash.evaluate.decode import DecodeLimits, PlainTrace, plain_decode
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.proposal import Committed, Proposal
from dflash.evaluate.proposers import padded_proposal
from dflash.evaluate.run import Evaluation, evaluate_candidates, evaluate_drafter, require_lossless
from dflash.evaluate.state_proof import broken_rollbacks
from dflash.evaluate.write import write_evaluation
from dflash.model.target import Target
from dflash.records import EvaluationResult, from_json

torch.set_num_threads(1)
SETTINGS = EvaluateConfig(num_prompts=5, max_new_tokens=16, bootstrap_samples=100)


def questions(count: int = 5) -> list[EvalPrompt]:
    return [
        EvalPrompt(f"q{i}", "odd" if i % 2 else "even", "toys", tuple(ids), f"{i:064d}", {"enable_thinking": False})
        for i, ids in enumerate(prompts(count))
    ]


def quiet(_label: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


class KnownAnswers:
    """Proposes the target's own answer, found by its prompt: accepts everything."""

    needs_features = False
    max_drafts = 5

    def __init__(self, target: Target) -> None:
        limits = DecodeLimits(40, frozenset())
        self._texts = [[*q.prompt_ids, *plain_decode(target, q.prompt_ids, limits=limits).tokens] for q in questions()]

    def begin(self, keys: Sequence[str]) -> None:
        """Nothing to forget."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""

    def propose(self, committed: Committed) -> Proposal:
        (tokens,) = committed.texts
        text = next(text for text in self._texts if text[: len(tokens)] == list(tokens))
        return padded_proposal([text[len(tokens) : len(tokens) + self.max_drafts]], device=torch.device("cpu"))


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def evaluations(target: Target) -> tuple[Evaluation, ...]:
    drafter = drafter_candidate(target, make_drafter(), block_size=None, mask_token_id=MASK_ID, label="untrained", step=0)
    known = Candidate("known", 7, KnownAnswers(target))
    candidates = [drafter, lookup_candidate(target, block_size=6), known]
    return evaluate_candidates(target, candidates, questions(), evaluate=SETTINGS, stop_ids=(), progress=quiet)


def test_a_drafter_that_knows_the_answer_is_worth_whole_blocks(evaluations: tuple[Evaluation, ...]) -> None:
    result = evaluations[2].result
    # 16 tokens: one from the prefill, then 6 + 6 + 3.
    assert result.acceptance_length == 5.0 and result.acceptance_length_untruncated == 6.0
    assert result.verifications == 15 and result.committed_tokens == 75
    assert result.acceptance_ci == (5.0, 5.0)
    assert result.conditional_per_position == (1.0,) * 5
    assert result.survival_per_position == pytest.approx((1.0, 1.0, 1.0, 2 / 3, 2 / 3))
    assert (result.drafter, result.step, result.block_size) == ("known", 7, 6)


def test_results_describe_the_prompt_set_and_are_lossless(evaluations: tuple[Evaluation, ...]) -> None:
    assert [e.result.drafter for e in evaluations] == ["untrained", "prompt_lookup", "known"]
    for evaluation in evaluations:
        result = evaluation.result
        assert result.lossless and result.differing_prompts == 0 and evaluation.state.holds
        require_lossless(result)
        assert result.prompts == 5 and result.dataset == "toys" and result.template_flags == {"enable_thinking": False}
        assert set(result.slices["kind"]) == {"even", "odd"}
        assert set(result.slices) == {"kind", "dataset", "turn", "context_tokens"}, "no prompt has a language or a domain"
        own = result.slices["dataset"]["toys"]
        assert own["acceptance_length"] == result.acceptance_length and own["speedup"] == pytest.approx(result.speedup)
        assert result.divergence_frac == own["differing_prompts"] == 0 and result.prompt_sets == ()
        assert result.verifications == len(evaluation.table) == sum(result.acceptance_histogram)
        assert sum(part["verifications"] for part in result.slices["context_tokens"].values()) == result.verifications
        assert result.speedup == pytest.approx(result.plain_s_per_token / result.speculative_s_per_token)
        answers = [contest.speculative[evaluation.position].tokens for contest in evaluation.contests]
        assert result.committed_tokens == sum(len(answer) - 1 for answer in answers)


def test_progress_counts_prompts(target: Target) -> None:
    calls: list[tuple[str, int, int]] = []
    candidate = lookup_candidate(target, block_size=4)
    evaluate_drafter(target, candidate, questions(2), evaluate=SETTINGS, stop_ids=(), progress=lambda *call: calls.append(call))
    assert calls == [("decoding (prompt_lookup)", 1, 2), ("decoding (prompt_lookup)", 2, 2)]


def test_the_order_of_contestants_rotates_from_prompt_to_prompt(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Loud:
        needs_features = False
        max_drafts = 2

        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, keys: Sequence[str]) -> None:
            order.append(self.name)

        def select_rows(self, rows: Sequence[int]) -> None:
            """Nothing to drop."""

        def propose(self, committed: Committed) -> Proposal:
            return padded_proposal([[]], device=torch.device("cpu"))

    plain = contest.plain_decode_batch

    def loud_plain(*args: Any, **kwargs: Any) -> Any:
        order.append("plain")
        return plain(*args, **kwargs)

    monkeypatch.setattr(contest, "plain_decode_batch", loud_plain)
    candidates = [Candidate("a", None, Loud("a")), Candidate("b", None, Loud("b"))]
    evaluate_candidates(target, candidates, questions(3), evaluate=SETTINGS, stop_ids=(), progress=quiet)
    del order[:3]  # the warm-up
    assert order == ["a", "b", "plain", "b", "plain", "a", "plain", "a", "b"]


@pytest.mark.parametrize("control", ["no_crop", "crop_off_by_one"])
def test_a_target_that_cannot_be_rolled_back_is_never_called_lossless(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3")
    broken = broken_rollbacks(target, ragged=False)[control]
    true_keep = target.keep
    monkeypatch.setattr(target, "keep", lambda cache, kept: broken_with(true_keep, broken, target, cache, kept))
    candidate = lookup_candidate(target, block_size=6)
    result = evaluate_drafter(target, candidate, questions(), evaluate=SETTINGS, stop_ids=(), progress=quiet).result
    assert not result.lossless
    assert any(warning.startswith("not lossless") for warning in result.warnings)
    with pytest.raises(NotLosslessError, match="not lossless"):
        require_lossless(result)


def broken_with(true_keep: Any, broken: Any, target: Target, cache: Any, kept: Sequence[int]) -> None:
    """Run a broken rollback whose own call of `target.keep` reaches the true one."""
    patched, target.keep = target.keep, true_keep  # type: ignore[method-assign]
    try:
        broken(cache, kept)
    finally:
        target.keep = patched  # type: ignore[method-assign]


def test_a_near_tie_is_counted_reported_and_does_not_spoil_the_result(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain decoding takes another token at one place; the speculative answer is the target's own choice throughout."""
    plain = contest.plain_decode_batch
    odd_one = questions()[3].prompt_ids

    def otherwise(own: Target, asked: Sequence[Sequence[int]], *, limits: DecodeLimits, **others: Any) -> list[PlainTrace]:
        (trace,) = plain(own, asked, limits=limits, **others)
        if tuple(asked[0]) != odd_one or limits.max_new_tokens < 16:
            return [trace]
        return [replace(trace, tokens=(*trace.tokens[:10], (trace.tokens[10] + 1) % 61, *trace.tokens[11:]))]

    monkeypatch.setattr(contest, "plain_decode_batch", otherwise)
    candidate = lookup_candidate(target, block_size=6)
    evaluation = evaluate_drafter(target, candidate, questions(), evaluate=SETTINGS, stop_ids=(), progress=quiet)
    assert evaluation.result.differing_prompts == evaluation.result.near_tie_prompts == 1
    assert evaluation.result.lossless
    assert set(evaluation.near_ties) == {3} and evaluation.near_ties[3].position == 10
    write_evaluation(evaluation, tmp_path)
    (told,) = json.loads((tmp_path / "evidence.json").read_text())["differing_prompts"]
    assert told["prompt"] == "q3" and told["first_differing_token"] == 10 and told["excused"]
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["equals_plain"] for row in rows] == [True, True, True, False, True]


def test_a_target_in_bfloat16_is_measured_and_its_differences_are_counted(target: Target) -> None:
    half = make_target("qwen3")
    half.model.to(torch.bfloat16)
    drafter = drafter_candidate(half, make_drafter(), block_size=4, mask_token_id=MASK_ID, label="untrained", step=0)
    evaluation = evaluate_drafter(half, drafter, questions(), evaluate=SETTINGS, stop_ids=(), progress=quiet)
    assert not evaluation.state.judged
    assert 0 <= evaluation.result.near_tie_prompts <= evaluation.result.differing_prompts <= 5
    assert evaluation.result.block_size == 4
    assert max(evaluation.table.drafted) == 3


def test_an_answer_that_ends_at_once_has_nothing_to_measure(target: Target) -> None:
    candidate = lookup_candidate(target, block_size=4)
    with pytest.raises(EvaluationError, match="nothing was verified"):
        evaluate_drafter(target, candidate, questions(2), evaluate=SETTINGS, stop_ids=range(61), progress=quiet)


def test_prompts_that_do_not_fit_are_refused_before_anything_is_decoded(target: Target) -> None:
    candidate = lookup_candidate(target, block_size=4)
    long = EvalPrompt("long", "k", "toys", tuple([1] * 500), "0" * 64, {})
    with pytest.raises(EvaluationError, match=r"prompt 'long' has 500 tokens; .* needs 520 positions, the target has 512"):
        evaluate_drafter(target, candidate, [*questions(2), long], evaluate=SETTINGS, stop_ids=(), progress=quiet)
    with pytest.raises(EvaluationError, match="no evaluation prompts"):
        evaluate_drafter(target, candidate, [], evaluate=SETTINGS, stop_ids=(), progress=quiet)


def test_prompts_that_repeat_others_are_told(target: Target, evaluations: tuple[Evaluation, ...]) -> None:
    assert not any("word for word" in warning for warning in evaluations[0].result.warnings)
    twice = [*questions(2), replace(questions(2)[0], id="again")]
    candidate = lookup_candidate(target, block_size=4)
    result = evaluate_drafter(target, candidate, twice, evaluate=SETTINGS, stop_ids=(), progress=quiet).result
    assert "1 of 3 prompts repeat another one word for word" in result.warnings[-1]
    evens = result.slices["kind"]["even"]
    assert (evens["prompts"], evens["acceptance_ci"]) == (2, [None, None]), "twice the same prompt is one"


def test_an_evaluation_is_written_as_plain_files(evaluations: tuple[Evaluation, ...], tmp_path: Path) -> None:
    evaluation = evaluations[1]
    files = write_evaluation(evaluation, tmp_path / "eval" / "lookup")
    assert all(file.is_file() for file in files)
    folder = tmp_path / "eval" / "lookup"
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in files)
    result = from_json(EvaluationResult, (folder / "result.json").read_bytes(), origin="result.json")
    assert result.acceptance_length == evaluation.result.acceptance_length
    assert result.acceptance_histogram == evaluation.result.acceptance_histogram
    table = pq.read_table(folder / "verifications.parquet")
    assert table.schema.metadata[b"dflash_schema_version"] == b"2"
    assert set(table["dataset"].to_pylist()) == {"toys"} and set(table["turn"].to_pylist()) == {1}
    assert table["language"].null_count == len(table) and set(table["kind"].to_pylist()) == {"even", "odd"}
    for name in ("prompt", "context_tokens", "drafted", "accepted", "counted"):
        assert (table[name].to_numpy() == getattr(evaluation.table, name)).all()
    counted = table["counted"].to_numpy()
    assert counted.sum() / len(counted) == pytest.approx(result.acceptance_length)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["drawn_as"] for row in rows] == ["q0", "q1", "q2", "q3", "q4"]
    assert all(row["equals_plain"] and row["answer_tokens"] == len(row["answer_ids"]) == 16 for row in rows)
    proof = json.loads((folder / "evidence.json").read_text())
    assert proof["state_test"]["holds"] and proof["state_test"]["controls"]["no_crop"] is None
    assert proof["timing"]["speedup"] == pytest.approx(result.speedup)
    pictures = ("acceptance_per_position.png", "accepted_histogram.png", "acceptance_by_context.png", "tokens_per_s.png")
    assert (folder / "report.html").read_text().count("data:image/png") == len(pictures) + 1
    for name in (*pictures, "acceptance_by_slice.png"):
        picture = (folder / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_a_failure_half_way_leaves_no_folder_that_looks_complete(
    evaluations: tuple[Evaluation, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_evaluation(evaluations[0], tmp_path)

    def full_disk(_path: Path, _data: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(write, "atomic_write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_evaluation(evaluations[0], tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_the_same_seed_gives_the_same_figures(target: Target, evaluations: tuple[Evaluation, ...]) -> None:
    again = evaluate_drafter(
        target, lookup_candidate(target, block_size=6), questions(), evaluate=SETTINGS, stop_ids=(), progress=quiet
    )
    first = evaluations[1]
    assert again.result.acceptance_ci == first.result.acceptance_ci
    assert np.array_equal(again.table.accepted, first.table.accepted)
