"""Published results: every one with its source, in our convention, beside ours and never mixed with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflash.cli import main
from dflash.compare.reference_text import OTHERS, OwnResult, reference_data, reference_page, reference_table
from dflash.compare.references import NOT_STATED, REFERENCES, ReferenceResult, Source
from tests.support.compared_runs import RESULT, write_run

ROOT = Path(__file__).parents[3]


def test_every_figure_has_an_address_hardware_and_a_place_of_its_own() -> None:
    for each in REFERENCES:
        address = urlsplit(each.source.address)
        assert address.scheme == "https"
        assert address.netloc
        assert each.source.hardware
        assert each.published_length is not None or each.speedup is not None
        assert each.published_length is None or 1 < each.published_length <= (each.block_size or 64)
    keys = [(each.source.label, each.method, each.target, each.prompts, each.temperature) for each in REFERENCES]
    assert len(set(keys)) == len(keys)
    assert any(each.source.hardware == NOT_STATED for each in REFERENCES), "what a source does not say is not invented"


def test_a_length_without_the_target_s_token_is_raised_by_one() -> None:
    bare = Source("x", "https://x", "y", counts_bonus=False, note="")
    result = ReferenceResult(bare, "m", "t", "p", 7, 0.0, 3.25, None)
    assert (result.acceptance_length, result.block_size) == (4.25, 8)
    assert replace(result, source=replace(bare, counts_bonus=True)).acceptance_length == 3.25
    assert replace(result, published_length=None, drafted_tokens=None).acceptance_length is None


def test_ours_stand_above_the_line_and_a_set_each() -> None:
    slices = {"dataset": {"gsm8k": {"acceptance_length": 2.0, "acceptance_ci": [1.9, 2.1]}, "mbpp": {"acceptance_length": 3.0}}}
    own = OwnResult("mine\x1b[2J-001", "demo", replace(RESULT, slices=slices, dataset="gsm8k+mbpp"))
    lines = reference_table([own]).splitlines()
    line = next(index for index, text in enumerate(lines) if OTHERS in text)
    assert [text.split("demo")[1].split()[0] for text in lines[1:line]] == ["gsm8k+mbpp", "gsm8k", "mbpp"]
    assert "2.40 [2.10, 2.70]" in lines[1]
    assert len(lines) == line + 1 + len(REFERENCES) + 2
    assert "\x1b" not in "".join(lines)
    assert [each["run"] for each in reference_data([own])["ours"]] == ["mine\x1b[2J-001"]


def test_the_command_takes_any_number_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_run(tmp_path / "tiny-001", "", answers={"a": ("kind", [2, 3])})
    assert main(["compare", "--reference", str(paths.root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ours"][0]["acceptance_length"], len(told["others"])) == (2.4, len(REFERENCES))
    assert main(["compare", "--reference"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("-- other people's hardware")
    empty = write_run(tmp_path / "tiny-002", "")
    assert main(["compare", "--reference", str(empty.root)]) == 1
    assert "no trained evaluation" in capsys.readouterr().err


def test_the_page_of_the_documentation_is_this_data() -> None:
    assert (ROOT / "docs/reference-results.md").read_text(encoding="utf-8") == reference_page(), "run `make docs`"
    assert "measured by other people" in reference_page()
