"""The picture of a run's timeline: the spans of `dflash trace` drawn, a few steps near and the whole run from afar."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from dflash.train.timeline import CHECKPOINTS, DRAFTER, EPOCHS, RUN, Span, Timeline

INK, FAINT = "#1f2933", "#d9dee5"
BLUE, PALE, GREEN, ORANGE, RED, GREY, VIOLET = "#2f6db3", "#b9cde6", "#2f855a", "#d9772b", "#c0262d", "#9aa5b1", "#805ad5"
_ROWS = (RUN, EPOCHS, DRAFTER, CHECKPOINTS)
_NEAR_STEPS = 5
_LEGEND = (
    ("segment", GREY), ("no trainer runs", RED), ("epoch", VIOLET), ("step", BLUE), ("abandoned step", PALE),
    ("waits or snapshot", ORANGE), ("save", GREEN),
)  # fmt: skip


def draw_timeline(timeline: Timeline) -> bytes:
    """PNG: the whole run above; below, the steps around the first save that blocked the trainer."""
    figure = Figure(figsize=(10.0, 5.4), dpi=130, layout="constrained")
    whole, near = figure.subplots(2, 1)
    end_s = max(span.end_s for span in timeline.spans)
    _draw(whole, timeline.spans, 0.0, end_s)
    whole.set_title(f"The whole run: {timeline.steps} steps in {end_s:.0f} s", fontsize=10, loc="left", color=INK)
    first_s, last_s = _near(timeline)
    _draw(near, timeline.spans, first_s, last_s)
    near.set_title("The steps around one save", fontsize=10, loc="left", color=INK)
    near.set_xlabel("seconds since the log's first line", fontsize=9)
    handles = [_patch(colour) for _, colour in _LEGEND]
    figure.legend(handles, [name for name, _ in _LEGEND], loc="outside lower center", ncols=len(_LEGEND), fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _near(timeline: Timeline) -> tuple[float, float]:
    """A window of a few steps around a save in the middle of the run."""
    steps = [span for span in timeline.spans if span.name.startswith("step ")]
    saves = [span for span in timeline.spans if span.name.startswith("save ")]
    inside = [save for save in saves if any(step.end_s < save.begin_s for step in steps)]
    at_s = inside[len(inside) // 2].begin_s if inside else steps[len(steps) // 2].begin_s
    index = sum(step.begin_s < at_s for step in steps)
    chosen = steps[max(0, index - _NEAR_STEPS) : index + _NEAR_STEPS]
    return chosen[0].begin_s, chosen[-1].end_s


def _draw(axes: Any, spans: Sequence[Span], first_s: float, last_s: float) -> None:
    for span in spans:
        if span.end_s < first_s or span.begin_s > last_s:
            continue
        row = _ROWS.index(span.track)
        # A span shorter than a pixel is drawn as wide as one.
        width = max(span.length_s, (last_s - first_s) / 1500)
        height = 0.4 if span.name.startswith(("write", "rollback")) else 0.7
        axes.barh(
            -row,
            width,
            left=span.begin_s,
            height=height,
            color=_colour(span),
            edgecolor="white",
            linewidth=0.3 if width > (last_s - first_s) / 200 else 0,
        )
        if span.length_s > (last_s - first_s) / 14 and not span.name.startswith("write"):
            axes.text(
                span.begin_s + span.length_s / 2, -row, span.name, ha="center", va="center", fontsize=7, color="white", clip_on=True
            )
    axes.set_xlim(first_s, last_s)
    axes.set_yticks([-row for row in range(len(_ROWS))], _ROWS, fontsize=9)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(visible=True, axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(span: Span) -> str:
    match span.track, span.name.split()[0]:
        case _, "no" | "rollback":
            return RED
        case "run", _:
            return GREY
        case "epochs", _:
            return VIOLET
        case _, "waits" | "snapshot":
            return ORANGE
        case _, "step":
            return BLUE if span.live else PALE
    return GREEN


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)
