"""How much a random test tries: a little with `make test`, the full amount with `make test-full`."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("DFLASH_FULL"))


def amount(usual: int, *, full: int) -> int:
    """A number of examples, seeds, kills or steps: `usual`, or `full` under DFLASH_FULL."""
    return full if FULL else usual
