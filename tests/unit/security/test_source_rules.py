"""The source itself: nothing that is loaded can run code, no shell is started, no name is guessed, no certificate is ignored."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("dflash", "tasks", "flows", "prefect_dflash", "benchmarks", "infra", "release")

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "pty",
    "commands",
    "telnetlib",
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "input"}
FORBIDDEN_CALLS = {
    "torch.load", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "pandas.read_pickle", "torch.hub.load",
    "runpy.run_path",
    "shutil.unpack_archive", "ssl._create_unverified_context", "asyncio.create_subprocess_shell", "os.mktemp", "xmlrpc.client",
}  # fmt: skip
FORBIDDEN_METHODS = {"extractall", "read_pickle", "to_pickle", "unpack_archive"}
FORBIDDEN_VALUES = {"shell": True, "verify": False, "allow_pickle": True, "weights_only": False, "trust_remote_code": True}
"""Keyword arguments that may not be given as these constants."""

COLLECTIVES = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"]
"""Of torch.distributed; they send pickles."""


def violations(tree: ast.AST) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"line {node.lineno}: imports {name}" for name in modules if name.split(".")[0] in FORBIDDEN_MODULES]
            if isinstance(node, ast.ImportFrom):
                called = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [f"line {node.lineno}: imports {name}" for name in called if name in FORBIDDEN_CALLS]
        if isinstance(node, ast.Call):
            found += [f"line {node.lineno}: {what}" for what in _calls(node)]
    return found


def _calls(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    last = called.rpartition(".")[2]
    found = []
    if called in FORBIDDEN_CALLS or (isinstance(node.func, ast.Name) and called in FORBIDDEN_NAMES):
        found.append(called)
    if isinstance(node.func, ast.Attribute) and last in (*FORBIDDEN_METHODS, *COLLECTIVES):
        found.append(called)
    if called == "yaml.load" and not any(
        keyword.arg == "Loader" and "Safe" in _base_of(keyword.value) for keyword in node.keywords
    ):
        found.append("yaml.load without a safe loader")
    for keyword in node.keywords:
        wrong = keyword.arg in FORBIDDEN_VALUES and isinstance(keyword.value, ast.Constant)
        if wrong and keyword.value.value is FORBIDDEN_VALUES[str(keyword.arg)]:  # type: ignore[attr-defined]
            found.append(f"{called}({keyword.arg}={FORBIDDEN_VALUES[str(keyword.arg)]})")
    if called.startswith("subprocess.") and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
        found.append(f"{called} of one text")
    return found


def _base_of(loader: ast.expr) -> str:
    """The loader's name, or what our own loader derives from."""
    name = ast.unparse(loader)
    return "SafeLoader" if name == "_UniqueKeyLoader" else name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_the_rules(room: str) -> None:
    sources = sorted((ROOT / room).rglob("*.py"))
    assert sources
    found = {str(path.relative_to(ROOT)): violations(ast.parse(path.read_text(encoding="utf-8"))) for path in sources}
    assert {path: what for path, what in found.items() if what} == {}


def test_our_own_loader_derives_from_the_safe_one() -> None:
    from yaml import CSafeLoader, SafeLoader

    from dflash.config import yaml_text

    assert yaml_text._UniqueKeyLoader.__bases__ in ((CSafeLoader,), (SafeLoader,))
    assert yaml_text._UniqueKeyLoader.yaml_constructors == SafeLoader.yaml_constructors, "no constructor was added"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')", "exec(code)", "os.system('x')",
        "subprocess.run('ls', check=True)", "subprocess.Popen(['x'], shell=True)", "yaml.load(text)",
        "yaml.load(t, Loader=yaml.Loader)",
        "tempfile.mktemp()", "archive.extractall(place)", "np.load(f, allow_pickle=True)", "httpx.get(u, verify=False)",
        "from tempfile import mktemp", "dist.all_gather_object(out, x)", "M.from_pretrained(p, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_rules_see_what_they_forbid(source: str) -> None:
    assert violations(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile('x')", "torch.compile(f)", "np.load(f, allow_pickle=False)", "subprocess.run(['ls'], check=True)",
     "yaml.load(t, Loader=yaml.SafeLoader)", "f(trust_remote_code=config.trust_remote_code)"],
)  # fmt: skip
def test_the_rules_leave_the_rest_alone(source: str) -> None:
    assert not violations(ast.parse(source))
