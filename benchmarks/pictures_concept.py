"""The picture of docs/concepts.md: one drafted block above, the pipeline that trains and watches the drafter below; SVG as text."""

from __future__ import annotations

from html import escape
from typing import Final

WIDTH, HEIGHT = 960, 640
INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
GREY, BLUE, GREEN, RED, ORANGE, VIOLET = "#eef1f5", "#d6e4f5", "#d5eddd", "#f6d5d6", "#fbe5cc", "#e8def8"
_CELL, _GAP = 58, 6

CONTEXT: Final = ("The", "sum", "of", "2", "and", "3", "is")
DRAFTED: Final = ("5", ".", "So", "we", "add", "them", "up")
ACCEPTED: Final = 4
OWN: Final = "get"


def concept_svg() -> str:
    """The whole picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif">',
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *_block(),
        f'<line x1="24" y1="318" x2="{WIDTH - 24}" y2="318" stroke="{GREY}" stroke-width="2"/>',
        *_pipeline(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _block() -> list[str]:
    parts = [_words(24, 34, "One step of decoding", size=18, bold=True)]
    anchor = 24 + (len(CONTEXT) - 1) * (_CELL + _GAP)
    parts += _row(24, 56, CONTEXT[:-1], [GREY] * (len(CONTEXT) - 1))
    parts += _row(anchor, 56, (CONTEXT[-1], *["MASK"] * len(DRAFTED)), [BLUE, *[VIOLET] * len(DRAFTED)])
    parts += [
        _words(24, 108, "committed so far: the target's hidden states of a few layers are the drafter's context", size=12),
        _words(anchor, 124, "anchor, then K-1 masked slots (here K = 8)", size=12),
        _arrow(anchor + 250, 130, anchor + 250, 158),
        _words(anchor + 262, 149, "the drafter fills all slots in one pass", size=13),
    ]
    below = anchor + _CELL + _GAP
    parts += _row(below, 164, DRAFTED, [BLUE] * len(DRAFTED))
    parts += [
        _arrow(anchor + 250, 202, anchor + 250, 230),
        _words(anchor + 262, 221, "the target verifies the whole block in one forward", size=13),
    ]
    colours = [GREEN] * ACCEPTED + [ORANGE] + [RED] * (len(DRAFTED) - ACCEPTED - 1)
    shown = [*DRAFTED[:ACCEPTED], OWN, *DRAFTED[ACCEPTED + 1 :]]
    parts += _row(below, 236, shown, colours)
    parts += [
        _words(below, 288, f"{ACCEPTED} drafts accepted", size=12),
        _words(below + ACCEPTED * (_CELL + _GAP), 288, "the target's own", size=12),
        _words(below + (ACCEPTED + 2) * (_CELL + _GAP) - 18, 288, "thrown away", size=12),
        _words(24, 250, f"acceptance length {ACCEPTED + 1}:", size=15, bold=True),
        _words(24, 270, f"{ACCEPTED} drafts and the target's own token,", size=13),
        _words(24, 288, "the same tokens as without a drafter", size=13),
    ]
    return parts


def _pipeline() -> list[str]:
    y, low = 376, 516
    return [
        _words(24, 350, "Training the drafter, and knowing that the run is healthy", size=18, bold=True),
        *_box(24, y, 150, "conversations", "answers written by", "the target itself", fill=GREY),
        *_box(222, y, 150, "length buckets", "Parquet, manifest,", "batch plan", fill=GREY),
        *_box(420, y, 150, "frozen target", "T workers; features", "in plan order", fill=GREY),
        *_box(618, y, 150, "drafter", "blocks at random", "anchors; it alone learns", fill=BLUE),
        *_box(816, y, 120, "checkpoints", "durable, hashed,", "clean or not", fill=GREEN),
        *[_arrow(x, y + 38, x + 46, y + 38) for x in (175, 373, 571, 769)],
        *_box(420, low, 150, "run log", "one line a step,", "the only truth", fill=GREY),
        *_box(618, low, 150, "health check", "24 detectors, a", "verdict, a decision", fill=ORANGE),
        *_box(222, low, 150, "MLflow, report", "fed from the log,", "never in its way", fill=GREY),
        *_box(816, low, 120, "evaluation", "lossless, with", "intervals", fill=GREEN),
        _path(f"M693,{y + 77} L693,{y + 100} L495,{y + 100} L495,{low - 3}"),
        _arrow(571, low + 38, 615, low + 38),
        _arrow(419, low + 38, 375, low + 38),
        _arrow(876, y + 77, 876, low - 3),
        _path(f"M730,{low - 1} L730,{y + 112} L836,{y + 112} L836,{y + 79}"),
        _words(738, y + 128, "rollback", size=12),
    ]


def _row(x: int, y: int, words: tuple[str, ...] | list[str], colours: list[str]) -> list[str]:
    parts = []
    for index, (word, colour) in enumerate(zip(words, colours, strict=True)):
        left = x + index * (_CELL + _GAP)
        parts.append(f'<rect x="{left}" y="{y}" width="{_CELL}" height="34" rx="5" fill="{colour}" stroke="{FAINT}"/>')
        parts.append(_words(left + _CELL / 2, y + 22, word, size=14, middle=True))
    return parts


def _box(x: int, y: int, width: int, title: str, first: str, second: str, *, fill: str) -> list[str]:
    middle = x + width / 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="76" rx="8" fill="{fill}" stroke="{FAINT}"/>',
        _words(middle, y + 24, title, size=15, bold=True, middle=True),
        _words(middle, y + 46, first, size=12, middle=True),
        _words(middle, y + 63, second, size=12, middle=True),
    ]


def _words(x: float, y: float, text: str, *, size: int, bold: bool = False, middle: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}"{weight}{anchor}>{escape(text)}</text>'


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.6" marker-end="url(#tip)"/>'


def _path(course: str) -> str:
    return f'<path d="{course}" fill="none" stroke="{INK}" stroke-width="1.6" marker-end="url(#tip)"/>'
