"""comparison.html: one self-contained page, the verdict first.

Invariant: names, settings and reasons come from other people's files and are escaped; the page loads nothing from anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isnan

from dflash.compare.compare import Comparison
from dflash.compare.contest import Difference
from dflash.compare.pictures import draw_acceptance, draw_buckets, draw_loss, in_words
from dflash.compare.text import SUMMARY_ROWS, cell_words

_COLOUR = {"better": "#1a7f4b", "worse": "#b3261e", "no difference": "#52606d"}
_STYLE = """
:root{font-family:system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#1f2933;background:#f4f6f8;line-height:1.5}
body{margin:0 auto;max-width:1040px;padding:24px 20px 48px}
h1{font-size:1.6rem;margin:0 0 14px}h2{font-size:1.2rem;margin:34px 0 10px}
.verdict{background:#fff;border:1px solid #e1e5ea;border-left:6px solid;border-radius:10px;padding:12px 16px;margin-bottom:10px}
.verdict b{font-size:1.15rem}.warning{border-left-color:#d9822b}.quiet{color:#616e7c}
.scroll{overflow-x:auto;background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:6px 14px}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th{text-align:left;color:#616e7c;border-bottom:1px solid #d9dee5;padding:6px 12px 6px 0}
td{border-bottom:1px solid #eceff2;padding:6px 12px 6px 0;vertical-align:top;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
td small{color:#616e7c;white-space:nowrap}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
figure{margin:0;align-self:start;
background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:12px}img{width:100%;display:block}
figcaption{font-weight:600;margin-bottom:6px}ul{margin:4px 0;padding-left:20px}
"""


def render_comparison(comparison: Comparison) -> str:
    """The page."""
    names = [run.name for run in comparison.runs]
    parts = [
        f"<h1>{escape(' against '.join([', '.join(names[1:]), names[0]]))}</h1>",
        *_verdicts(comparison),
        *(f'<div class="verdict warning">{escape(text)}</div>' for text in comparison.warnings),
        *_acceptance(comparison),
        _curves(comparison),
        _losses(comparison),
        _summaries(comparison),
        _differences("Settings that differ", comparison.settings, names, none="None: the runs were configured alike."),
        _differences("Data that differ", comparison.data, names, none="None: the same data set and the same batch plan."),
        _history(comparison),
    ]
    title = escape(" vs ".join(names))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _verdicts(comparison: Comparison) -> Iterable[str]:
    for sentence, contest in zip(comparison.verdicts, comparison.contests, strict=True):
        word = contest[0].word if contest else "no difference"
        title = word.capitalize() if contest else "Not judged"
        yield f'<div class="verdict" style="border-left-color:{_COLOUR[word]}"><b>{title}</b><br>{escape(sentence)}</div>'


def _acceptance(comparison: Comparison) -> Iterable[str]:
    if not comparison.acceptance:
        return
    names = [run.name for run in comparison.runs]
    rows = [
        [
            escape(row.kind),
            *(" <small>".join(words) + "</small>" * (len(words) - 1) for words in map(cell_words, row.cells)),
        ]
        for row in comparison.acceptance
    ]
    for contest in comparison.contests:
        by_kind = {each.kind: each for each in contest}
        for cells, row in zip(rows, comparison.acceptance, strict=True):
            cells.append(_change(by_kind.get(row.kind)))
    heads = ["prompts", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    figure = _figure("Tokens committed a target pass, with intervals", draw_acceptance(comparison.runs, comparison.acceptance))
    told = (
        "A difference is shown only where its interval keeps clear of zero. The verdict is that of all prompts together: "
        "of many kinds of prompts some will differ by chance."
    )
    yield f'<h2>Acceptance length</h2><p class="quiet">{told}</p>'
    yield f'<div class="pictures">{figure}<div>{_table(heads, rows)}</div></div>'


def _change(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    figures = f"{difference.difference:+.2f} <small>{difference.interval_words}</small>"
    return f'{figures} <span style="color:{_COLOUR[difference.word]}">{difference.word}</span>'


def _curves(comparison: Comparison) -> str:
    pictures = [
        _figure("Learning", draw_loss(comparison.runs)),
        _figure("Loss of each length bucket", draw_buckets(comparison.runs)),
    ]
    return f'<h2>Over the tokens seen</h2><div class="pictures">{"".join(pictures)}</div>'


def _losses(comparison: Comparison) -> str:
    names = [run.name for run in comparison.runs]
    rows = [[escape(row.bucket), *("-" if isnan(cell) else f"{cell:.4f}" for cell in row.cells)] for row in comparison.losses]
    told = f"Mean over the last tenth of the {in_words(comparison.common_tokens)} tokens that every run has seen."
    return f'<h2>Loss at equal tokens</h2><p class="quiet">{told}</p>{_table(["bucket", *names], rows)}'


def _summaries(comparison: Comparison) -> str:
    finished = [run.summary for run in comparison.runs]
    if not any(finished):
        return ""
    rows = [[label, *("-" if each is None else escape(tell(each)) for each in finished)] for label, tell in SUMMARY_ROWS.items()]
    return f"<h2>The runs</h2>{_table(['', *(run.name for run in comparison.runs)], rows)}"


def _differences(title: str, facts: Mapping[str, tuple[str, ...]], names: Sequence[str], *, none: str) -> str:
    if not facts:
        return f'<h2>{title}</h2><p class="quiet">{none}</p>'
    rows = [[f"<code>{escape(name)}</code>", *map(escape, cells)] for name, cells in facts.items()]
    return f"<h2>{title}</h2>{_table(['', *names], rows)}"


def _history(comparison: Comparison) -> str:
    runs = [
        f"<p><b>{escape(run.name)}</b></p><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for run, lines in zip(comparison.runs, comparison.history, strict=True)
    ]
    return f'<h2>Segments and rollbacks</h2><div class="scroll">{"".join(runs)}</div>'


def _figure(title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
