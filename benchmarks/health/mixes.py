"""Kinds of healthy runs: bucket mixes and noise laws. The held-out ones are never looked at while thresholds are chosen.

The second half of the development mixes was once held out; when a first look at its scores had shown what correlated
noise does, it became development, and the held-out split of today was drawn up: logistic, Gumbel, correlated
contaminated and uniformly mixed noise, two, six, seven or nine buckets, and shares of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Law = Callable[[np.random.Generator, tuple[int, ...]], Floats]
"""Noise of unit spread (the usual one, not that of its tails)."""


@dataclass(frozen=True)
class BucketKind:
    """One length bucket: where its loss settles, its share, tokens of a micro-batch, usual gradient norm."""

    final_loss: float
    share: float
    tokens: int
    grad_norm: float


@dataclass(frozen=True)
class Mix:
    """One kind of run.

    Attributes:
        law: of the noise of the log-loss; spread 0.1 before the part that falls with the number of tokens.
        correlation: of the noise from one step to the next.
        outlier_frac: share of micro-batches that are hard by nature, `outlier_factor` times the loss of the others.
        micro_batches: of one update.
        step_s: seconds of a step.
    """

    name: str
    buckets: tuple[BucketKind, ...]
    law: Law
    correlation: float = 0.0
    outlier_frac: float = 0.0
    outlier_factor: float = 1.0
    micro_batches: int = 1
    step_s: float = 1.0


def _student(df: float) -> Law:
    return lambda rng, size: rng.standard_t(df, size)


def _normal_mixture(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.standard_normal(size) * np.where(rng.random(size) < 0.1, 2.5, 0.9)


def _laplace(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.laplace(0.0, 0.8, size)


def _skewed(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return (rng.gamma(3.0, 1.0, size) - 2.7) / 1.7


def _logistic(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.logistic(0.0, 0.6, size)


def _gumbel(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.gumbel(-0.3, 0.8, size)


def _contaminated(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.standard_normal(size) * np.where(rng.random(size) < 0.02, 5.0, 1.0)


def _uniform_sum(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.uniform(-1.5, 1.5, size) + 0.5 * rng.standard_normal(size)


def _normal(rng: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return rng.standard_normal(size)


SIX = (
    BucketKind(3.6, 0.08, 180, 2.2),
    BucketKind(0.95, 0.12, 420, 1.1),
    BucketKind(0.75, 0.15, 560, 0.9),
    BucketKind(0.62, 0.20, 640, 0.8),
    BucketKind(0.58, 0.25, 700, 0.7),
    BucketKind(0.50, 0.20, 720, 0.65),
)
FOUR = (
    BucketKind(2.0, 0.2, 200, 1.5),
    BucketKind(1.1, 0.3, 500, 1.0),
    BucketKind(0.8, 0.3, 700, 0.8),
    BucketKind(0.7, 0.2, 800, 0.8),
)

_FIRST_FOUR = (
    Mix("six buckets, t4", SIX, _student(4)),
    Mix("six buckets, normal mixture, 5 % hard", SIX, _normal_mixture, outlier_frac=0.05, outlier_factor=3.0),
    Mix("four buckets, t5, two micro-batches", FOUR, _student(5), micro_batches=2),
    Mix("four buckets, normal, 10 % hard", FOUR, _normal, outlier_frac=0.10, outlier_factor=3.0),
)

TOP_HEAVY = (
    BucketKind(3.4, 0.06, 150, 2.5),
    BucketKind(1.2, 0.08, 300, 1.4),
    BucketKind(0.9, 0.10, 450, 1.0),
    BucketKind(0.72, 0.11, 600, 0.9),
    BucketKind(0.61, 0.13, 680, 0.8),
    BucketKind(0.55, 0.52, 760, 0.6),
)
EIGHT = tuple(BucketKind(2.8 * 0.75**i + 0.3, 0.05 + 0.0214 * i, 150 + 90 * i, 2.0 * 0.85**i) for i in range(8))
FIVE = (
    BucketKind(5.0, 0.10, 120, 3.0),
    BucketKind(1.5, 0.20, 400, 1.5),
    BucketKind(1.0, 0.30, 600, 1.0),
    BucketKind(0.9, 0.25, 650, 0.9),
    BucketKind(0.4, 0.15, 900, 0.6),
)

DEVELOPMENT = (
    *_FIRST_FOUR,
    Mix("top bucket 52 %, Laplace", TOP_HEAVY, _laplace),
    Mix("eight buckets, skewed, four micro-batches", EIGHT, _skewed, micro_batches=4),
    Mix("one bucket, t3.5, correlated", (BucketKind(1.4, 1.0, 500, 1.0),), _student(3.5), correlation=0.3),
    Mix("five buckets, normal, 7 % hard", FIVE, _normal, outlier_frac=0.07, outlier_factor=2.5, step_s=0.5),
)

SEVEN = tuple(
    BucketKind(3.2 * 0.7**i + 0.35, share, 160 + 95 * i, 2.2 * 0.84**i)
    for i, share in enumerate((0.07, 0.1, 0.12, 0.14, 0.16, 0.18, 0.23))
)
NINE = tuple(BucketKind(2.5 * 0.78**i + 0.4, 1 / 9, 140 + 80 * i, 1.8 * 0.87**i) for i in range(9))
LONG_HEAVY = (
    BucketKind(3.8, 0.05, 140, 2.4),
    BucketKind(1.3, 0.09, 320, 1.3),
    BucketKind(1.0, 0.11, 440, 1.1),
    BucketKind(0.8, 0.13, 580, 0.9),
    BucketKind(0.65, 0.14, 660, 0.8),
    BucketKind(0.6, 0.48, 780, 0.65),
)
TWO = (BucketKind(1.8, 0.4, 350, 1.3), BucketKind(0.9, 0.6, 700, 0.8))

HELD_OUT = (
    Mix("seven buckets, logistic", SEVEN, _logistic),
    Mix("nine buckets, Gumbel, three micro-batches", NINE, _gumbel, micro_batches=3),
    Mix("two buckets, contaminated, correlated", TWO, _contaminated, correlation=0.25),
    Mix("top bucket 48 %, uniform, 8 % hard", LONG_HEAVY, _uniform_sum, outlier_frac=0.08, outlier_factor=2.8, step_s=0.6),
)
