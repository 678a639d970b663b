"""Several runs side by side: one column of a table a figure, one row a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.errors import EvaluationError
from dflash.evaluate.text import clean_text
from dflash.records import RunSummary

COLUMNS = (
    "run", "acceptance", "95% interval", "untrained", "speed-up", "lossless", "health", "steps", "train s", "padding", "wait",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of runs.

    Attributes:
        text: aligned plain-text table; the best acceptance length carries a `*`.
        rows: one mapping a run with unrounded values, keyed as `summary.json` plus `gain` over the first run.
    """

    text: str
    rows: tuple[dict[str, Any], ...]


def compare_summaries(summaries: Sequence[RunSummary]) -> Comparison:
    """Compare finished runs in the order given.

    Args:
        summaries: at least one.

    Returns:
        Table and rows.

    Raises:
        EvaluationError: there is nothing to compare.
    """
    if not summaries:
        raise EvaluationError("no run summaries to compare", remedy="give at least one run folder that holds summary.json")
    first = summaries[0].acceptance_length
    rows = tuple(_row(summary, first) for summary in summaries)
    best = max(range(len(rows)), key=lambda index: summaries[index].acceptance_length)
    cells = [list(COLUMNS)] + [_cells(summary, best=index == best) for index, summary in enumerate(summaries)]
    return Comparison(_aligned(cells), rows)


def _row(summary: RunSummary, first: float) -> dict[str, Any]:
    return {
        "run": summary.run,
        "acceptance_length": summary.acceptance_length,
        "acceptance_ci95": list(summary.acceptance_ci95),
        "acceptance_length_untrained": summary.acceptance_length_untrained,
        "gain": summary.acceptance_length / first - 1.0,
        "speedup": summary.speedup,
        "lossless": summary.lossless,
        "health_verdict": summary.health_verdict,
        "steps": summary.steps,
        "train_time_s": summary.train_time_s,
        "padding_efficiency": summary.padding_efficiency,
        "feature_wait_frac": summary.feature_wait_frac,
        "checkpoint": summary.checkpoint,
        "mlflow_run_id": summary.mlflow_run_id,
    }


def _cells(summary: RunSummary, *, best: bool) -> list[str]:
    low, high = summary.acceptance_ci95
    return [
        clean_text(summary.run),
        f"{summary.acceptance_length:.3f}{'*' if best else ' '}",
        f"{low:.2f}-{high:.2f}",
        f"{summary.acceptance_length_untrained:.2f}",
        "n/a" if summary.speedup is None else f"{summary.speedup:.2f}x",
        "yes" if summary.lossless else "NO",
        clean_text(summary.health_verdict),
        str(summary.steps),
        f"{summary.train_time_s:.0f}",
        f"{summary.padding_efficiency:.1%}",
        f"{summary.feature_wait_frac:.1%}",
    ]


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
