"""Rows that cannot be used, on the way to their file: never lost silently, counted by reason, judged for the whole build.

Invariant: every row that was read ends as samples or as one line of a unit's quarantine file, and every context of it that
is in no sample has a line of its own (`part_...`), which counts as no faulty row.
Hard decision: a unit stops only for policies that forbid a single row (`error`). The share of bad rows is judged over all
units when they are there, so a small bad file does not stop a large good build, and raising the share repeats no work.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dflash.config import DataConfig
from dflash.data.quarantine import MADE_BY_THE_TARGET, PART_PREFIX, REMEDIES, BadRowError
from dflash.errors import DataError
from dflash.records import QuarantinedRow

logger = logging.getLogger(__name__)


class BadRowFile:
    """A unit's quarantine file in the making; use as a context manager.

    Args:
        path: local file to write: one JSON object a line, origin and reason.
        data: the policies.
    """

    def __init__(self, path: Path, data: DataConfig) -> None:
        self.path = path
        self._data = data
        self._counts: Counter[str] = Counter()
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def add(self, row: QuarantinedRow) -> None:
        """Set a row aside.

        Raises:
            BadRowError: the policy for this reason is `error`.
        """
        refuse_if_forbidden(row, self._data)
        self._counts[reason_code(row)] += 1
        self._file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by reason code, in alphabetical order."""
        return dict(sorted(self._counts.items()))


def reason_code(row: QuarantinedRow) -> str:
    """The class of a reason (`code: detail`)."""
    return row.reason.partition(":")[0]


def refuse_if_forbidden(row: QuarantinedRow, data: DataConfig) -> None:
    """Stop at a bad row if no such row is tolerated.

    Raises:
        BadRowError: the policy for its reason is `error`.
    """
    code, _, detail = row.reason.partition(": ")
    if forbids(code, data):
        raise BadRowError(code, detail, origin=row.origin)  # type: ignore[arg-type]


def forbids(code: str, data: DataConfig) -> bool:
    """Whether a single row with this reason stops the build."""
    policy = data.over_long if code == "over_long" else data.bad_rows
    return policy == "error" and code not in MADE_BY_THE_TARGET and not code.startswith(PART_PREFIX)


def check_share(counts: Mapping[str, int], *, rows: int, data: DataConfig, example: QuarantinedRow | None, listed_in: str) -> None:
    """Stop the build if too large a share of all rows is faulty, or if nothing is left to learn from.

    Args:
        counts: bad rows, and left out parts of others, by reason code.
        rows: rows read in all.
        data: the share that is tolerated.
        example: one of the bad rows, for the message.
        listed_in: where all of them are listed, or how to list them.

    Raises:
        DataError: names the counts by reason.
    """
    if not rows:
        raise DataError("the source holds no row at all", remedy="check data.files")
    counts = {code: count for code, count in counts.items() if not code.startswith(PART_PREFIX)}
    faulty = {code: count for code, count in counts.items() if code not in MADE_BY_THE_TARGET}
    too_many = sum(faulty.values()) > data.max_bad_frac * rows
    if not too_many and sum(counts.values()) < rows:
        return
    blamed = faulty if too_many else counts
    worst = max(blamed, key=lambda code: blamed[code])
    shown = "" if example is None else f"; e.g. {example.origin}: {example.reason}"
    left = rows - sum(counts.values())
    limit = f"data.max_bad_frac is {data.max_bad_frac}" if left else "nothing is left to learn from"
    raise DataError(
        f"{rows - left} of {rows} rows cannot be used ({_listed(counts)}), {limit}{shown}",
        remedy=f"{REMEDIES.get(worst, 'mend the rows')}{', or raise data.max_bad_frac' if left else ''}; {listed_in}",
    )


def warn_of_answers(counts: Mapping[str, int], *, rows: int, data: DataConfig) -> None:
    """Say what the target's own answers cost, if it is more than the share allowed to faulty rows."""
    codes = {code: count for code, count in counts.items() if code in MADE_BY_THE_TARGET}
    if sum(codes.values()) > data.max_bad_frac * rows:
        worst = max(codes, key=lambda code: codes[code])
        logger.warning(
            "%d of %d conversations are left out for their answers (%s); to keep more of them, %s",
            sum(codes.values()), rows, _listed(codes), REMEDIES[worst],
        )  # fmt: skip


def _listed(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in codes.items())
