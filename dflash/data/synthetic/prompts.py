"""Normalised prompt hashes, and the train / held-out border that is drawn with them.

Invariant: two prompts that differ only in case, spacing, Unicode form or sentence punctuation have the same hash, so
they always fall on the same side. The side is a property of the text alone (no seed, no list of used prompts): whatever
generator or seed is used later, a held-out prompt can never have been trained on.
The price: a fixed eighth of every kind's prompts is never available for training.
"""

from __future__ import annotations

import hashlib
import unicodedata

from dflash.data.synthetic.conversation import Split

HELDOUT_SHARES = 8
"""One prompt in this many is held out."""

# Kept although Unicode calls them punctuation: "7 - 2", "7 * 2", "7 / 2" and "7 % 2" are different questions.
_OPERATORS = frozenset("-*/%")


class _Spaces(dict[int, str]):
    """Code point -> what stands for it, filled as characters are met: `str.translate` then runs at C speed."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = " " if unicodedata.category(char)[0] == "P" and char not in _OPERATORS else char
        return self[code]


_SPACES = _Spaces()


def normalise_prompt(text: str) -> str:
    """Return `text` in NFKC form, case-folded, without punctuation (but - * / %), with single spaces."""
    return " ".join(_folded(text).translate(_SPACES).split())


def _folded(text: str) -> str:
    if text.isascii():  # in NFKC form already; most prompts are, and every training prompt comes through here
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def prompt_hash(text: str) -> str:
    """Return the SHA-256 of the normalised prompt as 64 hexadecimal digits."""
    return hashlib.sha256(normalise_prompt(text).encode()).hexdigest()


def split_of(user_turn_text: str) -> Split:
    """Return the split that a user turn belongs to: held-out for one eighth of all normalised hashes."""
    return "heldout" if int(prompt_hash(user_turn_text)[:8], 16) % HELDOUT_SHARES == 0 else "train"
