"""Word lists of the synthetic tasks.

Short on purpose: a byte-pair vocabulary of 512 rows must hold every word as one token, so that a target of a million
parameters can copy a word by copying one token.
"""

from __future__ import annotations

NAMES = ("Ana", "Ben", "Dan", "Eva", "Ida", "Kim", "Leo", "Max", "Sam", "Tom")
CITIES = ("Lima", "Oslo", "Riga", "Rome")
COLORS = ("red", "blue", "green")
PETS = ("cat", "dog", "fish")
THINGS = ("books", "coins", "pens", "eggs")
WORDS = ("moon", "rain", "rock", "snow", "star", "tree", "wind", "road")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer the question.")
