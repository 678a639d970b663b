"""A sweep's cells are evaluations, its best one is the fastest, and its pictures and tables say what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import MASK_ID, make_drafter, make_target, prompts

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError
from dflash.evaluate.candidates import Candidate, drafter_candidate
from dflash.evaluate.contest import Contest
from dflash.evaluate.decode import PlainTrace, SpeculativeTrace
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.run import evaluate_drafter
from dflash.evaluate.sweep import best_cell, run_sweep, swept_block_sizes
from dflash.evaluate.sweep_plot import draw_sweep
from dflash.evaluate.sweep_text import sweep_table
from dflash.model.target import Target
from dflash.records import SweepCell, SweepResult, from_json, to_json

torch.set_num_threads(1)
SIZES = (3, 6)
SETTINGS = EvaluateConfig.model_validate(
    {
        "max_new_tokens": 40,
        "bootstrap_samples": 100,
        "sweep": {
            "block_sizes": SIZES,
            "temperatures": (0.0, 0.8),
            "batch_sizes": (1, 3),
            "num_prompts": 3,
            "max_new_tokens": 8,
        },
    }
)


def questions() -> list[EvalPrompt]:
    return [EvalPrompt(f"q{i}", "toy", "toys", tuple(ids), f"{i:064d}", {}) for i, ids in enumerate(prompts(5))]


def candidate(target: Target, block_size: int) -> Candidate:
    label = f"block size {block_size}"
    return drafter_candidate(target, make_drafter(), block_size=block_size, mask_token_id=MASK_ID, label=label, step=3)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def told() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def cells(target: Target, told: list[tuple[str, int, int]]) -> tuple[SweepCell, ...]:
    candidates = [candidate(target, size) for size in SIZES]
    return run_sweep(
        target, candidates, questions(), evaluate=SETTINGS, stop_ids=(), progress=lambda *call: told.append(call)
    )  # fmt: skip


@pytest.fixture
def result(cells: tuple[SweepCell, ...]) -> SweepResult:
    return SweepResult("toy", 3, "toys", 3, 8, 6, 0.95, "a machine", cells, best_cell(cells))


def test_every_setting_has_its_cell_in_the_order_of_the_configuration(cells: tuple[SweepCell, ...]) -> None:
    found = [(cell.temperature, cell.batch_size, cell.block_size) for cell in cells]
    assert found == [(t, b, k) for t in (0.0, 0.8) for b in (1, 3) for k in (1, *SIZES)]


def test_a_cell_is_the_evaluation_with_its_settings(target: Target, cells: tuple[SweepCell, ...]) -> None:
    for cell in cells:
        if cell.block_size != 6 or (cell.batch_size == 1 and cell.temperature):
            continue
        alone = SETTINGS.model_copy(
            update={"temperature": cell.temperature, "batch_size": cell.batch_size, "max_new_tokens": 8, "num_prompts": 4}
        )
        single = evaluate_drafter(
            target, candidate(target, 6), questions()[:3], evaluate=alone, stop_ids=(), progress=lambda *_: None
        ).result  # fmt: skip
        assert (cell.acceptance_length, cell.acceptance_ci) == (single.acceptance_length, single.acceptance_ci)
        assert (cell.lossless, cell.differing_prompts) == (single.lossless, single.differing_prompts)
        assert (single.block_size, single.temperature, single.batch_size) == (6, cell.temperature, cell.batch_size)


def test_every_cell_is_lossless(cells: tuple[SweepCell, ...]) -> None:
    assert all(cell.lossless and cell.differing_prompts == 0 for cell in cells)


def test_acceptance_hangs_neither_on_the_batch_nor_on_drafts_behind_it(cells: tuple[SweepCell, ...]) -> None:
    taus = {(cell.temperature, cell.block_size, cell.batch_size): cell.acceptance_length for cell in cells}
    for temperature in (0.0, 0.8):
        for size in (1, *SIZES):
            assert taus[temperature, size, 1] == taus[temperature, size, 3]
        assert taus[temperature, 1, 1] == 1.0 <= taus[temperature, 3, 1] <= taus[temperature, 6, 1]


def test_plain_decoding_is_the_measure_of_its_own_group(cells: tuple[SweepCell, ...]) -> None:
    for cell in cells:
        group = [each for each in cells if (each.temperature, each.batch_size) == (cell.temperature, cell.batch_size)]
        assert cell.speedup == pytest.approx(cell.tokens_per_s / group[0].tokens_per_s)
        if cell is max(group, key=lambda each: each.tokens_per_s):
            assert cell.vs_best_ci == (1.0, 1.0)
    assert all(cell.speedup_ci == (1.0, 1.0) for cell in cells if cell.block_size == 1)


def test_the_best_setting_is_the_tables_maximum_among_lossless_cells(cells: tuple[SweepCell, ...]) -> None:
    best = best_cell(cells)
    assert best.tokens_per_s == max(cell.tokens_per_s for cell in cells)
    wrong = [replace(cell, lossless=cell.block_size == 1 or cell is not best) for cell in cells]
    second = best_cell(wrong)
    assert second.lossless and (second.block_size == 1 or second != best)
    assert second.tokens_per_s == max(cell.tokens_per_s for cell in wrong if cell.lossless)


def test_progress_names_the_settings(cells: tuple[SweepCell, ...], told: list[tuple[str, int, int]]) -> None:
    assert len(cells) == 12
    assert ("sweep, temperature 0.8, batch size 3", 3, 3) in told


def test_block_sizes_are_the_trained_ones_if_none_are_named() -> None:
    assert swept_block_sizes(EvaluateConfig(), trained=5) == (2, 3, 4, 5)
    assert swept_block_sizes(SETTINGS, trained=6) == SIZES
    with pytest.raises(EvaluationError, match=r"block_sizes names 6, the drafter was trained with 5"):
        swept_block_sizes(SETTINGS, trained=5)


def test_a_batch_that_is_never_full_is_refused(target: Target) -> None:
    with pytest.raises(EvaluationError, match="2 prompts never fill a batch of 3"):
        run_sweep(target, [candidate(target, 2)], questions()[:2], evaluate=SETTINGS, stop_ids=(), progress=lambda *_: None)
    for bad in ({"num_prompts": 4}, {"batch_sizes": (1, 1)}, {"temperatures": ()}, {"block_sizes": (1,)}):
        with pytest.raises(ValueError, match="sweep"):
            EvaluateConfig.model_validate({"sweep": bad})


def test_the_table_marks_the_fastest_and_says_how_to_use_it(result: SweepResult) -> None:
    text = sweep_table(result)
    for temperature in (0.0, 0.8):
        for batch_size in (1, 3):
            fastest = result.best_at(temperature=temperature, batch_size=batch_size)
            assert fastest is not None
            assert f"{fastest.tokens_per_s:.0f} ({fastest.speedup:.2f}x)*" in text
    assert result.best_at(temperature=0.5, batch_size=1) is None
    assert f"{result.best.tokens_per_s:.0f} tokens/s [" in text
    drafting = replace(result.best, block_size=6, batch_size=3)
    assert "evaluate.block_size=6 evaluate.batch_size=3" in sweep_table(replace(result, best=drafting))
    assert "no drafting is faster" in sweep_table(replace(result, best=replace(result.best, block_size=1)))
    spoiled = replace(result, cells=tuple(replace(cell, lossless=cell.block_size == 1) for cell in result.cells))
    assert sweep_table(spoiled).count("x)!") == 8


def test_names_cannot_move_the_cursor(result: SweepResult) -> None:
    text = sweep_table(replace(result, drafter="a\x1b[2J", dataset="b\nc", machine="d\re"))
    assert not any(sign in text for sign in ("\x1b", "\r")) and len(text.splitlines()) == len(sweep_table(result).splitlines())


def test_a_sweep_survives_its_file_and_has_a_picture(result: SweepResult) -> None:
    assert from_json(SweepResult, to_json(result, indent=2), origin="sweep.json") == result
    assert draw_sweep(result).startswith(b"\x89PNG")


def contest(plain_s: float, *fast_s: float) -> Contest:
    tokens = tuple(range(11))
    traces = tuple(SpeculativeTrace(tokens, (), 0.0, seconds, target_s=0.0, drafter_s=0.0) for seconds in fast_s)
    return Contest(questions()[0], PlainTrace(tokens, 0.0, plain_s), traces)


def paired(*contests: Contest, **changes: Any) -> Any:
    from dflash.evaluate.paired import Resamples

    over = Resamples(range(len(contests)), evaluate=SETTINGS.model_copy(update=changes))
    return over, [over.speed([each.speculative[place] for each in contests]) for place in range(2)]


def test_a_ratio_is_formed_inside_each_resample() -> None:
    """Two contestants whose times are proportional prompt by prompt: their ratio is certain, their speeds are not."""
    over, (one, other) = paired(*(contest(1.0, seconds, 2 * seconds) for seconds in (1.0, 3.0, 9.0, 27.0)))
    assert one.pooled == pytest.approx(40 / 40)
    low, high = over.interval(one)
    assert high > 2 * low
    assert over.interval(one / other) == pytest.approx((2.0, 2.0))


def test_one_prompt_that_was_decoded_has_no_interval_beside_one_that_ended_at_once() -> None:
    silent = SpeculativeTrace((1,), (), 0.0, 0.0, target_s=0.0, drafter_s=0.0)
    ended = Contest(questions()[0], PlainTrace((1,), 0.0, 0.0), (silent, silent))
    over, (one, other) = paired(contest(1.0, 1.0, 2.0), ended)
    assert one.pooled == pytest.approx(10.0) and over.interval(one) is over.interval(one / other) is None


def test_one_prompt_has_no_interval() -> None:
    over, (one, _) = paired(contest(1.0, 1.0, 2.0))
    assert one.pooled == pytest.approx(10.0) and over.interval(one) is None
