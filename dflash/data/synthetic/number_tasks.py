"""Tasks on numbers: sums, small stories, counting, sorting, times tables.

Invariant: numbers stay below 200 and every intermediate result is written out, because the answer must be learnable by
a model of about a million parameters that reads digits one by one.
"""

from __future__ import annotations

from random import Random

from dflash.data.synthetic.conversation import Turn
from dflash.data.synthetic.words import NAMES, THINGS


def listed(items: list[str]) -> str:
    """Return items as "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _worked(a: int, operator: str, b: int) -> tuple[str, int]:
    """Return "a + b = ..." worked out tens first, then ones, and the result; operator is "+" or "-"."""
    sign = 1 if operator == "+" else -1
    result = a + sign * b
    tens, ones = b // 10 * 10, b % 10
    between = f" = {a + sign * tens} {operator} {ones}" if tens and ones else ""
    return f"{a} {operator} {b}{between} = {result}", result


def arithmetic(rng: Random) -> Turn:
    """One sum, difference or product; the answer is the equation, worked out in two steps where it is hard."""
    kind = rng.choice(("add", "add", "subtract", "multiply"))
    if kind == "add":
        a, b = rng.randint(1, 99), rng.randint(1, 60)
        forms = (f"What is {a} + {b}?", f"Add {b} to {a}.", f"How much is {a} plus {b}?")
        return Turn(rng.choice(forms), _worked(a, "+", b)[0])
    if kind == "subtract":
        a = rng.randint(2, 99)
        b = rng.randint(1, min(a, 60))
        forms = (f"What is {a} - {b}?", f"Take {b} from {a}.", f"How much is {a} minus {b}?")
        return Turn(rng.choice(forms), _worked(a, "-", b)[0])
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    forms = (f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"How much is {a} times {b}?")
    return Turn(rng.choice(forms), f"{a} * {b} = {a * b}")


def word_problem(rng: Random) -> Turn:
    """A story of one person and two amounts; the answer shows the sum and then says the result."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.5:
        a, b = rng.randint(2, 60), rng.randint(2, 30)
        story = f"gets {b} more"
        equation, result = _worked(a, "+", b)
    else:
        a = rng.randint(5, 60)
        b = rng.randint(2, min(a - 1, 30))
        story = f"loses {b}"
        equation, result = _worked(a, "-", b)
    prompt = f"{name} has {a} {thing} and {story}. How many {thing} does {name} have now?"
    return Turn(prompt, f"{equation}. {name} has {result} {thing} now.")


def counting(rng: Random) -> Turn:
    """A list of numbers up or down in steps of 1 to 10; from 3 to 56 numbers."""
    step = rng.choice((1, 1, 2, 3, 5, 10))
    length = rng.randint(3, min(56, 90 // step + 1))
    low = rng.randint(1, 99 - step * (length - 1))
    values = [low + step * i for i in range(length)]
    down = rng.random() < 0.35
    if down:
        values.reverse()
    word = "down " if down else ""
    by = "" if step == 1 else f" in steps of {step}"
    forms = (
        f"Count {word}from {values[0]} to {values[-1]}{by}.",
        f"List the numbers {word}from {values[0]} to {values[-1]}{by}.",
    )
    return Turn(rng.choice(forms), ", ".join(map(str, values)))


def sorting(rng: Random) -> Turn:
    """Three to six different numbers below 100, put in rising or falling order."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    falling = rng.random() < 0.3
    text = ", ".join(map(str, numbers))
    forms = (
        (f"Sort these numbers down: {text}.", f"List these numbers from high to low: {text}.")
        if falling
        else (f"Sort these numbers: {text}.", f"List these numbers from low to high: {text}.")
    )
    return Turn(rng.choice(forms), ", ".join(map(str, sorted(numbers, reverse=falling))))


def times_table(rng: Random) -> Turn:
    """The rows of one times table, one a line."""
    base, rows = rng.randint(2, 12), rng.randint(3, 18)
    forms = (
        f"Write the {base} times table up to {rows}.",
        f"Write {rows} rows of the {base} times table.",
        f"List {rows} rows of the {base} times table.",
        f"Multiply {base} by the numbers from 1 to {rows}.",
    )
    return Turn(rng.choice(forms), "\n".join(f"{base} * {i} = {base * i}" for i in range(1, rows + 1)))
