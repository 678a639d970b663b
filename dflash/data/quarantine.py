"""Why a row cannot be used: the reasons, and the error that carries one. `bad_rows` counts, lists and judges them.

Invariant: every row that was read ends as samples or as a quarantined row with its origin, and a reason that starts with
one of the codes below (`code: detail`). Of a row that ends as samples, every context that is in none of them is listed too.
Hard decision: faults of the input follow `data.bad_rows` and count against `data.max_bad_frac`. What the target itself did
(no stop token, nothing said) is always set aside and only warned about: no mending of the input would change it, and
stopping would throw away the hours that its other answers took.
"""

from __future__ import annotations

from typing import Literal

from dflash.errors import DataError
from dflash.records import QuarantinedRow

BadRowCode = Literal[
    "not_json", "not_utf8", "row_too_large", "wrong_type", "empty", "turn_order", "duplicate_id", "no_answer", "template",
    "contradiction", "over_long", "no_supervised_pair", "unfinished", "empty_answer", "unanswered", "part_over_long",
    "part_no_supervised_pair",
]  # fmt: skip

# not_json .. duplicate_id: found while reading; no_answer .. no_supervised_pair: while rendering; unfinished .. unanswered: in
# the target's answers; part_...: one context of a conversation whose other contexts are samples.

MADE_BY_THE_TARGET = frozenset({"unfinished", "empty_answer", "unanswered"})

PART_PREFIX = "part_"
"""How the codes of parts begin: what is left out is listed and counted, but the row is used and no row is faulty."""

REMEDIES: dict[str, str] = {
    "over_long": "raise data.max_length_tokens or set data.over_long: truncate or split",
    "contradiction": "choose data.template_flags that fit the answers: a prompt that opens or closes the reasoning needs answers "
    "that go on from there",
    "unfinished": "raise data.answers.max_new_tokens or set data.answers.keep_unfinished: true",
    "unanswered": "their reasons tell why the server fails on them; remove the data set to ask again, all other answers are kept",
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
            remedy=REMEDIES.get(code, "mend the row, or set data.bad_rows: quarantine to build without such rows"),
        )
        self.row = QuarantinedRow(origin=origin, reason=f"{code}: {detail}")
