"""report.html: one self-contained page, the verdict first, readable on a phone by someone who does not know the run.

Invariant: everything that comes from the log or the configuration is escaped; the page loads nothing from anywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from dflash.health.advice import VERDICT_MEANS, batches_in_words, is_settled, what_to_do
from dflash.health.decision import decided
from dflash.health.history import History
from dflash.health.pictures import Pictures, draw_pictures
from dflash.health.report_causes import causes_html
from dflash.health.report_plots import Picture
from dflash.records import DetectorSummary, Finding, HealthReport, RollbackPlan

SHOWN = 60
_SHOWN_ADVICE = 4
_COLOUR = {"healthy": "#1a7f4b", "watch": "#b7791f", "unhealthy": "#b3261e", "blind": "#52606d"}
_STYLE = """
:root{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:#1f2933;
background:#f4f6f8;line-height:1.5}
body{margin:0;font-size:16px}main{max-width:1040px;margin:0 auto;padding:0 20px 48px}
header{color:#fff;padding:30px 20px 26px}header>div{max-width:1040px;margin:0 auto}
header p{margin:4px 0;max-width:62ch}.run{opacity:.85;font-size:.9rem}
.verdict{font-size:2.5rem;font-weight:700;letter-spacing:-.01em;line-height:1.15;margin:2px 0 6px}.headline{font-size:1.15rem}
h2{font-size:1.2rem;margin:36px 0 12px}.card{background:#fff;border:1px solid #e1e5ea;border-radius:10px;padding:16px 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:20px}
.tile b{display:block;font-size:1.45rem;font-weight:650;font-variant-numeric:tabular-nums}.tile span{color:#616e7c;font-size:.85rem}
.decision{border-left:5px solid #b3261e;margin-top:20px}
.finding{border-left:5px solid #cbd2d9;margin-bottom:10px;padding:11px 16px}
.finding.critical{border-left-color:#b3261e}.finding.warn{border-left-color:#d9822b}
.finding p{margin:3px 0}.finding .what{color:#52606d;font-size:.92rem}
.tag{display:inline-block;border-radius:99px;padding:0 9px;font-size:.78rem;font-weight:600;
background:#e4e7eb;color:#3e4c59;margin-right:6px}
.critical .tag.level{background:#fbe3e1;color:#8f1d17}.warn .tag.level{background:#fdf0dc;color:#7a4b0c}
.tag.settled{background:#ddf3e6;color:#14633a}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}.wide{max-width:760px}
.next{margin-top:20px;border-left:5px solid #52606d}.next.unhealthy{border-left-color:#b3261e}.next.watch{border-left-color:#d9822b}
.next ul{margin:6px 0 0;padding-left:20px}figure .quiet{margin:0 0 8px;font-size:.92rem}
figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}img{width:100%;height:auto;display:block}
.counts{margin-bottom:10px}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}
th{text-align:left;color:#616e7c;font-weight:600;border-bottom:1px solid #d9dee5;padding:6px 10px 6px 0}
td{border-bottom:1px solid #eceff2;padding:8px 10px 8px 0;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
th.n{text-align:right}td small{color:#616e7c;display:block}
code{background:#eceff2;border-radius:4px;padding:1px 5px;font-size:.88em}
.quiet{color:#616e7c}details{margin-top:10px}summary{cursor:pointer;color:#52606d;margin-bottom:10px}
"""


def render_html(report: HealthReport, history: History) -> str:
    """The page for `report`, with pictures of `history`."""
    return render_page(report, draw_pictures(history, report.findings))


def render_page(report: HealthReport, pictures: Pictures) -> str:
    """The page for `report` with pictures that are drawn already."""
    parts = [
        _header(report),
        "<main>",
        _next(report),
        _tiles(report),
        _read_as(report),
        _figures("Loss over the run", pictures.loss),
        causes_html(report.stats),
        _findings(report.findings),
        _figures("How it ran", pictures.machinery),
        _pictures(pictures.buckets),
        _checked(report.detectors),
        "</main>",
    ]
    title = f"{report.run}: {report.verdict}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _header(report: HealthReport) -> str:
    return (
        f'<header style="background:{_COLOUR[report.verdict]}"><div>'
        f'<p class="run">Run {escape(report.run)}, checked {escape(report.checked_at)}</p>'
        f'<p class="verdict">{escape(report.verdict.capitalize())}</p>'
        f'<p class="headline">{escape(report.headline)}</p>'
        f"<p>{escape(VERDICT_MEANS[report.verdict])}</p></div></header>"
    )


def _tiles(report: HealthReport) -> str:
    """The run in numbers; what the log does not tell has no tile."""
    last: dict[str, Any] = report.stats.get("last") or {}
    total = report.stats.get("total_steps")
    foreign = "foreign" in report.stats
    step_time = report.stats.get("step_time_median_s")
    probe: dict[str, Any] = report.stats.get("last_probe") or {}
    counted = f"{report.records:,}" if foreign else "none" if report.last_step is None else f"{report.last_step + 1:,}"
    tiles = [
        (counted, "records" if foreign else "steps" if total is None else f"of {total:,} steps"),
        (_number(report.last_step) if foreign else None, "last step"),
        (f"{100 * report.coverage_frac:.1f} %", "of them with a loss" if foreign else "of them in the log"),
        (_number(last.get("ce")), "loss of the last step"),
        (_number(last.get("accepted_length")), "drafted tokens accepted a block, last step"),
        (_number(probe.get("length")), f"acceptance length, probe of step {probe.get('step')}"),
        (_number(last.get("lr")) if foreign else None, "learning rate now"),
        (None if step_time is None else f"{1000 * step_time:,.0f} ms", "median step"),
        (_number(report.stats.get("longest_bucket_run")), "batches in a row of one bucket, at most"),
    ]
    cells = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
        if value is not None
    )
    return f'<div class="tiles">{cells}</div>'


def _next(report: HealthReport) -> str:
    """What to do now, before any number."""
    if report.decision is not None:
        return _decision(report.decision, last_step=report.last_step)
    todo = list(dict.fromkeys(what_to_do(finding) for finding in report.findings if not is_settled(finding)))
    if report.verdict == "healthy" or not todo:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in todo[:_SHOWN_ADVICE])
    return f'<div class="card next {report.verdict}"><strong>What to do</strong><ul>{items}</ul></div>'


def _read_as(report: HealthReport) -> str:
    """How somebody else's log was understood."""
    foreign = report.stats.get("foreign")
    if foreign is None:
        return ""
    fields = ", ".join(f"{quantity} = <code>{escape(str(field))}</code>" for quantity, field in foreign["fields"].items())
    how = "as it was given" if foreign["given"] else "guessed from the names"
    notes = "".join(f" {escape(str(note)).capitalize()}." for note in foreign["notes"])
    return f'<p class="quiet">Read as {escape(str(foreign["format"]))}: {fields or "nothing"} ({how}).{notes}</p>'


def _decision(decision: RollbackPlan, *, last_step: int | None) -> str:
    return (
        f'<div class="card decision"><strong>Decision:</strong> {escape(decided(decision, last_step=last_step))} '
        f"The damage began at step {decision.onset_step} and was noticed at step {decision.alarm_step}. "
        f'<span class="quiet">Key <code>{escape(decision.key)}</code></span></div>'
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return '<h2>Found</h2><div class="card quiet">Nothing. What was looked at is listed below.</div>'
    standing = [finding for finding in findings if not is_settled(finding)]
    settled = [finding for finding in findings if is_settled(finding)]
    parts = ["<h2>Found</h2>", *map(_finding, standing[:SHOWN])]
    if not standing:
        parts.append('<div class="card quiet">Nothing that stands.</div>')
    if settled:
        opened = "" if standing else " open"
        cards = "".join(map(_finding, settled[-SHOWN:]))
        parts.append(f"<details{opened}><summary>{len(settled)} settled or only noted</summary>{cards}</details>")
    hidden = max(0, len(standing) - SHOWN) + max(0, len(settled) - SHOWN)
    if hidden:
        parts.append(f'<p class="quiet">and {hidden} more, in report.json</p>')
    return "".join(parts)


def _finding(finding: Finding) -> str:
    first, last = finding.first_step, finding.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    settled = finding.values.get("resolved_step")
    tag = "" if settled is None else f'<span class="tag settled">settled by step {escape(str(settled))}</span>'
    batches = batches_in_words(finding)
    notes = [f"{batches[0].upper()}{batches[1:]}."] if batches else []
    if not is_settled(finding):
        notes.append(what_to_do(finding))
    what = f'<p class="what">{escape(" ".join(notes))}</p>' if notes else ""
    message = finding.message[0].upper() + finding.message[1:]
    return (
        f'<div class="card finding {finding.severity}"><p><span class="tag level">{finding.severity}</span>'
        f'<span class="tag">{escape(finding.detector)}</span><span class="tag">{steps}</span>{tag}</p>'
        f"<p>{escape(message)}.</p>{what}</div>"
    )


def _figures(title: str, pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    alone = len(pictures) == 1
    cells = "".join(
        f'<figure class="card"><figcaption>{"" if alone else escape(p.title)}</figcaption>'
        f'<p class="quiet">{escape(p.words)}</p>{_image(p)}</figure>'
        for p in pictures
    )
    return f'<h2>{escape(title)}</h2><div class="{"wide" if alone else "pictures"}">{cells}</div>'


def _pictures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    cells = "".join(f'<figure class="card"><figcaption>{escape(p.title)}</figcaption>{_image(p)}</figure>' for p in pictures)
    if len(pictures) == 1:
        lead = '<p class="quiet">Dots: records; line: the usual value; dashed: where a spike begins; rings: findings.</p>'
        return f'<h2>Against its own usual</h2>{lead}<div class="wide">{cells.replace("Bucket 0", "Loss and gradient norm")}</div>'
    lead = (
        '<p class="quiet">Every length bucket has its own usual loss, so each is judged against itself. '
        "Dots: batches; line: the usual value; dashed: where a spike begins; rings: findings.</p>"
    )
    return f'<h2>Buckets</h2>{lead}<div class="pictures">{cells}</div>'


def _image(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    return f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'


def _checked(detectors: Sequence[DetectorSummary]) -> str:
    rows = "".join(
        f"<tr><td><strong>{escape(row.detector)}</strong></td><td>{escape(row.rule)}"
        f"{f'<small>{escape(row.note)}</small>' if row.note else ''}</td>"
        f'<td class="n">{row.checked:,}</td><td class="n">{row.findings:,}</td></tr>'
        for row in detectors
    )
    return (
        '<h2>What was checked</h2><div class="card scroll"><table><thead><tr><th>Check</th><th>Rule</th>'
        f'<th class="n">Judged</th><th class="n">Found</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _number(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
