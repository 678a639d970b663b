"""Every error that a person meets says what to do: a walk over each place in the source where one is made."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest

from dflash import errors
from dflash.data.quarantine import BadRowError
from dflash.errors import DflashError

ROOT = Path(__file__).parents[2]
PACKAGES = ("dflash", "tasks", "flows", "prefect_dflash")
SHORTEST = 8
"""Characters of a remedy that could be one: `wait`, `n/a` and the like say nothing."""

# What input can cause never leaves as one of these, but for validators: pydantic gathers them, and `load_config` adds the remedy.
BARE = {"Exception", "RuntimeError", "ValueError", "KeyError", "TypeError", "NotImplementedError"}
VALIDATORS = "dflash/config"
ALLOWED_BARE = {
    # Invariants of our own code, Python's own protocols (a sequence, a file), and what the caller turns into an error of ours.
    "dflash/data/consumption.py", "dflash/data/served_protocol.py", "dflash/evaluate/proposers.py",
    "dflash/health/detectors/base.py", "dflash/health/seen.py", "dflash/model/target_info.py", "dflash/records/codec.py",
    "dflash/storage/s3_read.py", "dflash/train/go_back.py", "dflash/train/processes.py", "dflash/train/queues.py",
    "dflash/train/sharding.py", "dflash/train/trainer.py", "prefect_dflash/choice.py",
}  # fmt: skip


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(path for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return last_name(inner)
    return ""


@cache
def error_classes() -> dict[str, str]:
    """Name -> file, of DflashError and everything below it, wherever it is defined."""
    known = {"DflashError": "dflash/errors.py"}
    grown = True
    while grown:
        found = {
            node.name: path
            for path, node in nodes()
            if isinstance(node, ast.ClassDef) and node.name not in known and {last_name(base) for base in node.bases} & set(known)
        }
        grown = bool(found)
        known |= found
    return known


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    kept = (ast.Call, ast.Raise, ast.ClassDef)
    return [(path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, kept)]


@cache
def makings() -> list[tuple[str, ast.Call]]:
    """Each call of an error class: where it is raised, or handed to whoever raises it."""
    return [(path, node) for path, node in nodes() if isinstance(node, ast.Call) and last_name(node.func) in error_classes()]


def own_remedy(name: str) -> bool:
    """Whether a class finds its remedy itself."""
    tree = trees()[error_classes()[name]]
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in body) and name != "DflashError"


def literal_text(value: ast.expr) -> str | None:
    """The text that is known without running: of an f-string its fixed parts; None of anything else."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            # A place that is filled in counts as a word.
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "somewhat" for part in parts)
    return None


def test_the_walk_sees_the_errors() -> None:
    in_module = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, DflashError)}
    assert in_module <= set(error_classes())
    assert len(makings()) > 300


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_every_making_of_an_error_gives_a_remedy(name: str) -> None:
    for path, call in makings():
        if last_name(call.func) != name or own_remedy(name):
            continue
        where = f"{path}:{call.lineno}"
        given = [keyword.value for keyword in call.keywords if keyword.arg == "remedy"]
        assert given, f"{where}: {name} without a remedy"
        text = literal_text(given[0])
        assert text is None or len(text.strip()) >= SHORTEST, f"{where}: {name} with the remedy {text!r}"
        assert call.args or any(keyword.arg == "what" for keyword in call.keywords), f"{where}: {name} does not say what is wrong"


def test_a_class_with_a_remedy_of_its_own_has_one_for_each_kind() -> None:
    codes = {
        call.args[0].value
        for _, call in makings()
        if last_name(call.func) == "BadRowError" and call.args and isinstance(call.args[0], ast.Constant)
    }
    assert len(codes) > 5
    for code in codes:
        assert len(BadRowError(code, "detail", origin="row 1").remedy) >= SHORTEST, code
    assert {name for name in error_classes() if own_remedy(name)} == {"BadRowError"}, "test the remedies of the new one as well"


def test_bare_errors_are_for_invariants_alone() -> None:
    found = {
        path
        for path, node in nodes()
        if isinstance(node, ast.Raise) and node.exc is not None and not path.startswith(VALIDATORS)
        if last_name(node.exc) in BARE
    }
    assert found <= ALLOWED_BARE, "raise an error of dflash.errors with a remedy, or say here why no input can cause it"


def test_the_message_shows_what_to_do() -> None:
    for name in sorted(error_classes()):
        kind = getattr(errors, name, None)
        if kind is not None:
            assert str(kind("it is broken", remedy="mend it first")) == "it is broken\n  -> mend it first"
