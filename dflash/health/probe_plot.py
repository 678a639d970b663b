"""The report's picture of what training is for: the acceptance length that probes measured on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.health.history import History
from dflash.health.plot_style import LINES, MARK, new_figure, plain, png_of
from dflash.health.report_plots import Picture
from dflash.records import Finding

_HEIGHT_INCHES = 2.5


def draw_probes(history: History, findings: Sequence[Finding]) -> Picture | None:  # noqa: ARG001 - as every other picture
    """Acceptance length of every probed checkpoint with its interval; None where nothing was probed.

    A probe without an interval is a hollow point: a band without width would claim that it is known exactly.
    """
    if not history.probes:
        return None
    figure = new_figure(_HEIGHT_INCHES)
    axes = figure.add_subplot()
    steps = [probe.step for probe in history.probes]
    lengths = [probe.length for probe in history.probes]
    axes.plot(steps, lengths, color=LINES[0], linewidth=1.5, zorder=3)
    known = [probe for probe in history.probes if probe.low is not None and probe.high is not None]
    alone = [probe for probe in history.probes if probe.low is None or probe.high is None]
    if known:
        # A log may come from anywhere: ends on the wrong side of the length are drawn as none.
        below = [max(0.0, probe.length - (probe.low or 0.0)) for probe in known]
        above = [max(0.0, (probe.high or 0.0) - probe.length) for probe in known]
        at, middle = [probe.step for probe in known], [probe.length for probe in known]
        axes.errorbar(at, middle, yerr=[below, above], color=LINES[0], fmt="o", markersize=4, capsize=3, zorder=4)
    if alone:
        at, middle = [probe.step for probe in alone], [probe.length for probe in alone]
        axes.plot(at, middle, "o", color=LINES[0], markersize=5, markerfacecolor="white", zorder=4)
    axes.axhline(1.0, color=MARK["info"], linewidth=1, linestyle="--", zorder=2)
    axes.set_ylabel("acceptance length")
    axes.set_xlabel("step")
    plain(axes, log=False)
    words = "Tokens that a target forward commits on held-out prompts, with the interval. Dashed: a drafter that is never right."
    if alone:
        words += " Hollow: of one prompt, which has no interval."
    return Picture("acceptance", "Acceptance length, by probes", words, png_of(figure))
