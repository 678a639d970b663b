"""What somebody hostile might hand over: files that run code when unpickled, names that leave a folder, texts that are markup."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE_TEXTS = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "</td></table><iframe src='https://example.org'>",
    "javascript:alert(1)",
    "--><svg/onload=alert(1)>",
    "$\\frac{x$ & {{7*7}} %s",
)
HOSTILE_LINES = (
    "fine\nERROR all weights are lost",
    "a\x1b[2J\x1b]0;title\x07b",
    "a\rERROR b",
    "x\u202egnp.exe",
    "a\u2028b",
    "tab\tbell\x07",
)

LEAVING_NAMES = ("../outside", "..", "/etc/passwd", "a/../../outside", "a//b", "./a", "", "a\\..\\b", "a\nb", "a\x00b")


class _Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def pickled(canary: Path) -> bytes:
    """A pickle whose loading creates `canary`."""
    return pickle.dumps(_Canary(canary))


def zipped(canary: Path) -> bytes:
    """A PyTorch archive: a zip with a pickle, and a member that climbs out."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(canary))
        archive.writestr("../../climbed.txt", "x")
    return held.getvalue()


def tarred(canary: Path) -> bytes:
    """A tar with a member that climbs out and one that is absolute."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name in ("../../climbed.txt", str(canary)):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    return held.getvalue()


def header_only(header: object) -> bytes:
    """A safetensors file of nothing but this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def hostile_headers() -> dict[str, bytes]:
    """Safetensors files whose header lies."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {
        "endless header": (2**63).to_bytes(8, "little") + b"{}",
        "header behind the end": (1000).to_bytes(8, "little") + b"{}",
        "no object": header_only([1, 2]),
        "offsets backwards": header_only({"w": entry | {"data_offsets": [8, 0]}}) + bytes(8),
        "offsets negative": header_only({"w": entry | {"data_offsets": [-8, 0]}}),
        "offsets behind the end": header_only({"w": entry | {"data_offsets": [0, 1 << 60]}}),
        "offsets of text": header_only({"w": entry | {"data_offsets": ["0", "8"]}}) + bytes(8),
        "one offset": header_only({"w": entry | {"data_offsets": [0]}}) + bytes(8),
        "shape of lies": header_only({"w": entry | {"shape": [1 << 40, 1 << 40]}}) + bytes(8),
        "shape of text": header_only({"w": entry | {"shape": ["a"]}}) + bytes(8),
        "unknown dtype": header_only({"w": entry | {"dtype": "OBJECT"}}) + bytes(8),
        "nested without end": (20_000).to_bytes(8, "little") + b"[" * 20_000,
        "entry of text": header_only({"w": "__import__('os')"}),
    }


class _Shape(HTMLParser):
    """Counts elements with the names of their attributes, and collects where addresses lead."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[tuple[str, ...]] = Counter()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag, *sorted(name for name, _ in attrs)] += 1
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action")]


def html_shape(page: str) -> tuple[Counter[tuple[str, ...]], list[str]]:
    """What a browser would build of a page: elements with their attributes' names, and all addresses."""
    parser = _Shape()
    parser.feed(page)
    parser.close()
    return parser.elements, parser.addresses
