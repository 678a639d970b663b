"""Pictures of a comparison: one colour a run throughout, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash.compare.compare import AcceptanceRow
from dflash.compare.curves import FloatArray
from dflash.compare.view import RunView
from dflash.health.plot_style import LINES, legend_above, new_figure, plain, png_of

POINTS = 120
"""A curve is the mean of this many stretches of equal length in tokens."""


def draw_loss(runs: Sequence[RunView]) -> bytes:
    """Loss and drafts accepted a block (in training) over the tokens seen."""
    figure = new_figure(4.6)
    axes = figure.subplots(2, 1, sharex=True)
    for index, run in enumerate(runs):
        curves = run.curves
        total = sum(curves.bucket_sum.values(), np.zeros(len(curves.tokens)))
        count = sum(curves.bucket_count.values(), np.zeros(len(curves.tokens)))
        _line(axes[0], *stretches(curves.tokens, total, count), index=index, label=run.name)
        accepted = np.nan_to_num(curves.accepted)
        _line(axes[1], *stretches(curves.tokens, accepted, (~np.isnan(curves.accepted)).astype(float)), index=index, label=None)
    axes[0].set_ylabel("loss")
    axes[1].set_ylabel("drafts accepted a block")
    legend_above(axes[0], columns=2)
    return _finish(figure, axes, log=(True, False))


def draw_buckets(runs: Sequence[RunView]) -> bytes:
    """Loss over the tokens seen, a panel a bucket."""
    buckets = sorted({bucket for run in runs for bucket in run.curves.bucket_sum})
    figure = new_figure(1.0 + 1.35 * len(buckets))
    axes = figure.subplots(len(buckets), 1, sharex=True, squeeze=False)[:, 0]
    for panel, bucket in zip(axes, buckets, strict=True):
        for index, run in enumerate(runs):
            curves = run.curves
            if bucket in curves.bucket_sum:
                line = stretches(curves.tokens, curves.bucket_sum[bucket], curves.bucket_count[bucket])
                _line(panel, *line, index=index, label=run.name)
        panel.set_ylabel(f"bucket {bucket}")
    legend_above(axes[0], columns=2)
    return _finish(figure, axes, log=(True,) * len(buckets))


def draw_acceptance(runs: Sequence[RunView], rows: Sequence[AcceptanceRow]) -> bytes:
    """Acceptance length of every kind of prompts with its interval, the runs beside each other."""
    figure = new_figure(0.9 + 0.22 * len(runs) * len(rows) + 0.12 * len(rows))
    axes = figure.add_subplot()
    spread = 0.7 / max(1, len(runs))
    for index, run in enumerate(runs):
        heights, values, below, above = [], [], [], []
        for row_number, row in enumerate(rows):
            cell = row.cells[index]
            if cell is not None:
                heights.append(len(rows) - 1 - row_number + spread * ((len(runs) - 1) / 2 - index))
                length, low, high = cell
                values.append(length)
                # At a low level of confidence the length itself may lie outside of its interval.
                below.append(0.0 if low is None else max(length - low, 0.0))
                above.append(0.0 if high is None else max(high - length, 0.0))
        colour = LINES[index % len(LINES)]
        axes.errorbar(values, heights, xerr=(below, above), fmt="o", color=colour, markersize=5, capsize=3, label=run.name)
    axes.set_yticks(range(len(rows)), [row.kind for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("acceptance length (tokens a target pass)")
    axes.grid(visible=True, axis="x", linewidth=0.6, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    legend_above(axes, columns=2)
    return png_of(figure)


def stretches(tokens: FloatArray, sums: FloatArray, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ratios of sums within equal stretches of tokens.

    Args:
        tokens: `[n]` ascending.
        sums: `[n]` numerator of each step.
        counts: `[n]` denominator of each step.

    Returns:
        Middle of each stretch that has a value, and the value.
    """
    edges = np.linspace(0.0, float(tokens[-1]), POINTS + 1)
    place = np.clip(np.searchsorted(edges, tokens, side="left") - 1, 0, POINTS - 1)
    top = np.bincount(place, weights=sums, minlength=POINTS)
    bottom = np.bincount(place, weights=counts, minlength=POINTS)
    filled = bottom > 0
    return ((edges[:-1] + edges[1:]) / 2)[filled], top[filled] / bottom[filled]


def _line(axes: Any, x: FloatArray, y: FloatArray, *, index: int, label: str | None) -> None:
    style = ("-", "--", "-.", ":")[(index // len(LINES)) % 4]
    axes.plot(x, y, style, color=LINES[index % len(LINES)], linewidth=1.5, label=label)


def _finish(figure: Any, axes: Sequence[Any], *, log: Sequence[bool]) -> bytes:
    from matplotlib.ticker import FuncFormatter

    for panel, is_log in zip(axes, log, strict=True):
        plain(panel, log=is_log)
        panel.xaxis.set_major_formatter(FuncFormatter(in_words))
    axes[-1].set_xlabel("tokens seen")
    return png_of(figure)


def in_words(value: float, _: object = None) -> str:
    """A count on an axis: 1500000 as `1.5 M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"
