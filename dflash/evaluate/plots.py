"""Pictures of one evaluation, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dflash.records import EvaluationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 130
BLUE, ORANGE, GREY = "#2f6db3", "#d9772b", "#8a8f98"


def draw_plots(result: EvaluationResult) -> dict[str, bytes]:
    """PNG files of an evaluation, by file name."""
    return {
        "acceptance_per_position.png": _png(lambda axes: _per_position(axes, result)),
        "accepted_histogram.png": _png(lambda axes: _histogram(axes, result)),
        "acceptance_by_context.png": _png(lambda axes: _by_context(axes, result)),
    }


def _png(draw: Callable[[Axes], None]) -> bytes:
    # The object interface: pyplot would keep every figure alive and pick a display's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _per_position(axes: Axes, result: EvaluationResult) -> None:
    positions = list(range(1, result.block_size))
    survival = [100 * frac for frac in result.survival_per_position]
    # A position that no verification reached has no conditional rate: the line ends before it.
    reached = [1.0, *result.survival_per_position]
    conditional = [100 * frac for frac, share in zip(result.conditional_per_position, reached, strict=False) if share > 0]
    bars = axes.bar(positions, survival, width=0.7, color=BLUE, label="all drafts up to this position accepted")
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8, color=BLUE)
    axes.plot(
        positions[: len(conditional)],
        conditional,
        color=ORANGE,
        marker="o",
        markersize=4,
        label="accepted, given that it was reached",
    )
    axes.set_ylim(0, 108)
    axes.set_xticks(positions)
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("verifications (%)")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    axes.set_title(_title(result, "acceptance per position"), fontsize=10, loc="left")


def _histogram(axes: Axes, result: EvaluationResult) -> None:
    accepted = list(range(len(result.acceptance_histogram)))
    shares = [100 * count / result.verifications for count in result.acceptance_histogram]
    bars = axes.bar(accepted, shares, width=0.75, color=BLUE)
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8, color=BLUE)
    axes.axvline(result.accepted_length, color=ORANGE, linewidth=1.5, linestyle="--")
    axes.annotate(
        f"mean {result.accepted_length:.2f}",
        xy=(result.accepted_length, 0.97),
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
    below, above = [], []
    for part in bins.values():
        low, high = (part["acceptance_length"] if end is None else end for end in part["acceptance_ci"])
        below.append(max(part["acceptance_length"] - low, 0.0))
        above.append(max(high - part["acceptance_length"], 0.0))
    places = range(len(bins))
    axes.errorbar(places, lengths, yerr=[below, above], color=BLUE, marker="o", capsize=4, linewidth=1.2)
    axes.axhline(result.acceptance_length, color=ORANGE, linewidth=1.2, linestyle="--")
    axes.text(1.005, result.acceptance_length, " all", color=ORANGE, fontsize=9, va="center", transform=axes.get_yaxis_transform())
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(1.005, 1.0, " plain", color=GREY, fontsize=9, va="center", transform=axes.get_yaxis_transform())
    axes.set_xticks(list(places), [f"{name}\nn={part['verifications']}" for name, part in bins.items()], fontsize=8)
    axes.set_xlim(-0.5, len(bins) - 0.5)
    axes.set_ylim(0, result.block_size)
    axes.set_xlabel("context in front of the block (tokens), n verifications")
    axes.set_ylabel("acceptance length (tokens)")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_title(_title(result, "acceptance by context length"), fontsize=10, loc="left")


def _title(result: EvaluationResult, what: str) -> str:
    step = "" if result.step is None else f" at step {result.step}"
    low, high = result.acceptance_ci
    return (
        f"{result.drafter}{step}: {what}\nacceptance length {result.acceptance_length:.2f} ({low:.2f} to {high:.2f}), "
        f"{result.prompts} prompts, block size {result.block_size}"
    )
