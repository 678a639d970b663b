"""A comparison for a terminal and for programs."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

from dflash.compare.compare import Comparison
from dflash.compare.contest import Difference
from dflash.evaluate.text import aligned, clean_text
from dflash.records import RunSummary, to_dict

SHOWN_DIFFERENCES = 12

SUMMARY_ROWS: dict[str, Callable[[RunSummary], str]] = {
    "speed-up": lambda summary: "n/a" if summary.speedup is None else f"{summary.speedup:.2f}x",
    "steps": lambda summary: str(summary.steps),
    "training": lambda summary: f"{summary.train_time_s:.0f} s",
    "padding": lambda summary: f"{1 - summary.padding_efficiency:.1%}",
    "wait for features": lambda summary: f"{summary.feature_wait_frac:.1%}",
    "health": lambda summary: summary.health_verdict,
}
"""What only a finished run can tell."""


def cell_words(cell: tuple[float, float | None, float | None] | None) -> list[str]:
    """A length and its interval, where there are such, as two words."""
    if cell is None:
        return ["-"]
    length, low, high = cell
    return [f"{length:.2f}", *([] if low is None or high is None else [f"[{low:.2f}, {high:.2f}]"])]


def comparison_text(comparison: Comparison) -> str:
    """Verdicts, the table of acceptance and loss, what differs; log text is cleaned of control characters."""
    names = [run.name for run in comparison.runs]
    lines = [*comparison.verdicts, *(f"note: {text}" for text in comparison.warnings), ""]
    table = [["", *names]]
    for row in comparison.acceptance:
        label = "acceptance" if row.kind == "all" else f"  {row.kind}"
        table.append([label, *(" ".join(cell_words(cell)) for cell in row.cells)])
    for loss in comparison.losses:
        label = "loss at equal tokens" if loss.bucket == "all" else f"  bucket {loss.bucket}"
        table.append([label, *("-" if isnan(cell) else f"{cell:.4f}" for cell in loss.cells)])
    table.append(["tokens seen", *(f"{run.curves.tokens[-1]:,.0f}" for run in comparison.runs)])
    table.append(["segments", *(str(len(run.curves.segments)) for run in comparison.runs)])
    for label, tell in SUMMARY_ROWS.items():
        table.append([label, *("-" if run.summary is None else tell(run.summary) for run in comparison.runs)])
    lines += aligned(table, left=1)
    for title, facts in (("setting", comparison.settings), ("data", comparison.data)):
        for name, cells in list(facts.items())[:SHOWN_DIFFERENCES]:
            lines.append(f"{title} {name}: {' | '.join(cells)}")
        if len(facts) > SHOWN_DIFFERENCES:
            lines.append(f"and {len(facts) - SHOWN_DIFFERENCES} more of them in the page")
    return "\n".join(clean_text(line) for line in lines)


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON-able values (NaN as null)."""
    names = [run.name for run in comparison.runs]
    return {
        "reference": names[0],
        "runs": names,
        "verdicts": [
            {
                "run": name,
                "word": contest[0].word if contest else None,
                "sentence": sentence,
                "differences": [_data(each) for each in contest],
            }
            for name, sentence, contest in zip(names[1:], comparison.verdicts, comparison.contests, strict=True)
        ],
        "acceptance": {row.kind: dict(zip(names, row.cells, strict=True)) for row in comparison.acceptance},
        "loss_at_equal_tokens": {
            row.bucket: {name: None if isnan(cell) else cell for name, cell in zip(names, row.cells, strict=True)}
            for row in comparison.losses
        },
        "common_tokens": comparison.common_tokens,
        "summaries": {run.name: None if run.summary is None else to_dict(run.summary) for run in comparison.runs},
        "settings": {name: dict(zip(names, cells, strict=True)) for name, cells in comparison.settings.items()},
        "data": {name: dict(zip(names, cells, strict=True)) for name, cells in comparison.data.items()},
        "history": dict(zip(names, map(list, comparison.history), strict=True)),
        "warnings": list(comparison.warnings),
    }


def _data(difference: Difference) -> dict[str, Any]:
    return {
        "kind": difference.kind,
        "word": difference.word,
        "reference": difference.reference,
        "other": difference.other,
        "difference": difference.difference,
        "interval": [difference.low, difference.high],
        "confidence": difference.confidence,
        "prompts": difference.prompts,
        "paired": difference.paired,
        "chance": difference.chance,
    }
