"""The report's pictures: loss and gradient norm of each bucket against its own baseline, as PNG bytes.

The hard decision: one picture a bucket instead of one for all. Buckets sit at different losses; drawn together, the
highest bucket always looks like trouble (that is how a healthy run gets called sick), and side by side on a phone
nothing can be read. matplotlib is imported only when a picture is drawn, and without its global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash.health.decision import is_damage
from dflash.health.history import Curve, History
from dflash.records import Finding

_INK, _FAINT, _POINT, _USUAL = "#1f2933", "#d9dee5", "#7f9fc9", "#1d4e89"
_MARK = {"critical": "#c0262d", "warn": "#d9822b", "info": "#7b8794"}
_DPI = 110
_SMOOTH_POINTS = 5
_LOWEST = 1e-6


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and what it shows."""

    title: str
    png: bytes


def draw_overview(history: History, findings: Sequence[Finding]) -> Picture | None:
    """The loss of every bucket over the run (running medians), with damage and spikes marked; None for an empty log."""
    from matplotlib.figure import Figure

    curves = {bucket: curve for bucket, curve in sorted(history.loss.items()) if curve.points}
    if not curves:
        return None
    figure = Figure(figsize=(7.0, 3.0), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for index, (bucket, curve) in enumerate(curves.items()):
        values = [max(point.value, _LOWEST) for point in curve.points]
        smooth = [median(values[max(0, i - _SMOOTH_POINTS + 1) : i + 1]) for i in range(len(values))]
        steps = [point.step for point in curve.points]
        axes.plot(steps, smooth, color=_shade(index, len(curves)), linewidth=1.6, label=f"bucket {bucket}", zorder=3)
    _mark_findings(axes, findings)
    axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.set_xlabel("step")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=8, fontsize=8, frameon=False, handlelength=1.2)
    _plain(axes)
    return Picture("Loss of every bucket over the run", _png(figure))


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
    figure = Figure(figsize=(4.2, 0.5 + 1.6 * rows), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    own = [finding for finding in findings if finding.bucket == bucket]
    _draw_curve(axes[0], curve, label="loss", marks=_marks(own, detector="loss spike", value="loss"))
    if gradient is not None:
        _draw_curve(axes[1], gradient, label="gradient norm", marks=_marks(own, detector="gradient spike", value="grad_norm"))
    axes[-1].set_xlabel("step")
    return Picture(f"Bucket {bucket}", _png(figure))


def _draw_gradient(key: str, curve: Curve, findings: Sequence[Finding]) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.1), dpi=_DPI, layout="constrained")
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
        axes.plot(steps, [p.usual for p in learnt], color=_USUAL, linewidth=1.8, zorder=3)
        axes.plot(steps, [p.limit for p in learnt], color=_MARK["warn"], linewidth=1.2, linestyle="--", zorder=3)
    for step, value, severity in marks:
        axes.plot([step], [value], "o", markersize=7, markerfacecolor="none", markeredgewidth=1.6, color=_MARK[severity], zorder=4)
    axes.set_yscale("log")
    axes.set_ylabel(label)
    values = [p.value for p in positive] + [value for _, value, _ in marks]
    if values:  # the limit of a baseline that is still settling may lie far outside
        axes.set_ylim(min(values) / 1.25, max(values) * 1.4)
    _plain(axes)


def _marks(findings: Sequence[Finding], *, detector: str, value: str) -> list[tuple[int, float, str]]:
    seen = [(f.first_step, f.values.get(value), f.severity) for f in findings if f.detector == detector]
    return [(step, float(height), severity) for step, height, severity in seen if isinstance(height, int | float) and height > 0]


def _mark_findings(axes: Any, findings: Sequence[Finding]) -> None:
    """Damage as a shaded span, loss spikes as thin lines."""
    for finding in findings:
        if is_damage(finding):
            axes.axvspan(finding.onset_step, finding.last_step + 1, color=_MARK["critical"], alpha=0.13, linewidth=0, zorder=1)
        elif finding.domain == "training" and finding.severity == "warn":
            axes.axvline(finding.first_step, color=_MARK["warn"], alpha=0.5, linewidth=1, zorder=1)


def _plain(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.grid(visible=True, which="major", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, length=2)
    axes.yaxis.label.set_size(10)
    axes.xaxis.label.set_size(10)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _shade(index: int, count: int) -> tuple[float, float, float, float]:
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](0.9 * index / max(1, count - 1))
    return float(red), float(green), float(blue), float(alpha)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
