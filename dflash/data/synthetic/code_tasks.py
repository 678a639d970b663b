"""Tasks that ask for small Python functions with docstrings and a worked example.

Invariant: the function's name says everything that the code must do (`sum_below_9`), and the example in the docstring is
true: the tests run it with `doctest`. A request names one to three functions, so lengths spread from 50 to 230 tokens.
"""

from __future__ import annotations

from random import Random

from dflash.data.synthetic.conversation import Turn
from dflash.data.synthetic.number_tasks import listed

_MAX_FUNCTIONS = 3
_EXAMPLE = 10
"""The argument of every example of an arithmetic function."""

_ARITHMETIC = {
    "add": ("+", "plus"),
    "subtract": ("-", "minus"),
    "multiply_by": ("*", "times"),
}
_COMPARISONS = {"above": ">", "below": "<", "not": "!="}


def _arithmetic_function(rng: Random) -> tuple[str, str]:
    """Name and source of a function that combines its argument with a constant."""
    verb = rng.choice(tuple(_ARITHMETIC))
    operator, word = _ARITHMETIC[verb]
    constant = rng.randint(2, _EXAMPLE if verb == "subtract" else 40)
    name = f"{verb}_{constant}"
    result = {"+": _EXAMPLE + constant, "-": _EXAMPLE - constant, "*": _EXAMPLE * constant}[operator]
    lines = (
        f"def {name}(x):",
        f'    """Return x {word} {constant}.',
        "",
        f"    >>> {name}({_EXAMPLE})",
        f"    {result}",
        '    """',
        f"    return x {operator} {constant}",
    )
    return name, "\n".join(lines)


def _loop_function(rng: Random) -> tuple[str, str]:
    """Name and source of a function that counts or sums the items of a list that pass a comparison."""
    verb = rng.choice(("count", "sum"))
    condition = rng.choice(tuple(_COMPARISONS))
    constant = rng.randint(1, 60)
    name = f"{verb}_{condition}_{constant}"
    lines = (
        f"def {name}(items):",
        f'    """{verb.capitalize()} the items {condition} {constant}."""',
        "    total = 0",
        "    for item in items:",
        f"        if item {_COMPARISONS[condition]} {constant}:",
        f"            total += {'1' if verb == 'count' else 'item'}",
        "    return total",
    )
    return name, "\n".join(lines)


def _filter_function(rng: Random) -> tuple[str, str]:
    """Name and one-line source of a function that keeps the items of a list that pass a comparison."""
    condition = rng.choice(tuple(_COMPARISONS))
    constant = rng.randint(1, 60)
    name = f"keep_{condition}_{constant}"
    lines = (
        f"def {name}(items):",
        f'    """Keep the items {condition} {constant}."""',
        f"    return [item for item in items if item {_COMPARISONS[condition]} {constant}]",
    )
    return name, "\n".join(lines)


def python_function(rng: Random) -> Turn:
    """A request for one to three functions by name; the answer is their source."""
    makers = (_arithmetic_function, _loop_function, _filter_function)
    functions = dict(rng.choice(makers)(rng) for _ in range(rng.randint(1, _MAX_FUNCTIONS)))
    noun = "function" if len(functions) == 1 else "functions"
    return Turn(f"Write the Python {noun} {listed(list(functions))}.", "\n\n\n".join(functions.values()))
