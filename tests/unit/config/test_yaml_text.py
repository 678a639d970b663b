"""YAML to plain values by the loader in C and by the one in Python: same values, same refusals, no text without an end."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import yaml

from dflash.config import yaml_text

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
"""Thirty lines that stand for more values than there is memory."""

VALUES: dict[str, Any] = {
    "run: {name: a, seed: 3}\nrate: 1.0e-4\nflags: [true, null, 'é', \"\\u00e9\"]\n": {
        "run": {"name": "a", "seed": 3}, "rate": 1e-4, "flags": [True, None, "é", "é"],
    },
    "same: &x [1]\nagain: *x\n": {"same": [1], "again": [1]},
    "\ufeffa: 😀\r\n": {"a": "😀"},
    "": None,
}  # fmt: skip

REFUSED = {
    "a: 1\na: 2": r"the key 'a' stands twice \(line 2, column 1\)",
    "é: 'x'\nb: {'c': 1, \"c\": 2}": r"the key 'c' stands twice \(line 2, column 13\)",
    "base: &b {a: 1}\nown: {<<: *b, b: 3}": r"2002:merge' \(line 2, column 7\)",
    "? [a]\n: 1": r"a key is a list or a mapping \(line 1, column 3\)",
    "a: !!python/object/apply:os.system [x]": r"could not determine a constructor .* \(line 1, column 4\)",
    "a: 1\n b: [secret": r"mapping values are not allowed .* \(line 2, column 3\)",
    "a: [1, 2\nb": r"while parsing a flow sequence",
    "a: *nowhere": r"undefined alias .*\(line 1, column 4\)",
    "a: &a [*a]": r"its aliases make more than",
    BOMB: "its aliases make more than",
    "[" * 1_100: "nest|Recursion",
    "- " * 900 + "a": "nest|Recursion",
    "day: 2020-13-45": r"no timestamp \(line 1, column 6\)",
    "a: !!bool secret": r"no bool \(line 1, column 4\)",
    "a: !!timestamp secret": r"no timestamp \(line 1, column 4\)",
    "a: !!int secret": r"no int \(line 1, column 4\)",
    "a: !!map [secret]": r"expected a mapping .*\(line 1, column 4\)",
    "a: !https://secret@host b": r"\(hidden\) \(line 1, column 4\)",
    "https://secret@host: 1\nhttps://secret@host: 2": r"\(hidden\) \(line 2, column 1\)",
    "a: \ud800": "Error",
}


def without_libyaml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a PyYAML that was built without libyaml makes it."""
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    spec = importlib.util.spec_from_file_location("yaml_text_without_libyaml", yaml_text.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._SafeLoader is yaml.SafeLoader
    return module


@pytest.fixture(params=["libyaml", "pure"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "pure":
        return without_libyaml(monkeypatch)
    if not yaml.__with_libyaml__:
        pytest.skip("this PyYAML has no libyaml")
    return yaml_text


@pytest.mark.parametrize("text", VALUES)
def test_both_loaders_give_the_same_values(reader: ModuleType, text: str) -> None:
    assert reader.read_yaml(text) == VALUES[text]


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_both_loaders_refuse_the_same_texts_at_the_same_place_and_repeat_no_value(reader: ModuleType, text: str) -> None:
    with pytest.raises(reader.UnreadableYamlError, match=REFUSED[text]) as error:
        reader.read_yaml(text)
    assert "secret" not in str(error.value)
