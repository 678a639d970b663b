"""The report's pictures of the machinery: queues, target workers, step time with saves, and the order of the buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from dflash.health.history import History, Peaks
from dflash.health.plot_style import LINES, MARK, SHADE, USUAL, legend_above, new_figure, plain, png_of, shade_of, shade_spans
from dflash.health.report_plots import Picture
from dflash.records import Finding

_HEIGHT_INCHES = 2.5


def draw_machinery(history: History, findings: Sequence[Finding]) -> list[Picture]:
    """The pictures that the log has numbers for."""
    drawn: tuple[Callable[[History, Sequence[Finding]], Picture | None], ...] = (_step_time, _queues, _targets, _runs)
    return [picture for draw in drawn if (picture := draw(history, findings)) is not None]


def _step_time(history: History, findings: Sequence[Finding]) -> Picture | None:
    stretches = history.step_time.stretches
    if not any(peak.value > 0 for peak in stretches):
        return None
    figure = new_figure(_HEIGHT_INCHES)
    axes = figure.add_subplot()
    spans = _save_spans(history)
    shade_spans(axes, spans, colour=SHADE, alpha=0.45)
    steps, values = _stairs(history.step_time)
    axes.plot(steps, values, color=USUAL, linewidth=1.3, drawstyle="steps-post", zorder=3)
    usual = median(peak.value for peak in stretches)
    axes.axhline(usual, color=MARK["info"], linewidth=1, linestyle="--", zorder=2)
    _mark(axes, findings, detectors=("save stall", "throughput"))
    axes.set_ylabel("seconds a step")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    plain(axes, log=False)
    saves = "grey: a checkpoint is being saved; " if spans else ""
    words = f"The slowest step of each stretch; {saves}dashed: what is usual."
    return Picture("step-time", "Step time and saves", words, png_of(figure))


def _queues(history: History, findings: Sequence[Finding]) -> Picture | None:
    curves = {name: curve for name, curve in history.queues.items() if any(point.value > 0 for point in curve.points)}
    if not curves:
        return None
    figure = new_figure(1.0 + 1.3 * len(curves))
    parts = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (index, (name, curve)) in zip(parts, enumerate(curves.items()), strict=True):
        axes.plot([p.step for p in curve.points], [p.value for p in curve.points], color=LINES[index], linewidth=1.5)
        _mark(axes, [f for f in findings if f.values.get("queue") in (name, None)], detectors=("queue decline",))
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        plain(axes, log=False)
    parts[-1].set_xlabel("step")
    words = "Batches waiting for the targets, and features waiting for the drafter. An empty queue starves training."
    return Picture("queues", "Queues", words, png_of(figure))


def _targets(history: History, findings: Sequence[Finding]) -> Picture | None:
    if len(history.targets) < 2:
        return None
    figure = new_figure(_HEIGHT_INCHES)
    axes = figure.add_subplot()
    for target, curve in sorted(history.targets.items()):
        colour = LINES[target % len(LINES)]
        axes.plot(
            [p.step for p in curve.points], [p.value for p in curve.points], color=colour, linewidth=1.5, label=f"target {target}"
        )
    axes.axhline(0, color=MARK["info"], linewidth=0.8)
    _mark(axes, findings, detectors=("target imbalance",))
    legend_above(axes, columns=4)
    axes.set_ylabel("batches ahead")
    axes.set_xlabel("step")
    plain(axes, log=False)
    words = "Batches that each target worker has finished, against the mean of all: one that falls behind is slow."
    return Picture("targets", "Target workers", words, png_of(figure))


def _runs(history: History, findings: Sequence[Finding]) -> Picture | None:
    stretches = history.runs.stretches
    buckets = sorted(history.loss)
    if len(buckets) < 2 or not stretches:
        return None
    figure = new_figure(2.2)
    axes = figure.add_subplot()
    ends = [peak.step for peak in stretches[1:]] + [max(history.last_step + 1, stretches[-1].step + 1)]
    for peak, end in zip(stretches, ends, strict=True):
        index = buckets.index(peak.tag) if peak.tag in buckets else 0
        axes.bar(
            peak.step, peak.value, width=max(end - peak.step, 1), align="edge", color=shade_of(index, len(buckets)), linewidth=0
        )
    _mark(axes, findings, detectors=("bucket run", "share drift"))
    axes.set_ylabel("batches in a row")
    axes.set_xlabel("step")
    plain(axes, log=False)
    axes.yaxis.get_major_locator().set_params(integer=True)
    words = "Longest run of batches of one bucket, in the colour of that bucket. Long runs of one kind pull the weights to and fro."
    return Picture("runs", "Runs of one bucket", words, png_of(figure))


def _stairs(peaks: Peaks) -> tuple[list[int], list[float]]:
    return [peak.step for peak in peaks.stretches], [peak.value for peak in peaks.stretches]


def _save_spans(history: History) -> list[tuple[float, float]]:
    """Where saves were under way, at least as wide as one stretch of the picture."""
    widths = [later.step - earlier.step for earlier, later in pairwise(history.step_time.stretches)]
    least = max([1, *widths])
    return [
        (save.step, max(save.step + least, (history.last_step if save.end is None else save.end) + 1)) for save in history.saves
    ]


def _mark(axes: Any, findings: Sequence[Finding], *, detectors: tuple[str, ...]) -> None:
    for finding in findings:
        if finding.detector in detectors and finding.severity != "info":
            axes.axvspan(finding.onset_step, finding.last_step + 1, color=MARK[finding.severity], alpha=0.12, linewidth=0, zorder=1)
