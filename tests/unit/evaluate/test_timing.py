from __future__ import annotations

import numpy as np
import pytest

from dflash.evaluate.bootstrap import resample_counts
from dflash.evaluate.decode import PlainTrace, SpeculativeTrace
from dflash.evaluate.timing import Timing, measure_timing


def timing(plain: list[tuple[int, float]], fast: list[tuple[int, float]]) -> Timing | None:
    return measure_timing(
        [PlainTrace(tuple(range(tokens)), 9.0, seconds) for tokens, seconds in plain],
        [
            SpeculativeTrace(tuple(range(tokens)), (), 9.0, seconds, target_s=seconds / 2, drafter_s=seconds / 8)
            for tokens, seconds in fast
        ],
        counts=resample_counts(len(plain), samples=100, seed=0),
        confidence=0.95,
    )


def test_the_speed_up_is_pooled_over_tokens_behind_the_first_and_leaves_the_prefill_out() -> None:
    measured = timing([(11, 1.0), (31, 3.0)], [(11, 0.25), (31, 1.75)])
    assert measured is not None
    assert measured.plain_s_per_token == pytest.approx(4.0 / 40)
    assert measured.speculative_s_per_token == pytest.approx(2.0 / 40)
    assert measured.speedup == pytest.approx(2.0)
    assert measured.speedup_median == pytest.approx(np.median([4.0, 3.0 / 1.75]))
    assert measured.speedup_ci[0] <= 2.0 <= measured.speedup_ci[1]
    assert (measured.target_frac, measured.drafter_frac) == pytest.approx((0.5, 0.125))


def test_one_prompt_has_a_speed_up_and_no_interval() -> None:
    for fast in ([(11, 0.5)], [(11, 0.5), (1, 7.0)]):
        measured = timing([(11, 1.0), (1, 5.0)][: len(fast)], fast)
        assert measured is not None and measured.speedup == pytest.approx(2.0) and measured.speedup_ci is None


def test_an_answer_of_one_token_weighs_nothing() -> None:
    with_it = timing([(11, 1.0), (1, 5.0)], [(11, 0.5), (1, 7.0)])
    assert with_it is not None and with_it.speedup == pytest.approx(2.0)
    assert timing([(1, 5.0)], [(1, 7.0)]) is None
