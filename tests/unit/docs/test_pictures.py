"""The pictures' own scripts: every kind of span has a colour, and the concept needs no run."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import pictures
from benchmarks.pictures_concept import ACCEPTED, CONTEXT, DRAFTED, HEIGHT, OWN, WIDTH, concept_svg
from benchmarks.pictures_timeline import _near, draw_timeline
from dflash.train.timeline import read_timeline
from tests.support.timed_log import rolled_back, written

SVG = "{http://www.w3.org/2000/svg}"


def test_a_timeline_is_drawn_from_its_spans(tmp_path: Path) -> None:
    timeline = read_timeline(written(tmp_path, rolled_back()), first_step=0, end_step=None)
    first_s, last_s = _near(timeline)
    save = next(span for span in timeline.spans if span.name.startswith("save "))
    assert first_s <= save.begin_s <= last_s, "the near view shows a save"
    assert draw_timeline(timeline).startswith(b"\x89PNG")


def test_the_concept_lies_inside_its_frame_and_tells_a_true_step() -> None:
    drawing = ET.fromstring(concept_svg())  # noqa: S314 - our own text
    words = [node.text or "" for node in drawing.iter(f"{SVG}text")]
    assert words.count("MASK") == len(DRAFTED) == 7
    assert OWN in words and all(word in words for word in CONTEXT)
    assert f"acceptance length {ACCEPTED + 1}:" in words
    for node in drawing.iter(f"{SVG}rect"):
        x, y = float(node.get("x", 0)), float(node.get("y", 0))
        assert 0 <= x <= x + float(node.get("width", 0)) <= WIDTH
        assert 0 <= y <= y + float(node.get("height", 0)) <= HEIGHT


def test_without_a_run_only_the_concept_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures", "--output", str(tmp_path / "img")])
    pictures.main()
    assert [path.name for path in (tmp_path / "img").iterdir()] == ["concept.svg"]
