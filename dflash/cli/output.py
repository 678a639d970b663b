"""How commands talk: results on standard output, progress and logs on standard error.

With `--json` exactly one JSON object is printed on standard output and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dflash.evaluate.text import OneRecord, clean_library_records, clean_text, terminal_text, to_nowhere

LINE_EVERY_S = 60.0
"""A line this often at least where lines are not rewritten."""

_PACE_EVERY_S = 2.0
_PACE_SAMPLES = 60


def emit(arguments: argparse.Namespace, payload: Any, text: str) -> None:
    """Print `payload` as JSON with `--json`, else `text`; a reader who has seen enough (`| head`) changes no exit code.

    Names and messages come from other people's files too: no character of theirs steers the terminal.
    """
    try:
        print(json.dumps(payload, default=str) if arguments.json else terminal_text(text), flush=True)
    except BrokenPipeError:
        to_nowhere(sys.stdout)


def progress_printer(stream: Any = None) -> Callable[[str, int, int], None]:
    """A progress callback: one rewritten line on a terminal, a line every tenth and every minute elsewhere.

    Both tell the time that is left once it can be told.
    """
    out = stream or sys.stderr
    shown: dict[str, tuple[int, float]] = {}
    pace: dict[str, _Pace] = {}
    width = 0

    def show(label: str, done: int, total: int) -> None:
        nonlocal width
        now_s = time.monotonic()
        left_s = pace.setdefault(label, _Pace()).left_s(done, total, now_s=now_s)
        text = f"{clean_text(label)}: {done}/{total}" + ("" if left_s is None else f", {duration(left_s)} left")
        tenth = 10 * done // max(1, total)
        if out.isatty():
            out.write(f"\r{text}{' ' * (width - len(text))}" + ("\n" if done >= total else ""))
            out.flush()
            width = 0 if done >= total else len(text)
        elif label not in shown or shown[label][0] != tenth or now_s - shown[label][1] >= LINE_EVERY_S:
            print(text, file=out)
            shown[label] = (tenth, now_s)

    return show


class _Pace:
    """Speed over the newest minute or two, so that what was found ready at the start does not count for long."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_PACE_SAMPLES)

    def left_s(self, done: int, total: int, *, now_s: float) -> float | None:
        """Seconds to the end; None while nobody can tell, and at the end."""
        if not self._seen or now_s - self._seen[-1][0] >= _PACE_EVERY_S:
            self._seen.append((now_s, done))
        then_s, before = self._seen[0]
        if done >= total or done <= before or now_s - then_s < 2 * _PACE_EVERY_S:
            return None
        return (total - done) * (now_s - then_s) / (done - before)


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def configure_logging(verbose: bool) -> None:
    """Send the library's log to standard error."""
    clean_library_records()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneRecord("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("dflash").setLevel(logging.DEBUG if verbose else logging.INFO)
