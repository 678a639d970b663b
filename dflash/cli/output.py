"""How commands talk: results on standard output, progress and logs on standard error.

With `--json` exactly one JSON object is printed on standard output and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from typing import Any


def emit(arguments: argparse.Namespace, payload: Any, text: str) -> None:
    """Print `payload` as JSON with `--json`, else `text`."""
    print(json.dumps(payload, default=str) if arguments.json else text)


def progress_printer(stream: Any = None) -> Callable[[str, int, int], None]:
    """A progress callback: one rewritten line on a terminal, a line every tenth elsewhere."""
    out = stream or sys.stderr
    shown: dict[str, int] = {}

    def show(label: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        if out.isatty():
            out.write(f"\r{label}: {done}/{total}" + ("\n" if done >= total else ""))
            out.flush()
        elif shown.get(label) != tenth:
            print(f"{label}: {done}/{total}", file=out)
        shown[label] = tenth

    return show


def configure_logging(verbose: bool) -> None:
    """Send the library's log to standard error."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("dflash").setLevel(logging.DEBUG if verbose else logging.INFO)
