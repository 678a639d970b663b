"""Record of one check: what was looked at, what was found, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        status: `fail` must stop what follows, `warn` must not; `skip` could not be looked at here.
        message: the value that was found, or why it was not looked at.
        remedy: what to do about it; empty where nothing is to be done.
    """

    name: str
    status: CheckStatus
    message: str
    remedy: str
