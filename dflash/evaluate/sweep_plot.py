"""A sweep as a picture: tokens/s over the number of drafts, one panel a temperature, one line a batch size."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from dflash.evaluate.sweep_text import gain_text, setting_text
from dflash.records import SweepCell, SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (4.2, 4.4)
APART = 0.07
"""Drafts that the lines' intervals stand apart, so that none hides another."""
DOTS_PER_INCH = 130
COLOURS = ("#2f6db3", "#d9772b", "#3c8d5a", "#8d4fa8", "#b33f52", "#5b6672")


def draw_sweep(result: SweepResult) -> bytes:
    """The picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(cell.temperature for cell in result.cells))
    size = (max(PANEL_INCHES[0] * len(temperatures), 7.0), PANEL_INCHES[1] + 0.9)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        _panel(axes, result, temperature)
    panels[0].set_ylim(0, 1.12 * max(_high(cell) for cell in result.cells))
    panels[0].set_ylabel("tokens/s over all rows, prefill left out")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    step = "" if result.step is None else f" at step {result.step}"
    best = f"best (star): {setting_text(result.best)}\n{gain_text(result.best)}"
    figure.suptitle(f"{result.drafter}{step}: decoding speed, {result.prompts} prompts\n{best}", fontsize=10, x=0.01, ha="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _panel(axes: Axes, result: SweepResult, temperature: float) -> None:
    cells = [cell for cell in result.cells if cell.temperature == temperature]
    batches = list(dict.fromkeys(cell.batch_size for cell in cells))
    for index, batch_size in enumerate(batches):
        shift = APART * (index - (len(batches) - 1) / 2)
        colour = COLOURS[index % len(COLOURS)]
        line = sorted((cell for cell in cells if cell.batch_size == batch_size), key=lambda cell: cell.block_size)
        drafts = [cell.block_size - 1 + shift for cell in line]
        speeds = [cell.tokens_per_s for cell in line]
        axes.errorbar(
            drafts, speeds, yerr=_bars(line), color=colour, marker="o", markersize=4, capsize=2, linewidth=1.4, elinewidth=0.8,
            label=f"batch size {batch_size}",
        )  # fmt: skip
        fastest = result.best_at(temperature=temperature, batch_size=batch_size)
        if fastest is not None:
            axes.annotate(
                f"{fastest.speedup:.2f}x",
                (fastest.block_size - 1 + shift, _high(fastest)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
        if result.best in line:
            axes.plot([result.best.block_size - 1 + shift], [result.best.tokens_per_s], marker="*", markersize=15, color=colour)
    axes.set_title(f"temperature {temperature:g}" + (" (greedy)" if temperature == 0 else ""), fontsize=10)
    axes.set_xlabel("drafts a block (0: plain decoding)")
    axes.set_xticks(sorted({cell.block_size - 1 for cell in cells}))
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(cells: list[SweepCell]) -> list[list[float]]:
    """Below and above its speed; no number, hence no bar, where one prompt has no interval."""
    below, above = [], []
    for cell in cells:
        ends, speed = cell.tokens_per_s_ci, cell.tokens_per_s
        below.append(math.nan if ends is None else max(speed - ends[0], 0.0))
        above.append(math.nan if ends is None else max(ends[1] - speed, 0.0))
    return [below, above]


def _high(cell: SweepCell) -> float:
    """Where its bar ends."""
    return max(cell.tokens_per_s, cell.tokens_per_s_ci[1] if cell.tokens_per_s_ci else 0.0)
