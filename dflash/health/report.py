"""The report for a person and for a program: report.html and report.json, and a text for a terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from dflash.health.files import write_atomically
from dflash.health.history import History
from dflash.health.pictures import draw_pictures
from dflash.health.report_html import render_html, render_page
from dflash.health.report_text import render_text
from dflash.records import HealthReport

PAGE_NAME = "report.html"
PICTURES_FOLDER = "pictures"
"""Inside a run's `health/`: the page's pictures as files, for a tracker or an artifact."""

__all__ = ["render_html", "render_text", "write_json", "write_report"]


def write_json(report: HealthReport, directory: Path) -> Path:
    """Write `report.json` into `directory` and return its path."""
    file = directory / "report.json"
    # Written at every check: indenting in the standard encoder is ten times slower, and so is a copy as nested dictionaries.
    plain = json.dumps(report, default=_fields, allow_nan=False)
    write_atomically(file, msgspec.json.format(plain.encode(), indent=2))
    return file


def write_report(report: HealthReport, history: History, directory: Path) -> Path:
    """Write `report.json`, a self-contained `report.html` and `pictures/*.png` into `directory`; return the page's path."""
    write_json(report, directory)
    pictures = draw_pictures(history, report.findings)
    for picture in pictures.to_keep():
        write_atomically(directory / PICTURES_FOLDER / f"{picture.name}.png", picture.png)
    file = directory / PAGE_NAME
    write_atomically(file, render_page(report, pictures).encode())
    return file


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
