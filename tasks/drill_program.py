"""The drill as a program: a stack for its length, one fault after the other, an exit code that can be trusted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash.config import load_config
from dflash.drill.verdict import is_right
from dflash.errors import EXIT_OK, DflashError
from tasks.drill import Drills
from tasks.drill_stack import drill_stack

EXIT_WRONG = 1
EXIT_SIGTERM = 143


def drill_program(names: Sequence[str], *, config: str, overrides: Sequence[str], seed: int, root: Path, limit_s: float) -> int:
    """Start a stack, drill every fault on it, stop it; the exit code is 0 only if every verdict is right."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(EXIT_SIGTERM))  # servers are stopped on the way out
    try:
        load_config(config, overrides=overrides)
        print("starting server, MLflow, workers, deployments (about half a minute)", flush=True)
        with drill_stack(root) as stack:
            drills = Drills(stack, config, overrides, limit_s, lambda line: print(line, flush=True))
            right = [is_right(drills.drill(name, seed=seed)[1]) for name in names]
    except DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK if all(right) else EXIT_WRONG
