"""Text from somebody else stays text: on every page, in every picture, on the terminal and in the log."""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from dflash.cli.output import configure_logging, emit
from dflash.compare.compare import compare_runs
from dflash.compare.page import render_comparison
from dflash.compare.view import view_run
from dflash.evaluate.page import evaluation_page
from dflash.evaluate.plots import draw_plots
from dflash.health.history import History
from dflash.health.pictures import draw_pictures
from dflash.health.report_html import render_page
from dflash.health.report_text import render_text
from dflash.stages.card_text import front_matter, md_list
from tasks.local import plain_console
from tests.support.compared_runs import RESULT, step_line, write_run
from tests.support.health_runs import healthy, items_of, new_checker, remedy
from tests.support.log_simulator import nonfinite, spike
from tests.support.malice import HOSTILE_LINES, HOSTILE_TEXTS, html_shape

EVIL = "".join(HOSTILE_TEXTS)
LOOKED_UP = frozenset({"detector", "severity", "domain", "verdict"})
"""Fields whose texts are our own words: pages look their colours and advice up by them."""


def poisoned(value: Any, *, wanted: bool = False) -> Any:
    """A record with `EVIL` behind every text that somebody else may have written."""
    if isinstance(value, str):
        return value + EVIL if wanted and value else value
    if isinstance(value, Mapping):
        return {key: poisoned(inner, wanted=wanted) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(poisoned(item, wanted=wanted) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        free = {name: "Literal" not in str(hint) and name not in LOOKED_UP for name, hint in hints.items()}
        return dataclasses.replace(
            value, **{each.name: poisoned(getattr(value, each.name), wanted=free[each.name]) for each in dataclasses.fields(value)}
        )
    return value


def same_page(clean: str, evil: str) -> None:
    """The hostile page has the elements and attributes of the clean one, loads nothing, and shows the text."""
    elements, addresses = html_shape(evil)
    assert elements == html_shape(clean)[0]
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert "alert(1)" in evil, "the text was put somewhere"


def test_a_health_report_shows_hostile_text_as_text() -> None:
    records = spike(healthy(seed=6, steps=500), step=330, factor=4, forever=True)
    checker = new_checker()
    checker.feed(items_of(nonfinite(records, steps=[400], skipped=True)))
    report = checker.report(run="demo-007", now_s=1.7e9, ended=True, remedy=remedy)
    evil = poisoned(report)
    assert evil.findings[0].message.endswith(EVIL)
    pictures = draw_pictures(History(), ())
    same_page(render_page(report, pictures), render_page(evil, pictures))
    assert "alert(1)" in render_text(evil)


def test_a_comparison_shows_hostile_text_as_text(tmp_path: Path) -> None:
    log = "".join(step_line(step, bucket=step % 2) for step in range(20))
    answers = {f"h{i}": (("sums", "lists")[i % 2], [2, 3]) for i in range(12)}
    for name in ("a", "b"):
        write_run(tmp_path / name, log, answers=answers, overrides=(f"data.num_conversations={10 + ord(name)}",))
    views = [view_run(tmp_path / "a"), view_run(tmp_path / "b")]
    comparison = compare_runs(views)
    same_page(render_comparison(comparison), render_comparison(poisoned(comparison)))


def test_an_evaluation_shows_hostile_text_as_text() -> None:
    part = {"acceptance_length": 2.0, "acceptance_ci": (1.5, 2.5), "prompts": 3, "acceptance_length_untruncated": 2.1}
    result = dataclasses.replace(RESULT, verifications=10, slices={"kind": {f"a{EVIL}": part, "b": part}})
    evil = dataclasses.replace(result, drafter=f"d{EVIL}", dataset=EVIL, warnings=(EVIL,), template_flags={EVIL: EVIL})
    pictures = draw_plots(evil)
    assert "acceptance_by_slice.png" in pictures, "a formula that cannot be drawn is no formula"
    clean = dataclasses.replace(evil, drafter="d", dataset="x", warnings=("w",), template_flags={"f": "g"})
    same_page(evaluation_page(clean, pictures), evaluation_page(evil, pictures))


@pytest.mark.parametrize("text", [*HOSTILE_TEXTS, *HOSTILE_LINES])
def test_a_model_card_keeps_its_fields_and_rows(text: str) -> None:
    assert "<" not in md_list({text: text}).replace("\\<", "")
    assert len(md_list({text: text}).splitlines()) == len(md_list({"a": "b"}).splitlines())
    assert len(front_matter({"name": text}).splitlines()) == 3


@pytest.mark.parametrize("text", HOSTILE_LINES)
def test_nothing_steers_the_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    emit(argparse.Namespace(json=False), {}, f"run {text}: healthy")
    shown = capsys.readouterr().out
    assert shown.removesuffix("\n").replace("\n", "").isprintable()


@pytest.mark.parametrize("text", [*HOSTILE_LINES, "\x1b[31mred\x1b[0m"])
def test_a_library_that_prints_itself_steers_no_terminal_either(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logging(verbose=False)
    shown = io.StringIO()
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [logging.StreamHandler(shown)])  # as it prints by itself
    logging.getLogger("transformers.modeling").warning("a tensor of the file is called %s", text)
    first, *more = shown.getvalue().removesuffix("\n").split("\n")
    assert first.startswith("a tensor of the file is called")
    assert all(line.isprintable() for line in (first, *more))
    assert all(line.startswith("  ") for line in more)


def console_formatter(monkeypatch: pytest.MonkeyPatch) -> logging.Formatter | None:
    """What formats the messages of a flow that is run as a program."""
    handler = PrefectConsoleHandler()
    monkeypatch.setattr(logging.root, "handlers", [handler])
    plain_console()
    return handler.formatter


@pytest.mark.parametrize("text", HOSTILE_LINES)
def test_no_value_forges_a_record_of_the_log(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("dflash"), "level", logging.INFO)
    configure_logging(verbose=False)
    logging.getLogger("dflash.test").warning("skipped the row %s", text)
    said = logging.root.handlers[0].formatter
    record = logging.makeLogRecord({"msg": "training %s", "args": (text,)})
    for formatter in (said, console_formatter(monkeypatch)):
        assert formatter is not None
        first, *more = formatter.format(record).split("\n")
        assert first.isprintable()
        assert all(line.isprintable() and line.startswith("  ") for line in more)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("WARNING skipped the row")
    assert all(line.startswith("  ") for line in lines[1:]), "a further line is no record"
    assert all(line.isprintable() for line in lines)
