"""The report's pictures: loss and gradient norm of each bucket against its own baseline, as PNG bytes.

The hard decision: one picture a bucket instead of one for all. Buckets sit at different losses; drawn together, the
highest bucket always looks like trouble (that is how a healthy run gets called sick), and side by side on a phone
nothing can be read. matplotlib is imported only when a picture is drawn, and without its global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.health.history import Curve, History
from dflash.records import Finding

_INK, _FAINT, _POINT, _USUAL = "#1f2933", "#d9dee5", "#7f9fc9", "#1d4e89"
_MARK = {"critical": "#c0262d", "warn": "#d9822b", "info": "#7b8794"}
_DPI = 110
_OVERVIEW_BINS = 60


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and what it shows."""

    title: str
    png: bytes


def draw_overview(history: History, findings: Sequence[Finding]) -> Picture | None:
    """The usual loss of every bucket over the run, with the spans of findings shaded; None without a baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.0), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    for index, (bucket, curve) in enumerate(sorted(history.loss.items())):
        usual = [(point.step, point.usual) for point in curve.points if point.usual is not None]
        if usual:
            drawn = True
            axes.plot(*zip(*usual, strict=True), color=_shade(index, len(history.loss)), linewidth=1.8, label=f"bucket {bucket}")
    if not drawn:
        return None
    _shade_findings(axes, findings)
    axes.set_yscale("log")
    axes.set_ylabel("usual loss")
    axes.set_xlabel("step")
    axes.legend(loc="upper right", ncols=3, fontsize=8, frameon=False)
    _plain(axes)
    return Picture("Usual loss of every bucket", _png(figure))


def draw_buckets(history: History, findings: Sequence[Finding]) -> list[Picture]:
    """One picture a bucket (loss above, gradient norm of its updates below), then one for mixed updates."""
    pictures = [_draw_bucket(bucket, curve, history, findings) for bucket, curve in sorted(history.loss.items())]
    known = {str(bucket) for bucket in history.loss}
    others = sorted(set(history.grad_norm) - known)
    return pictures + [_draw_gradient(key, history.grad_norm[key], findings) for key in others]


def _draw_bucket(bucket: int, curve: Curve, history: History, findings: Sequence[Finding]) -> Picture:
    from matplotlib.figure import Figure

    gradient = history.grad_norm.get(str(bucket))
    rows = 1 if gradient is None else 2
    figure = Figure(figsize=(4.6, 1.2 + 1.45 * rows), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    own = [finding for finding in findings if finding.bucket == bucket]
    _draw_curve(axes[0], curve, label="loss", marks=_marks(own, detector="loss spike", value="loss"))
    if gradient is not None:
        _draw_curve(axes[1], gradient, label="gradient norm", marks=_marks(own, detector="gradient spike", value="grad_norm"))
    axes[-1].set_xlabel("step")
    return Picture(f"Bucket {bucket}", _png(figure))


def _draw_gradient(key: str, curve: Curve, findings: Sequence[Finding]) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.65), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    shown = [finding for finding in findings if finding.bucket is None]
    _draw_curve(axes, curve, label="gradient norm", marks=_marks(shown, detector="gradient spike", value="grad_norm"))
    axes.set_xlabel("step")
    return Picture(f"Updates of {key} buckets", _png(figure))


def _draw_curve(axes: Any, curve: Curve, *, label: str, marks: list[tuple[int, float, str]]) -> None:
    positive = [point for point in curve.points if point.value > 0]
    axes.plot([p.step for p in positive], [p.value for p in positive], ".", color=_POINT, markersize=3, zorder=2)
    learnt = [point for point in positive if point.usual is not None and point.limit is not None]
    if learnt:
        steps = [p.step for p in learnt]
        axes.plot(steps, [p.usual for p in learnt], color=_USUAL, linewidth=1.5, label="usual", zorder=3)
        axes.plot(steps, [p.limit for p in learnt], color=_MARK["warn"], linewidth=1, linestyle="--", label="spike", zorder=3)
        axes.legend(loc="upper right", fontsize=7, frameon=False, ncols=2, borderaxespad=0.1)
    for step, value, severity in marks:
        axes.plot([step], [value], "o", markersize=7, markerfacecolor="none", markeredgewidth=1.6, color=_MARK[severity], zorder=4)
    axes.set_yscale("log")
    axes.set_ylabel(label)
    _plain(axes)


def _marks(findings: Sequence[Finding], *, detector: str, value: str) -> list[tuple[int, float, str]]:
    seen = [(f.first_step, f.values.get(value), f.severity) for f in findings if f.detector == detector]
    return [(step, float(height), severity) for step, height, severity in seen if isinstance(height, int | float) and height > 0]


def _shade_findings(axes: Any, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.severity != "info":
            last = max(finding.last_step, finding.first_step + 1)
            axes.axvspan(finding.first_step, last, color=_MARK[finding.severity], alpha=0.22, linewidth=1.2, zorder=1)


def _plain(axes: Any) -> None:
    from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter

    axes.grid(visible=True, which="major", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=8, length=2)
    axes.yaxis.label.set_size(9)
    axes.xaxis.label.set_size(9)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(10, 10)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _shade(index: int, count: int) -> tuple[float, float, float, float]:
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](0.9 * index / max(1, count - 1))
    return float(red), float(green), float(blue), float(alpha)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
