"""A card's text: whatever a name holds, it stays a name."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.evaluate.text import clean_text
from dflash.stages.card_text import front_matter, md, md_list, md_table, yaml_text
from dflash.stages.publish_audit import _private

HOSTILE = (
    "a | b |\n| c",
    "<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "![x](http://evil.example/p.png)",
    "`rm -rf`",
    "**bold** _it_ ~~no~~",
    "https://evil.example/x www.evil.example",
    "\x1b[2J\u202e\u2028---\nlicense: mit",
    "&lt;b&gt; $x$",
    "\\| escaped already",
)


def unescaped(text: str, mark: str) -> int:
    return len(re.findall(rf"(?<!\\)(?:\\\\)*{re.escape(mark)}", text))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_one_cell_of_plain_text(name: str) -> None:
    table = md_table(("one", "two"), [(name, name)])
    assert len(table.splitlines()) == 3
    row = table.splitlines()[2]
    assert unescaped(row, "|") == 3
    for mark in ("<", "[", "`", "*", "_", "&", "$", "~"):
        assert unescaped(row, mark) == 0, mark
    assert "://" not in row
    assert "www." not in row


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_text_survives_yaml_and_never_makes_a_second_cell(text: str) -> None:
    header = front_matter({"license": text, "tags": [text, "b"]})
    assert yaml.safe_load(header.strip("-")) == {"license": clean_text(text), "tags": [clean_text(text), "b"]}
    assert yaml.safe_load(yaml_text(text)) == clean_text(text)
    row = md_list({"name": text}).splitlines()[2:]
    assert len(row) == 1
    assert unescaped(row[0], "|") == 3
    assert re.sub(r"\\(.)", r"\1", md(text)) == clean_text(text), "a reader sees what the name was"


@pytest.mark.parametrize(
    "text",
    ["/home/me/x", '"/data/set.jsonl"', "(/opt/a/b)", "~/x/y", "file:/a/b", r"C:\data\x", "| /mnt/a/b |", "at=/srv/x/y"],
)
def test_local_paths_are_found(text: str) -> None:
    assert list(_private(text, {}, ()))


@pytest.mark.parametrize(
    "text",
    ["owner/name", "https://huggingface.co/owner/name", "and/or/not", "0.9/0.95/1", "a / b / c", "</b>", "tokens/s", "x :/ y"],
)
def test_names_addresses_and_fractions_are_no_paths(text: str) -> None:
    assert not list(_private(text, {}, ()))


def test_only_variables_that_speak_of_secrets_are_looked_for() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "abcdefgh123", "LANG": "abcdefgh123", "API_KEY": "short"}
    assert list(_private("... abcdefgh123 short", environment, ())) == [
        "the value of the environment variable AWS_SECRET_ACCESS_KEY"
    ]
