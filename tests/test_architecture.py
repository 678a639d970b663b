"""The house rules that a test keeps true: who may import what, sizes, and documents that match the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks.render import page
from dflash.cli import build_parser
from dflash.config import reference_markdown

ROOT = Path(__file__).parents[1]
PACKAGES = ("dflash", "tasks", "flows", "prefect_dflash")

BASE = {"errors", "lazy", "records", "config"}
LOW = BASE | {"storage", "tracking", "rollback"}
SIBLINGS = LOW | {"data", "model", "checkpoint", "health"}
MIDDLE = SIBLINGS | {"evaluate", "train"}
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "records": {"errors"},
    "config": {"errors"},
    "storage": BASE,
    "tracking": BASE | {"storage"},
    "rollback": BASE,
    "data": BASE | {"storage"},
    "model": BASE,
    "checkpoint": BASE | {"storage"},
    "health": BASE | {"rollback"},
    "evaluate": SIBLINGS - {"tracking"},
    "train": SIBLINGS - {"tracking"},
    "compare": SIBLINGS - {"tracking", "model"} | {"evaluate"},
    "demo": MIDDLE,
    "stages": MIDDLE | {"compare"},
    "drill": MIDDLE,
    "cli": MIDDLE | {"compare", "demo", "stages"},
    "__main__": {"cli", "errors"},
}
# Defined here and used by nobody here: called by Python or Prefect, or the shape in which tests and benchmarks use a part.
CALLED_FROM_OUTSIDE = {
    "readinto", "seekable", "setup_environment", "build_plan", "plain_decode", "speculative_decode", "OracleProposer",
    "findings_made", "replays_mixers", "load_summary",
}  # fmt: skip
# Third-party packages that only some rooms may import; everything else is free.
ONLY_IN = {
    "prefect": set(),
    "mlflow": {"tracking"},
    "boto3": {"storage"},
    "botocore": {"storage"},
    "torch": {"model", "checkpoint", "train", "evaluate", "stages", "demo"},
    "transformers": {"data", "model", "demo", "evaluate"},
    "pyarrow": {"compare", "data", "evaluate", "storage"},
    "matplotlib": {"compare", "health", "evaluate", "data"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "yaml": {"config"},
}


def python_files(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def module_names() -> frozenset[str]:
    return frozenset(module_name(path) for path in python_files(*PACKAGES))


@cache
def imported_modules(path: Path, *, top_level_only: bool = False) -> frozenset[str]:
    nodes = parsed(path).body if top_level_only else list(ast.walk(parsed(path)))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` stands on the module, not on what the package re-exports.
            names |= inner if inner <= module_names() else inner | {node.module}
    return frozenset(names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "dflash" and len(parts) > 1 else None


def test_a_room_imports_only_the_rooms_below_it() -> None:
    wrong = {}
    for path in python_files("dflash"):
        room = room_of(module_name(path))
        if room is None:
            assert not imported_modules(path), "dflash/__init__.py does no work at import time"
            continue
        used = {room_of(name) for name in imported_modules(path)} & set(MAY_IMPORT)
        if not used <= MAY_IMPORT[room] | {room}:
            wrong[module_name(path)] = used - MAY_IMPORT[room] - {room}
    assert not wrong


def test_third_party_packages_stay_behind_their_doors() -> None:
    wrong = {}
    for path in python_files("dflash"):
        room = room_of(module_name(path))
        tops = {name.split(".")[0] for name in imported_modules(path)}
        refused = {top for top in tops & set(ONLY_IN) if room not in ONLY_IN[top]} | tops & {"pickle", "dill", "flows", "tasks"}
        if refused:
            wrong[module_name(path)] = refused
    assert not wrong


def test_flows_and_tasks_import_what_they_may() -> None:
    for path in python_files("flows"):
        own = {name for name in imported_modules(path) if name.split(".")[0] in PACKAGES}
        rooms = {room_of(name) for name in own if name.startswith("dflash.")}
        assert rooms <= {"config", "records"}, f"{path.name} imports {rooms}"
    for path in python_files("tasks"):
        assert not any(name.startswith(("flows", "dflash.cli")) for name in imported_modules(path)), path.name


def test_there_is_no_import_cycle() -> None:
    modules = {module_name(path): path for path in python_files(*PACKAGES)}
    edges = {
        name: {used for used in imported_modules(path, top_level_only=True) if used in modules} for name, path in modules.items()
    }
    for name, used in edges.items():
        used.discard(name)
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"import cycle: {' -> '.join((*trail, name))}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for used in sorted(edges[name]):
            visit(used, (*trail, name))
        state[name] = 2

    for name in sorted(edges):
        visit(name, ())


def test_files_and_functions_stay_small() -> None:
    sources = python_files(*PACKAGES)
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources + python_files("tests", "benchmarks")}
    too_long = {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 400}
    assert not too_long
    assert statistics.median(lines[path] for path in sources) <= 150
    for path in python_files("flows"):
        assert lines[path] <= 80, path.name
    for path in python_files("tasks"):
        assert lines[path] <= 100, path.name
    lengths: list[int] = []
    for path in sources:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 80, f"{module_name(path)}.{node.name} has {length} lines"
                lengths.append(length)
                check_parameters(node, module_name(path))
    lengths.sort()
    assert lengths[int(0.9 * len(lengths))] <= 45


def test_nothing_is_defined_that_nobody_uses() -> None:
    defined: dict[str, str] = {}
    used: set[str] = set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined |= {} if called_by_name(node) else {node.name: module_name(path)}
    dead = {name: where for name, where in defined.items() if name not in used | CALLED_FROM_OUTSIDE}
    assert not dead, "take it away, or name it in CALLED_FROM_OUTSIDE if a library, a test or a benchmark calls it"
    assert set(defined) - used >= CALLED_FROM_OUTSIDE, "what is gone, or used by now, needs no place in CALLED_FROM_OUTSIDE"


def called_by_name(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether Python or pydantic calls it without anybody writing its name."""
    return node.name.startswith("__") or any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)


def check_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, module: str) -> None:
    positional = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
    total = len(positional) + len(node.args.kwonlyargs)
    assert total <= 8, f"{module}.{node.name} has {total} parameters"


def test_tests_are_at_least_four_fifths_of_the_source() -> None:
    def count(paths: list[Path]) -> int:
        return sum(1 for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip())

    assert count(python_files("tests")) >= 0.8 * count(python_files(*PACKAGES))


def test_no_pickle_is_ever_loaded_and_no_shell_is_used() -> None:
    for path in python_files(*PACKAGES):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "pickle.load", "pickle.loads", "eval", "exec", "os.system"}, module_name(path)
                shell = [k for k in node.keywords if k.arg == "shell"]
                assert not shell, f"{module_name(path)}: {called}(shell=...)"


def shell_lines(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line and not line.startswith("#")]


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "infra/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_the_documents_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    parser = build_parser()
    for line in shell_lines(document):
        words = shlex.split(line)
        if words[0] == "make":
            assert set(words[1:]) - {w for w in words if "=" in w} <= targets, line
        elif "dflash" in words and "-m" in words:
            arguments = words[words.index("dflash") + 1 :]
            parser.parse_args(arguments)  # argparse exits, failing the test, if the command does not exist
        elif words[0].startswith("infra/"):
            assert (ROOT / words[0]).is_file(), line


def test_relative_links_in_the_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        file = ROOT / document
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (file.parent / link).exists(), f"{document} links to {link}"


def test_the_configuration_reference_matches_the_code() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == reference_markdown(), "run `make docs`"


def test_the_benchmark_page_matches_the_stored_results() -> None:
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == page(), "run `python -m benchmarks.render`"
    for file in (ROOT / "benchmarks/results").glob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert result.keys() == {"name", "date", "machine", "command", "figures"}
        assert "--quick" not in result["command"]


def test_the_makefile_offers_what_the_documents_promise() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"setup", "demo", "test", "lint", "types", "ui", "clean"} <= targets
