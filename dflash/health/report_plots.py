"""The report's pictures of the training itself: loss and gradient norm, each bucket against its own baseline, as PNG.

The hard decision: the raw loss and what is left of it once every bucket is measured against its own usual value stand
one above the other. Buckets sit at different losses; in the raw curve the highest bucket always looks like trouble
(that is how a healthy run gets called sick), in the residual only what really moved does.
matplotlib is imported only when a picture is drawn, and without its global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash.health.decision import is_damage
from dflash.health.history import Curve, History
from dflash.health.plot_style import MARK, POINT, USUAL, legend_above, new_figure, plain, png_of, shade_of, shade_spans
from dflash.records import Finding

_SMOOTH_POINTS = 5
_LOWEST = 1e-6


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG, what it shows, and how to read it."""

    name: str
    title: str
    words: str
    png: bytes


def draw_overview(history: History, findings: Sequence[Finding]) -> Picture | None:
    """Raw loss of every bucket (running medians) above, residual against its usual loss below; None for an empty log."""
    curves = {bucket: curve for bucket, curve in sorted(history.loss.items()) if curve.points}
    if not curves:
        return None
    learnt = any(point.usual is not None for curve in curves.values() for point in curve.points)
    figure = new_figure(4.6 if learnt else 2.7)
    axes = figure.subplots(2 if learnt else 1, 1, sharex=True, squeeze=False, height_ratios=(1.25, 1) if learnt else (1,))[:, 0]
    for index, (bucket, curve) in enumerate(curves.items()):
        colour = shade_of(index, len(curves))
        values = [max(point.value, _LOWEST) for point in curve.points]
        steps = [point.step for point in curve.points]
        axes[0].plot(steps, values, ".", color=colour, markersize=2, alpha=0.35, zorder=2)
        axes[0].plot(steps, _smooth(values), color=colour, linewidth=1.6, label=f"bucket {bucket}", zorder=3)
        if learnt:
            judged = [(p.step, max(p.value, _LOWEST) / p.usual) for p in curve.points if p.usual]
            axes[1].plot([s for s, _ in judged], [r for _, r in judged], ".", color=colour, markersize=3, zorder=3)
    for part in axes:
        _mark_findings(part, findings)
    _ring(axes[0], _marks(findings, detector="loss spike", value="loss"))
    axes[0].set_ylabel("loss")
    if len(curves) > 1:
        legend_above(axes[0], columns=3)
    plain(axes[0], log=True)
    if learnt:
        axes[1].axhline(1.0, color=USUAL, linewidth=1, zorder=2)
        axes[1].set_ylabel("times its usual")
        plain(axes[1], log=True)
    axes[-1].set_xlabel("step")
    below = " Below: the same, each bucket divided by its own usual loss, so that 1 is normal." if learnt else ""
    apart = " A bucket holds texts of similar length; each learns to a loss of its own." if len(history.loss) > 1 else ""
    words = f"Lower is better. Red: damage; orange: warnings about the training; rings: spikes.{apart}{below}"
    return Picture("loss", "Loss over the run", words, png_of(figure))


def draw_gradient(history: History, findings: Sequence[Finding]) -> Picture | None:
    """Gradient norm of all updates; None where the log has none."""
    curves = {key: curve for key, curve in sorted(history.grad_norm.items()) if any(p.value > 0 for p in curve.points)}
    if not curves:
        return None
    figure = new_figure(2.5)
    axes = figure.add_subplot()
    for index, (key, curve) in enumerate(curves.items()):
        points = [point for point in curve.points if point.value > 0]
        axes.plot(
            [p.step for p in points], [p.value for p in points], ".", color=shade_of(index, len(curves)), markersize=3, label=key
        )
    marks = _marks(findings, detector="gradient spike", value="grad_norm")
    _ring(axes, marks)
    _mark_findings(axes, [finding for finding in findings if is_damage(finding)])
    axes.set_ylabel("gradient norm")
    axes.set_xlabel("step")
    plain(axes, log=True)
    words = "How hard each update pulls, before clipping. A lone high point (ringed) is absorbed; a rise that stays is not."
    return Picture("gradient", "Gradient norm", words, png_of(figure))


def draw_buckets(history: History, findings: Sequence[Finding]) -> list[Picture]:
    """One picture a bucket (loss above, gradient norm of its updates below), then one for mixed updates."""
    pictures = [_draw_bucket(bucket, curve, history, findings) for bucket, curve in sorted(history.loss.items())]
    known = {str(bucket) for bucket in history.loss}
    others = sorted(set(history.grad_norm) - known)
    return pictures + [_draw_mixed(key, history.grad_norm[key], findings) for key in others]


def _draw_bucket(bucket: int, curve: Curve, history: History, findings: Sequence[Finding]) -> Picture:
    gradient = history.grad_norm.get(str(bucket))
    rows = 1 if gradient is None or not gradient.points else 2
    figure = new_figure(0.6 + 1.7 * rows)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    own = [finding for finding in findings if finding.bucket in (bucket, None)]
    _draw_curve(axes[0], curve, label="loss", marks=_marks(own, detector="loss spike", value="loss"))
    if gradient is not None and gradient.points:
        _draw_curve(axes[1], gradient, label="gradient norm", marks=_marks(own, detector="gradient spike", value="grad_norm"))
    axes[-1].set_xlabel("step")
    return Picture(f"bucket-{bucket}", f"Bucket {bucket}", "", png_of(figure))


def _draw_mixed(key: str, curve: Curve, findings: Sequence[Finding]) -> Picture:
    figure = new_figure(2.3)
    axes = figure.add_subplot()
    shown = [finding for finding in findings if finding.bucket is None]
    _draw_curve(axes, curve, label="gradient norm", marks=_marks(shown, detector="gradient spike", value="grad_norm"))
    axes.set_xlabel("step")
    return Picture(f"gradient-{key}", f"Updates of {key} buckets", "", png_of(figure))


def _draw_curve(axes: Any, curve: Curve, *, label: str, marks: list[tuple[int, float, str]]) -> None:
    positive = [point for point in curve.points if point.value > 0]
    axes.plot([p.step for p in positive], [p.value for p in positive], ".", color=POINT, markersize=3, zorder=2)
    learnt = [point for point in positive if point.usual is not None and point.limit is not None]
    if learnt:
        steps = [p.step for p in learnt]
        axes.plot(steps, [p.usual for p in learnt], color=USUAL, linewidth=1.8, zorder=3)
        axes.plot(steps, [p.limit for p in learnt], color=MARK["warn"], linewidth=1.2, linestyle="--", zorder=3)
    _ring(axes, marks)
    axes.set_yscale("log")
    axes.set_ylabel(label)
    values = [p.value for p in positive] + [value for _, value, _ in marks]
    if values:  # the limit of a baseline that is still settling may lie far outside
        axes.set_ylim(min(values) / 1.25, max(values) * 1.4)
    plain(axes, log=True)


def _ring(axes: Any, marks: list[tuple[int, float, str]]) -> None:
    for step, value, severity in marks:
        axes.plot([step], [value], "o", markersize=7, markerfacecolor="none", markeredgewidth=1.6, color=MARK[severity], zorder=4)


def _marks(findings: Sequence[Finding], *, detector: str, value: str) -> list[tuple[int, float, str]]:
    seen = [(f.first_step, _height(f.values, value), f.severity) for f in findings if f.detector == detector]
    return [(step, height, severity) for step, height, severity in seen if height > 0]


def _height(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _mark_findings(axes: Any, findings: Sequence[Finding]) -> None:
    """Damage as a shaded span, warnings about the training as thin lines."""
    shade_spans(axes, [(f.onset_step, f.last_step + 1) for f in findings if is_damage(f)], colour=MARK["critical"], alpha=0.13)
    for finding in findings:
        if not is_damage(finding) and finding.domain == "training" and finding.severity == "warn":
            axes.axvline(finding.first_step, color=MARK["warn"], alpha=0.5, linewidth=1, zorder=1)


def _smooth(values: Sequence[float]) -> list[float]:
    return [median(values[max(0, i - _SMOOTH_POINTS + 1) : i + 1]) for i in range(len(values))]
