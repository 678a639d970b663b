"""Rows that cannot be used: never lost silently, counted by reason, and limited in number.

Invariant: every row that was read ends as a sample or as a quarantined row with its origin, and a reason that
starts with one of the codes below (`code: detail`).
Hard decision: faults of the input follow `data.bad_rows` and count against `data.max_bad_frac`. What the target itself did
(no stop token, nothing said) is always set aside and only warned about: no mending of the input would change it, and
stopping would throw away the hours that its other answers took.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dflash.errors import DataError
from dflash.records import QuarantinedRow
from dflash.storage import atomic_write_text

logger = logging.getLogger(__name__)

BadRowCode = Literal[
    "not_json", "wrong_type", "empty", "turn_order", "duplicate_id", "no_answer", "template", "over_long",
    "no_supervised_pair", "unfinished", "empty_answer",
]  # fmt: skip

_MADE_BY_THE_TARGET = frozenset({"unfinished", "empty_answer"})

_REMEDIES: dict[str, str] = {
    "over_long": "raise data.max_length_tokens or set data.over_long: truncate",
    "unfinished": "raise data.answers.max_new_tokens or set data.answers.keep_unfinished: true",
    "empty_answer": "check that the chat template fits the target: it says nothing to these prompts",
}


class BadRowError(DataError):
    """One row cannot be used; the caller decides by policy whether that stops the build.

    Args:
        code: reason class, counted in the manifest.
        detail: what is wrong and which value it was.
        origin: `file:line` or the generator's name.
    """

    def __init__(self, code: BadRowCode, detail: str, *, origin: str) -> None:
        super().__init__(
            f"{origin}: {code}: {detail}",
            remedy=_REMEDIES.get(code, "mend the row, or set data.bad_rows: quarantine to build without such rows"),
        )
        self.row = QuarantinedRow(origin=origin, reason=f"{code}: {detail}")


class Quarantine:
    """Collects unusable rows under the configured policies.

    Args:
        bad_rows: `error` stops at the first faulty input row.
        over_long: `error` stops at the first sample above the length limit.
        max_bad_frac: share of all rows that may be faulty.
    """

    def __init__(self, *, bad_rows: str, over_long: str, max_bad_frac: float) -> None:
        self._bad_rows = bad_rows
        self._over_long = over_long
        self._max_bad_frac = max_bad_frac
        self.rows: list[QuarantinedRow] = []

    def add(self, row: QuarantinedRow) -> None:
        """Set a row aside.

        Raises:
            BadRowError: the policy for this reason is `error`.
        """
        code, _, detail = row.reason.partition(": ")
        policy = self._over_long if code == "over_long" else self._bad_rows
        if policy == "error" and code not in _MADE_BY_THE_TARGET:
            raise BadRowError(code, detail, origin=row.origin)  # type: ignore[arg-type]
        self.rows.append(row)

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by reason code, in alphabetical order."""
        return dict(sorted(Counter(row.reason.partition(":")[0] for row in self.rows).items()))

    def check(self, *, total_rows: int, listed_in: Path) -> None:
        """Stop the build if too large a share of `total_rows` is faulty, or if nothing is left to learn from.

        Raises:
            DataError: names the counts by reason; the rows are in `listed_in` by then.
        """
        codes = self.counts
        faulty = {code: count for code, count in codes.items() if code not in _MADE_BY_THE_TARGET}
        too_many = sum(faulty.values()) > self._max_bad_frac * total_rows
        if not too_many and len(self.rows) < total_rows:
            return
        if not self.rows:
            raise DataError("the source holds no row at all", remedy="check data.files")
        self.write(listed_in)
        blamed = faulty if too_many else codes
        worst = max(blamed, key=lambda code: blamed[code])
        raise DataError(
            f"{len(self.rows)} of {total_rows} rows cannot be used ({_listed(codes)}), data.max_bad_frac is "
            f"{self._max_bad_frac}; e.g. {self.rows[0].origin}: {self.rows[0].reason}",
            remedy=f"{_REMEDIES.get(worst, 'mend the rows')}, or raise data.max_bad_frac; all are listed in {listed_in}",
        )

    def warn(self, *, total_rows: int) -> None:
        """Say what the target's own answers cost, if it is more than the share allowed to faulty rows."""
        codes = {code: count for code, count in self.counts.items() if code in _MADE_BY_THE_TARGET}
        if sum(codes.values()) > self._max_bad_frac * total_rows:
            worst = max(codes, key=lambda code: codes[code])
            logger.warning(
                "%d of %d conversations are left out for their answers (%s); to keep more of them, %s",
                sum(codes.values()), total_rows, _listed(codes), _REMEDIES[worst],
            )  # fmt: skip

    def write(self, path: Path) -> None:
        """Write one JSON object a line: origin and reason."""
        atomic_write_text(path, _lines(self.rows))


def _listed(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in codes.items())


def _lines(rows: Iterable[QuarantinedRow]) -> str:
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
