"""How the report's pictures look: large enough for a phone, one palette, no global state of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

INK, FAINT, POINT, USUAL, SHADE = "#1f2933", "#d9dee5", "#7f9fc9", "#1d4e89", "#9aa5b1"
MARK = {"critical": "#c0262d", "warn": "#d9822b", "info": "#7b8794"}
LINES = ("#1d4e89", "#d9822b", "#2f855a", "#805ad5", "#b83280", "#718096", "#2c7a7b", "#744210")
WIDTH_INCHES = 4.6
_DPI = 150


def new_figure(height_inches: float) -> Any:
    """An empty figure, as wide as every other: a phone scales it little, a desk shows two side by side."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=_DPI, layout="constrained")


def png_of(figure: Any) -> bytes:
    """The figure as PNG."""
    as_written(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def as_written(figure: Any) -> None:
    """Draw every text as it is: a dollar in somebody's name begins no formula, which could be one that cannot be drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def plain(axes: Any, *, log: bool) -> None:
    """A quiet frame, a faint grid, few ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.grid(visible=True, which="major", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=2)
    axes.yaxis.label.set_size(10)
    axes.xaxis.label.set_size(10)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend_above(axes: Any, *, columns: int) -> None:
    """The names of the lines over the picture, where they hide nothing."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.0,
    )


def shade_spans(axes: Any, spans: Iterable[tuple[float, float]], *, colour: str, alpha: float) -> None:
    """Vertical stripes behind everything."""
    for first, last in spans:
        axes.axvspan(first, last, color=colour, alpha=alpha, linewidth=0, zorder=1)


def shade_of(index: int, count: int) -> tuple[float, float, float, float]:
    """Colour of a bucket: from short (dark) to long (light)."""
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](0.88 * index / max(1, count - 1))
    return float(red), float(green), float(blue), float(alpha)
