"""Speed-up over plain decoding: the same prompts at the same batch size, in alternation, prefill excluded.

In a batch a row's seconds are its share of the batch's (`stopwatch.SharedTime`), so sums over rows are the batch's own time and a
pooled speed-up is a ratio of throughputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.evaluate.bootstrap import FloatArray, IntArray, drawn_apart, interval_over, resampled_ratios
from dflash.evaluate.decode import PlainTrace, SpeculativeTrace


@dataclass(frozen=True, slots=True)
class Timing:
    """Decoding times in seconds a token, over all tokens but each answer's first, which the prefill makes.

    Attributes:
        speedup: pooled plain time a token over pooled speculative time a token.
        speedup_ci: bootstrap interval over prompts; None where one prompt tells nothing.
        speedup_median: median over prompts of their own speed-ups.
        target_frac: share of the speculative time in the target's forwards.
        drafter_frac: in the proposer; the rest is the loop's own.
    """

    plain_s_per_token: float
    speculative_s_per_token: float
    speedup: float
    speedup_ci: tuple[float, float] | None
    speedup_median: float
    target_frac: float
    drafter_frac: float

    @property
    def other_frac(self) -> float:
        """Share of the speculative time outside target and drafter: judging, rollback, bookkeeping."""
        return 1.0 - self.target_frac - self.drafter_frac

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens a second of plain decoding, over all rows of a batch."""
        return 1.0 / self.plain_s_per_token

    @property
    def speculative_tokens_per_s(self) -> float:
        """Likewise of speculative decoding."""
        return 1.0 / self.speculative_s_per_token


def measure_timing(
    plain: Sequence[PlainTrace], speculative: Sequence[SpeculativeTrace], *, counts: IntArray, confidence: float
) -> Timing | None:
    """Compare decoding times of the same prompts.

    Args:
        plain: traces of prompt 0..P-1.
        speculative: of the same prompts.
        counts: bootstrap resamples `[R, P]`.
        confidence: level of the interval.

    Returns:
        The times, or None if no answer has a second token.
    """
    plain_s, plain_tokens = _sums(plain)
    fast_s, fast_tokens = _sums(speculative)
    if plain_tokens.sum() == 0 or fast_tokens.sum() == 0:
        return None
    timed = (plain_tokens > 0) & (fast_tokens > 0)
    slow, fast = plain_s.sum() / plain_tokens.sum(), fast_s.sum() / fast_tokens.sum()
    resampled = resampled_ratios(plain_s, plain_tokens, counts=counts) / resampled_ratios(fast_s, fast_tokens, counts=counts)
    own = (plain_s[timed] / plain_tokens[timed]) / (fast_s[timed] / fast_tokens[timed])
    return Timing(
        plain_s_per_token=float(slow),
        speculative_s_per_token=float(fast),
        speedup=float(slow / fast),
        speedup_ci=interval_over(resampled, prompts=drawn_apart(counts, timed), confidence=confidence),
        speedup_median=float(np.median(own)) if own.size else float(slow / fast),
        target_frac=sum(trace.target_s for trace in speculative) / float(fast_s.sum()),
        drafter_frac=sum(trace.drafter_s for trace in speculative) / float(fast_s.sum()),
    )


def _sums(traces: Sequence[PlainTrace] | Sequence[SpeculativeTrace]) -> tuple[FloatArray, FloatArray]:
    """Decoding seconds and tokens behind the first of each prompt; an answer of one token took no decoding."""
    tokens = np.array([len(trace.tokens) - 1 for trace in traces], dtype=np.float64)
    seconds = np.array([trace.decode_s for trace in traces], dtype=np.float64)
    return np.where(tokens > 0, seconds, 0.0), tokens
