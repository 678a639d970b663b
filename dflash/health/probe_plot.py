"""The report's picture of what training is for: the acceptance length that probes measured on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.health.history import History
from dflash.health.plot_style import LINES, MARK, new_figure, plain, png_of
from dflash.health.report_plots import Picture
from dflash.records import Finding

_HEIGHT_INCHES = 2.5


def draw_probes(history: History, findings: Sequence[Finding]) -> Picture | None:  # noqa: ARG001 - as every other picture
    """Acceptance length of every probed checkpoint with its interval; None where nothing was probed."""
    if not history.probes:
        return None
    figure = new_figure(_HEIGHT_INCHES)
    axes = figure.add_subplot()
    steps = [probe.step for probe in history.probes]
    lengths = [probe.length for probe in history.probes]
    spread = [[p.length - p.low for p in history.probes], [p.high - p.length for p in history.probes]]
    axes.errorbar(steps, lengths, yerr=spread, color=LINES[0], linewidth=1.5, marker="o", markersize=4, capsize=3, zorder=3)
    axes.axhline(1.0, color=MARK["info"], linewidth=1, linestyle="--", zorder=2)
    axes.set_ylabel("acceptance length")
    axes.set_xlabel("step")
    plain(axes, log=False)
    words = "Tokens that a target forward commits on held-out prompts, with the interval. Dashed: a drafter that is never right."
    return Picture("acceptance", "Acceptance length, by probes", words, png_of(figure))
