"""Rows that cannot be used: never lost silently, counted by reason, and limited in number.

Invariant: every row that was read ends as a sample or as a quarantined row with its origin, and a reason that
starts with one of the codes below (`code: detail`).
Hard decision: faults of the input follow `data.bad_rows`; what the target itself did (no stop token, nothing said)
is always set aside, because no mending of the input would change it. Both count against `data.max_bad_frac`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dflash.errors import DataError
from dflash.records import QuarantinedRow
from dflash.storage import atomic_write_text

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
        max_bad_frac: share of all rows that may end here.
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
        """Stop the build if too large a share of `total_rows` ended here, or if nothing is left.

        Raises:
            DataError: names the shares by reason; the rows are in `listed_in` by then.
        """
        bad = len(self.rows)
        if bad <= self._max_bad_frac * total_rows and bad < total_rows:
            return
        self.write(listed_in)
        codes = self.counts
        worst = max(codes, key=lambda code: codes[code], default="empty")
        example = f"; e.g. {self.rows[0].origin}: {self.rows[0].reason}" if self.rows else ""
        raise DataError(
            f"{bad} of {total_rows} rows cannot be used ({', '.join(f'{code} {count}' for code, count in codes.items())}), "
            f"data.max_bad_frac is {self._max_bad_frac}{example}",
            remedy=f"{_REMEDIES.get(worst, 'mend the rows')}, or raise data.max_bad_frac; all of them are listed in {listed_in}"
            if self.rows
            else "check data.files: they hold no row at all",
        )

    def write(self, path: Path) -> None:
        """Write one JSON object a line: origin and reason."""
        atomic_write_text(path, _lines(self.rows))


def _lines(rows: Iterable[QuarantinedRow]) -> str:
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
