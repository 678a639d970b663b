"""Tasks on words and records: spelling, reversing, repeating, JSON.

Invariant: letters are separated by spaces wherever they are worked on, so that each is one token and the task is about
order and not about what is inside a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from dflash.data.synthetic.conversation import Turn
from dflash.data.synthetic.number_tasks import listed
from dflash.data.synthetic.words import CITIES, COLORS, LETTERS, NAMES, PETS, WORDS


def _reverse_letters(rng: Random) -> Turn:
    """Three to ten loose letters in reverse order."""
    letters = rng.sample(LETTERS, rng.randint(3, 10))
    return Turn(f"Reverse these letters: {' '.join(letters)}", " ".join(reversed(letters)))


def _spell(rng: Random) -> Turn:
    """Spell one to four known words."""
    words = rng.sample(WORDS, rng.randint(1, 4))
    noun = "word" if len(words) == 1 else "words"
    return Turn(f"Spell the {noun} {listed(words)}.", "\n".join(f"{word}: {' '.join(word)}" for word in words))


def _repeat(rng: Random) -> Turn:
    """One known word in two to twenty numbered lines."""
    word, times = rng.choice(WORDS), rng.randint(2, 20)
    return Turn(f"Write the word {word} {times} times.", "\n".join(f"{i}. {word}" for i in range(1, times + 1)))


def _alphabet(rng: Random) -> Turn:
    """The letters of the alphabet between two letters."""
    first = rng.randrange(0, 23)
    last = rng.randrange(first + 2, 26)
    return Turn(f"List the letters from {LETTERS[first]} to {LETTERS[last]}.", " ".join(LETTERS[first : last + 1]))


_LETTER_TASKS: tuple[Callable[[Random], Turn], ...] = (_reverse_letters, _spell, _repeat, _alphabet)


def letters(rng: Random) -> Turn:
    """One task on letters or words: reverse, spell, repeat or a part of the alphabet."""
    return rng.choice(_LETTER_TASKS)(rng)


_FIELDS: dict[str, Callable[[Random], str | int]] = {
    "name": lambda rng: rng.choice(NAMES),
    "age": lambda rng: rng.randint(5, 90),
    "city": lambda rng: rng.choice(CITIES),
    "color": lambda rng: rng.choice(COLORS),
    "pet": lambda rng: rng.choice(PETS),
}


def json_record(rng: Random) -> Turn:
    """One record with named fields, or a list of one to six short records."""
    if rng.random() < 0.5:
        fields = [key for key in _FIELDS if key == "name" or rng.random() < 0.6]
        record = {key: _FIELDS[key](rng) for key in fields}
        spoken = listed([f"{key} {value}" for key, value in record.items()])
        return Turn(f"Write a JSON record with {spoken}.", json.dumps(record))
    names = rng.sample(NAMES, rng.randint(1, 6))
    key = rng.choice(("age", "city", "pet"))
    records = [{"name": name, key: _FIELDS[key](rng)} for name in names]
    text = "; ".join(f"{record['name']}, {record[key]}" for record in records)
    return Turn(
        f"Write a JSON list of name and {key}: {text}", "[\n" + ",\n".join(f"  {json.dumps(record)}" for record in records) + "\n]"
    )
