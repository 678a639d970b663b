"""report.html: one evaluation as a self-contained page, warnings first.

Invariant: names and labels come from other people's files and are escaped; the page loads nothing from anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from dflash.evaluate.describe import SLICE_HEADS, facts, slice_rows
from dflash.records import EvaluationResult

_STYLE = """
:root{font-family:system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#1f2933;background:#f4f6f8;line-height:1.5}
body{margin:0 auto;max-width:1040px;padding:24px 20px 48px}
h1{font-size:1.6rem;margin:0 0 14px}h2{font-size:1.2rem;margin:34px 0 10px}
.box{background:#fff;border:1px solid #e1e5ea;border-left:6px solid #2f6db3;border-radius:10px;padding:12px 16px;margin-bottom:10px}
.box b{font-size:1.15rem}.warning{border-left-color:#d9822b}.fault{border-left-color:#b3261e}
.scroll{overflow-x:auto;background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:6px 14px}
table{border-collapse:collapse;width:100%;font-size:.92rem}th{text-align:right;color:#616e7c}
td{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{border-bottom:1px solid #eceff2;padding:6px 0 6px 12px;vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:12px}img{width:100%;display:block}
"""


def evaluation_page(result: EvaluationResult, pictures: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        result: the evaluation.
        pictures: PNG files by name, from `plots.draw_plots`.
    """
    title = f"{result.drafter} on {result.dataset}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="box"><b>{escape(result.headline)}</b><br>tokens committed a target forward, the target\'s own counted</div>',
        *(_warning(text) for text in result.warnings),
        _facts(result),
        _slices(result),
        f'<h2>Pictures</h2><div class="pictures">{"".join(_figure(name, png) for name, png in pictures.items())}</div>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _warning(text: str) -> str:
    kind = "fault" if text.startswith("not lossless") else "warning"
    return f'<div class="box {kind}">{escape(text)}</div>'


def _facts(result: EvaluationResult) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts(result))
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def _slices(result: EvaluationResult) -> str:
    rows = slice_rows(result)
    return "" if not rows else f"<h2>By slice</h2>{_table(SLICE_HEADS, rows)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _figure(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    label = escape(name.removesuffix(".png").replace("_", " "))
    return f'<figure><img alt="{label}" src="data:image/png;base64,{data}"></figure>'
