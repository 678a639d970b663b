"""The closing table of a run: what a person reads first, in 80 columns of plain text.

Invariant: no line is longer than 80 columns except a path or command that has to be copied as it stands, and nothing in it
is a control character.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from dflash.evaluate.rivals import rival_lines
from dflash.evaluate.sweep_text import gain_text, setting_text
from dflash.evaluate.text import bar, clean_text
from dflash.records import RunSummary

WIDTH = 80
LABEL_WIDTH = 22
BAR_WIDTH = 30


def closing_table(summary: RunSummary, *, commands: Sequence[str]) -> str:
    """The closing table as text.

    Args:
        summary: the run's figures.
        commands: shell commands to go on with (user interfaces, another evaluation), printed verbatim.

    Returns:
        Lines joined by newlines, none behind the last.
    """
    lines = [
        "=" * WIDTH,
        *_wrapped("run", clean_text(summary.run)),
        "-" * WIDTH,
        _line(
            "acceptance length",
            f"{_figure(summary.acceptance_length_untrained, 2)} -> {_figure(summary.acceptance_length, 2)}"
            f"   ({_interval(summary)})",
        ),
        _line("", "tokens committed per target forward, untrained -> trained"),
        *_position_lines(summary.acceptance_per_position),
        _line("speed-up", _speedup(summary)),
        _line("lossless", _lossless(summary.lossless)),
        *_setting_lines(summary),
        *(line for warning in summary.warnings for line in _wrapped("WARNING", clean_text(warning))),
        *([] if summary.baselines is None else ["-" * WIDTH, *rival_lines(summary.baselines)]),
        "-" * WIDTH,
        _line("trained", f"{summary.steps} steps in {_figure(summary.train_time_s, 1)} s"),
        _line("padding efficiency", f"{summary.padding_efficiency:.1%} of the trained tokens are real"),
        _line("longest bucket run", f"{summary.longest_bucket_run} batches of one length bucket in a row"),
        _line("waiting for features", f"{summary.feature_wait_frac:.1%} of the drafter's time"),
        *_stage_lines(summary),
        _line("health", clean_text(summary.health_verdict)),
        *([] if not summary.reused else _wrapped("reused", clean_text(", ".join(summary.reused)))),
        "-" * WIDTH,
        "checkpoint",
        f"  {clean_text(summary.checkpoint)}",
        *([] if not commands else ["next", *(f"  {clean_text(command)}" for command in commands)]),
        "=" * WIDTH,
    ]
    return "\n".join(line.rstrip() for line in lines)


def _interval(summary: RunSummary) -> str:
    if summary.acceptance_ci95 is None:
        return "no interval: one prompt"
    low, high = summary.acceptance_ci95
    return f"{100 * summary.confidence:g} % interval {_figure(low, 2)} to {_figure(high, 2)}"


def _setting_lines(summary: RunSummary) -> list[str]:
    best = summary.best_setting
    return [] if best is None else [*_wrapped("best setting", setting_text(best)), *_wrapped("", gain_text(best))]


def _stage_lines(summary: RunSummary) -> list[str]:
    if not summary.stage_busy_frac:
        return []
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stage_busy_frac.items())
    return [*_wrapped("stages busy", clean_text(busy)), *_wrapped("", clean_text(summary.split_advice))]


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}"


def _wrapped(label: str, text: str) -> list[str]:
    parts = textwrap.wrap(text, WIDTH - LABEL_WIDTH) or [""]
    return [_line(label if index == 0 else "", part) for index, part in enumerate(parts)]


def _position_lines(survival: Sequence[float]) -> list[str]:
    lines = []
    for position, frac in enumerate(survival, start=1):
        label = "accepted up to draft" if position == 1 else ""
        lines.append(_line(label, f"{position:>3}  {bar(frac, width=BAR_WIDTH)}  {frac:6.1%}"))
    return lines


def _figure(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "n/a"


def _lossless(lossless: bool) -> str:
    return "yes, same tokens as plain decoding" if lossless else "NO, see eval/ for the prompts that differ"


def _speedup(summary: RunSummary) -> str:
    if summary.speedup is None or not math.isfinite(summary.speedup):
        return "n/a"
    how = f"sampling at {summary.temperature:g}" if summary.temperature else "greedy decoding"
    return f"{summary.speedup:.2f}x over plain {how}, prefill left out"
