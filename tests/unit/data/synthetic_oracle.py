"""Independent solver of the synthetic tasks: reads only the prompt, knows nothing of the generator's code.

`check_answer(kind, prompt, answer)` raises AssertionError when the answer is not the right one.
"""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable
from typing import Any


def numbers_in(text: str) -> list[int]:
    """All whole numbers of a text in order."""
    return [int(found) for found in re.findall(r"\d+", text)]


def counted(first: int, operator: str, second: int) -> int:
    """The result by counting on fingers, never by the operator itself."""
    if operator == "+":
        return len([*range(first), *range(second)])
    if operator == "-":
        return len(range(second, first))
    return len([None for _ in range(first) for _ in range(second)])


def check_equation(text: str, first: int, operator: str, second: int) -> int:
    """Every side of an equation chain has the value of the question, which is its first side; returns the value."""
    sides = text.split(" = ")
    assert sides[0] == f"{first} {operator} {second}"
    value = counted(first, operator, second)
    for side in sides[1:-1]:
        left, same_operator, right = side.split(" ")
        assert same_operator == operator
        assert counted(int(left), operator, int(right)) == value
        assert int(left) != first
    assert int(sides[-1]) == value
    return value


def check_arithmetic(prompt: str, answer: str) -> None:
    """The operator comes from the prompt's words, the order of the numbers too."""
    first, second = numbers_in(prompt)
    if prompt.startswith(("Add", "Take")):
        first, second = second, first
    words = {"+": (" + ", "plus", "Add"), "-": (" - ", "minus", "Take"), "*": (" * ", "times", "Multiply")}
    (operator,) = [sign for sign, known in words.items() if any(word in prompt for word in known)]
    check_equation(answer, first, operator, second)


def check_word_problem(prompt: str, answer: str) -> None:
    """More if the person gets some, fewer if the person loses some."""
    had, change = numbers_in(prompt)
    name, _, _, thing, *_ = prompt.split()
    equation, sentence = answer.split(". ", 1)
    result = check_equation(equation, had, "+" if "gets" in prompt else "-", change)
    assert sentence == f"{name} has {result} {thing} now."


def check_counting(prompt: str, answer: str) -> None:
    """The listed numbers walk from the first to the last in the asked step."""
    first, last, *step = numbers_in(prompt)
    size = step[0] if step else 1
    assert ("down" in prompt) == (last < first)
    walk = [first]
    while walk[-1] != last:
        walk.append(walk[-1] + (size if last > first else -size))
        assert len(walk) < 1000
    assert answer == ", ".join(str(value) for value in walk)


def check_sorting(prompt: str, answer: str) -> None:
    """Insertion by selection of the smallest remaining number."""
    remaining = numbers_in(prompt)
    ordered = []
    while remaining:
        smallest = min(remaining)
        remaining.remove(smallest)
        ordered.append(smallest)
    if "high to low" in prompt or "down" in prompt:
        ordered.reverse()
    assert answer == ", ".join(map(str, ordered))


def check_times_table(prompt: str, answer: str) -> None:
    """Each row is the row before plus the base."""
    given = numbers_in(prompt)
    if "rows of" in prompt:
        rows, base = given
    elif prompt.startswith("Multiply"):
        base, _, rows = given
    else:
        base, rows = given
    product, lines = 0, []
    for row in range(1, rows + 1):
        product += base
        lines.append(f"{base} * {row} = {product}")
    assert answer.split("\n") == lines


_SAMPLE_ITEMS = [0, 3, 7, 8, 15, 15, 29, 30, 31, 44, 59, 60, 61, 90]


def _expected_behaviour(name: str) -> Callable[[Any], Any]:
    """What a function of this name must do, said in other words than the generated source."""
    *words, text = name.split("_")
    constant = int(text)
    verb = words[0]
    scalar = {"add": lambda x: x - -constant, "subtract": lambda x: x + -constant, "multiply": lambda x: constant * x}
    if verb in scalar:
        return scalar[verb]
    keeps = {"above": constant.__lt__, "below": constant.__gt__, "not": constant.__ne__}[words[1]]
    gather = {"keep": list, "count": lambda kept: len(list(kept)), "sum": sum}[verb]
    return lambda items: gather(filter(keeps, items))


def check_python_function(prompt: str, answer: str) -> None:
    """Run the source: the names asked for, their behaviour on samples, and the examples of their docstrings."""
    asked = re.findall(r"[a-z]+(?:_[a-z]+)*_\d+", prompt)
    namespace: dict[str, Any] = {}
    exec(compile(answer, "answer", "exec"), namespace)  # noqa: S102 - the generator's own source is what is tested
    defined = re.findall(r"^def (\w+)", answer, flags=re.MULTILINE)
    assert defined == asked != []
    for name in asked:
        expected = _expected_behaviour(name)
        samples: list[Any] = [_SAMPLE_ITEMS, []] if "(items)" in answer.split(f"def {name}")[1][:7] else [0, 1, 10, 77]
        for sample in samples:
            assert namespace[name](sample) == expected(sample)
        assert namespace[name].__doc__
        for example in doctest.DocTestFinder(recurse=False).find(namespace[name], name, globs=namespace):
            assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def check_json_record(prompt: str, answer: str) -> None:
    """The parsed JSON equals the record or list that the prompt spells out."""
    parsed = json.loads(answer)
    values = {"age": int}
    if "JSON list" in prompt:
        key = re.search(r"name and (\w+): ", prompt)
        assert key is not None
        pairs = [entry.split(", ") for entry in prompt.split(": ", 1)[1].split("; ")]
        convert = values.get(key[1], str)
        assert parsed == [{"name": name, key[1]: convert(value)} for name, value in pairs]
        return
    body = prompt.removeprefix("Write a JSON record with ").rstrip(".")
    fields = [entry.split(" ") for entry in re.split(r", | and ", body)]
    assert parsed == {key: values.get(key, str)(value) for key, value in fields}
    assert list(parsed) == [key for key, _ in fields]


def check_letters(prompt: str, answer: str) -> None:
    """Reverse, spell, repeat or alphabet, told apart by the prompt's wording."""
    if ":" in prompt:
        given = prompt.split(": ")[1]
        assert answer == given[::-1]
    elif "pell" in prompt:
        words = re.split(r", | and ", re.split(r"the words? ", prompt)[1].rstrip("."))
        assert answer.split("\n") == [f"{word}: {' '.join(list(word))}" for word in words]
    elif "times" in prompt:
        (count,) = numbers_in(prompt)
        lines = answer.split("\n")
        word = lines[0].removeprefix("1. ")
        assert f" {word} " in prompt.replace(".", " ")
        assert lines == [f"{number}. {word}" for number in range(1, count + 1)]
    else:
        first, last = re.findall(r"\b([a-z])\b", prompt)
        assert answer == " ".join(chr(code) for code in range(ord(first), ord(last) + 1))


CHECKS: dict[str, Callable[[str, str], None]] = {
    "arithmetic": check_arithmetic,
    "word_problem": check_word_problem,
    "counting": check_counting,
    "sorting": check_sorting,
    "times_table": check_times_table,
    "python_function": check_python_function,
    "json_record": check_json_record,
    "letters": check_letters,
}


def check_some(prompt: str, answer: str) -> str:
    """Return the one kind whose check accepts the turn; AssertionError if none does."""
    for kind, check in CHECKS.items():
        try:
            check(prompt, answer)
        except (AssertionError, ValueError, IndexError, KeyError, SyntaxError, NameError):
            continue
        return kind
    raise AssertionError(f"no check accepts {prompt!r} -> {answer!r}")
