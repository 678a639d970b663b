"""Pictures of one evaluation, drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dflash.health.plot_style import as_written
from dflash.records import EvaluationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 130
MAX_SLICES = 40
"""Rows of the picture of slices; a set with more labels shows its first ones."""

HOLLOW_MEANS = "\nhollow: of one prompt, which has no interval"

BLUE, ORANGE, GREY = "#2f6db3", "#d9772b", "#8a8f98"


def draw_plots(result: EvaluationResult) -> dict[str, bytes]:
    """PNG files of an evaluation, by file name; none of a figure that was not measured."""
    pictures: dict[str, Callable[[Axes], None]] = {}
    if result.survival_per_position is not None or result.survival_untruncated_per_position is not None:
        pictures["acceptance_per_position.png"] = lambda axes: _per_position(axes, result)
    if result.acceptance_histogram is not None:
        pictures["accepted_histogram.png"] = lambda axes: _histogram(axes, result)
    if "context_tokens" in result.slices:
        pictures["acceptance_by_context.png"] = lambda axes: _by_context(axes, result)
    if result.plain_s_per_token is not None and result.speculative_s_per_token is not None:
        pictures["tokens_per_s.png"] = lambda axes: _tokens_per_s(axes, result)
    drawn = {name: _png(draw, SIZE_INCHES) for name, draw in pictures.items()}
    rows = _slice_rows(result)
    if len(rows) > 1:
        size = (SIZE_INCHES[0], 1.6 + 0.26 * len(rows))
        drawn["acceptance_by_slice.png"] = _png(lambda axes: _by_slice(axes, result, rows), size)
    return drawn


def _png(draw: Callable[[Axes], None], size_inches: tuple[float, float]) -> bytes:
    # The object interface: pyplot would keep every figure alive and pick a display's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    as_written(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _per_position(axes: Axes, result: EvaluationResult) -> None:
    positions = list(range(1, result.block_size))
    counted = result.survival_per_position
    shares = counted or result.survival_untruncated_per_position or ()
    survival = [100 * frac for frac in shares]
    # A position that no verification reached has no conditional rate: the line ends before it.
    conditional = [
        100 * frac for frac, share in zip(result.conditional_per_position or (), [1.0, *shares], strict=False) if share > 0
    ]
    label = "all drafts up to this position accepted" + ("" if counted else " (those behind the answer's end too)")
    bars = axes.bar(positions, survival, width=0.7, color=BLUE, label=label)
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8, color=BLUE)
    if conditional:
        given = "accepted, given that it was reached"
        axes.plot(positions[: len(conditional)], conditional, color=ORANGE, marker="o", markersize=4, label=given)
    axes.set_ylim(0, 108)
    axes.set_xticks(positions)
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("verifications (%)")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    axes.set_title(_title(result, "acceptance per position"), fontsize=10, loc="left")


def _histogram(axes: Axes, result: EvaluationResult) -> None:
    histogram, mean = result.acceptance_histogram or (), result.accepted_length or 0.0
    accepted = list(range(len(histogram)))
    shares = [100 * count / result.verifications for count in histogram]
    bars = axes.bar(accepted, shares, width=0.75, color=BLUE)
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8, color=BLUE)
    axes.axvline(mean, color=ORANGE, linewidth=1.5, linestyle="--")
    axes.annotate(
        f"mean {mean:.2f}",
        xy=(mean, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=ORANGE,
        fontsize=9,
        va="top",
    )
    axes.set_ylim(0, max(shares) * 1.15 + 1e-9)
    axes.set_xticks(accepted)
    axes.set_xlabel("accepted drafts in a verification (the target's own token not counted)")
    axes.set_ylabel("verifications (%)")
    axes.set_title(_title(result, "accepted drafts"), fontsize=10, loc="left")


def _by_context(axes: Axes, result: EvaluationResult) -> None:
    bins: dict[str, dict[str, Any]] = dict(result.slices["context_tokens"])
    lengths = [part["acceptance_length"] for part in bins.values()]
    bars, highest, alone = _intervals(list(bins.values()))
    places = range(len(bins))
    axes.errorbar(places, lengths, yerr=bars, color=BLUE, marker="o", capsize=4, linewidth=1.2)
    _hollow(axes, [(place, lengths[place]) for place in alone])
    axes.axhline(result.acceptance_length, color=ORANGE, linewidth=1.2, linestyle="--")
    axes.text(1.005, result.acceptance_length, " all", color=ORANGE, fontsize=9, va="center", transform=axes.get_yaxis_transform())
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(1.005, 1.0, " plain", color=GREY, fontsize=9, va="center", transform=axes.get_yaxis_transform())
    axes.set_xticks(list(places), [f"{name}\nn={part['verifications']}" for name, part in bins.items()], fontsize=8)
    axes.set_xlim(-0.5, len(bins) - 0.5)
    axes.set_ylim(0, min(float(result.block_size), max(2.0, 1.3 * max(result.acceptance_length, highest))))
    axes.set_xlabel(f"context in front of the block (tokens), n verifications{HOLLOW_MEANS if alone else ''}")
    axes.set_ylabel("acceptance length (tokens)")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_title(_title(result, "acceptance by context length"), fontsize=10, loc="left")


def _tokens_per_s(axes: Axes, result: EvaluationResult) -> None:
    plain, fast = result.plain_s_per_token, result.speculative_s_per_token
    bars = [("all", 1 / plain if plain else 0.0, 1 / fast if fast else 0.0, result.speedup or 0.0)]
    sets: dict[str, dict[str, Any]] = dict(result.slices.get("dataset", {}))
    if len(sets) > 1:
        bars += [
            (name, part["plain_tokens_per_s"], part["speculative_tokens_per_s"], part["speedup"])
            for name, part in sets.items()
            if "speedup" in part
        ]
    places = range(len(bars))
    axes.bar([x - 0.2 for x in places], [bar[1] for bar in bars], width=0.38, color=GREY, label="plain decoding")
    fast_bars = axes.bar([x + 0.2 for x in places], [bar[2] for bar in bars], width=0.38, color=BLUE, label="with the drafter")
    axes.bar_label(fast_bars, [f"{bar[3]:.2f}x" for bar in bars], padding=2, fontsize=9, color=BLUE)
    axes.set_xticks(list(places), [bar[0] for bar in bars])
    axes.set_xlim(min(-0.6, (len(bars) - 4) / 2), max(len(bars) - 0.4, (len(bars) + 2) / 2))
    axes.set_ylim(0, 1.15 * max(max(bar[1], bar[2]) for bar in bars) + 1e-9)
    axes.set_ylabel(f"tokens/s at batch size {result.batch_size}, prefill excluded")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False, fontsize=8)
    axes.set_title(_title(result, "speed"), fontsize=10, loc="left")


def _slice_rows(result: EvaluationResult) -> list[tuple[str, dict[str, Any]]]:
    """Labels that tell prompts apart, of every slice but the context's, which has a picture of its own."""
    rows = []
    for name in ("dataset", "domain", "language", "turn", "kind"):
        parts: dict[str, dict[str, Any]] = dict(result.slices.get(name, {}))
        if len(parts) > 1:
            rows += [(f"{name}: {label}", part) for label, part in parts.items()]
    return rows[:MAX_SLICES]


def _by_slice(axes: Axes, result: EvaluationResult, rows: list[tuple[str, dict[str, Any]]]) -> None:
    places = list(range(len(rows)))[::-1]
    lengths = [part["acceptance_length"] for _, part in rows]
    bars, highest, alone = _intervals([part for _, part in rows])
    axes.errorbar(lengths, places, xerr=bars, color=BLUE, fmt="o", markersize=5, capsize=3, linewidth=1.2)
    _hollow(axes, [(lengths[row], places[row]) for row in alone])
    axes.axvline(result.acceptance_length, color=ORANGE, linewidth=1.2, linestyle="--")
    axes.set_yticks(places, [f"{label}  (n={part['prompts']})" for label, part in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(0.9, max(result.acceptance_length + 0.1, highest) * 1.05)
    hollow = HOLLOW_MEANS if alone else ""
    axes.set_xlabel(f"acceptance length (tokens) with {result.confidence:.0%} intervals, n prompts; dashed: all{hollow}")
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(_title(result, "acceptance by slice"), fontsize=10, loc="left")


def _intervals(parts: Sequence[dict[str, Any]]) -> tuple[list[list[float]], float, list[int]]:
    """Bars below and above the acceptance lengths of slices, the highest end, and which of them have no interval, hence no bar."""
    below, above, alone = [], [], []
    highest = 0.0
    for index, part in enumerate(parts):
        length = part["acceptance_length"]
        low, high = part["acceptance_ci"]
        if low is None or high is None:
            alone.append(index)
            below.append(math.nan)
            above.append(math.nan)
        else:
            below.append(max(length - low, 0.0))
            above.append(max(high - length, 0.0))
        highest = max(highest, length if high is None else high)
    return [below, above], highest, alone


def _hollow(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Points that no interval belongs to; a bar without width would claim that they are known exactly."""
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=BLUE, markersize=6, markerfacecolor="white", zorder=3)


def _title(result: EvaluationResult, what: str) -> str:
    step = "" if result.step is None else f" at step {result.step}"
    ends = "" if result.acceptance_ci is None else " ({:.2f} to {:.2f})".format(*result.acceptance_ci)
    return (
        f"{result.drafter}{step}: {what}\nacceptance length {result.acceptance_length:.2f}{ends}, "
        f"{result.prompts} prompts, block size {result.block_size}"
    )
