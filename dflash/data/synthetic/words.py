"""Word lists of the synthetic tasks, short on purpose: a target of a million parameters must know them by heart."""

from __future__ import annotations

NAMES = (
    "Ana", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo",
    "Mia", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tina", "Vera",
)  # fmt: skip
CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Quito", "Tokyo", "Bern", "Accra", "Riga", "Sofia")
COLORS = ("red", "blue", "green", "black", "white", "yellow", "brown", "pink")
PETS = ("cat", "dog", "bird", "fish", "horse", "goat", "duck", "mouse")
THINGS = ("apples", "books", "coins", "stamps", "cards", "shells", "pens", "eggs")
WORDS = (
    "apple", "bread", "cloud", "door", "earth", "fire", "garden", "house", "island", "jacket", "kite", "lemon",
    "moon", "night", "ocean", "paper", "queen", "river", "stone", "table", "uncle", "valley", "water", "zebra",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful teacher.",
    "Answer the question.",
    "You work with numbers, words and code.",
)
