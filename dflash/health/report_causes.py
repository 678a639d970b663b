"""The page's answer to "what was that?": first what a person counts in the curve, then what each stretch of it was.

Invariant: shows what the checker has counted and classified, and judges nothing; everything is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

CAUSE_IN_WORDS: dict[str, str] = {
    "replayed data": "The same samples were trained on again: the position in the data was not restored.",
    "bad resume": "The state that was loaded is not the one that was saved.",
    "sensor missing": "The number is missing or frozen, not the training: nothing is known here.",
    "window artefact": "Too few samples behind the number for its height to mean anything.",
    "bucket mix": "No change at all: buckets at different losses, shown in one curve. Each by itself is calm.",
    "planned shift": "A declared change (learning rate, epoch) moved the loss once, and it settled.",
    "save-linked": "It comes with the saves, more often than chance allows.",
    "adversarial batch": "The same samples do it every time they come.",
    "instability": "Training became unstable: the gradient led the loss, and it did not come back.",
    "transient": "It came and went by itself; the weights have recovered.",
    "unknown": "No explanation is supported by the log.",
}
_COUNTED = {"loss_above": "a loss above", "accuracy_drop": "accuracy down by over"}
_SHOWN, _MOST = 3, 40
_COUNTS_HEAD = (
    '<div class="card counts"><p class="quiet">What people count in a loss curve. Each bucket has its own level, so a count '
    "alone says nothing about damage.</p><ul>"
)


def causes_html(stats: Mapping[str, Any]) -> str:
    """The section, empty where the log gave nothing to count and nothing to explain."""
    counted = [_count_row(name, count) for name, count in (stats.get("counts") or {}).items() if count.get("of")]
    clusters: Sequence[Mapping[str, Any]] = stats.get("clusters") or []
    if not counted and not clusters:
        return ""
    parts = ["<h2>What the curve shows, and what it was</h2>"]
    if counted:
        parts.append(f"{_COUNTS_HEAD}{''.join(counted)}</ul></div>")
    ordered = sorted(clusters, key=lambda cluster: not cluster["damage"])
    parts += map(_cluster, ordered[:_SHOWN])
    hidden = ordered[_SHOWN:_MOST]
    if hidden:
        parts.append(
            f"<details><summary>{len(clusters) - _SHOWN} more stretches</summary>{''.join(map(_cluster, hidden))}</details>"
        )
    if len(clusters) > _MOST:
        parts.append(f'<p class="quiet">and {len(clusters) - _MOST} more, in report.json</p>')
    return "".join(parts)


def _count_row(name: str, count: Mapping[str, Any]) -> str:
    buckets = ", ".join(f"{number:,} in bucket {bucket}" for bucket, number in count["per_bucket"].items())
    ends = [f"{end['value']:.3g} at step {end['step']:,}" for end in (count["first"], count["last"]) if end]
    label = f"{_COUNTED.get(name, name)} {count['limit']:g}"
    text = f"{count['records']:,} of {count['of']:,} records ({count['percent']:.1f} %) with {label}"
    text += f": {buckets}" if buckets else ""
    text += f"; first and last {' and '.join(dict.fromkeys(ends))}" if ends else ""
    return f"<li>{escape(text)}</li>"


def _cluster(cluster: Mapping[str, Any]) -> str:
    cause = str(cluster["cause"])
    first, last = cluster["first_step"], cluster["last_step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    damage = '<span class="tag level">damage</span>' if cluster["damage"] else ""
    names = ", ".join(map(str, cluster["detectors"]))
    tests = "".join(_test(str(name), values) for name, values in cluster["tests"].items())
    details = f"<details><summary>Explanations tested</summary><ul>{tests}</ul></details>" if tests else ""
    return (
        f'<div class="card finding{" critical" if cluster["damage"] else ""}"><p>{damage}<span class="tag">{escape(steps)}</span>'
        f"<strong>{escape(cause.capitalize())}</strong></p><p>{escape(CAUSE_IN_WORDS.get(cause, cause))}</p>"
        f'<p class="what">Seen by: {escape(names)}.</p>{details}</div>'
    )


def _test(name: str, values: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in values.items()) or "no evidence"
    return f"<li>{escape(name)}: {escape(shown)}</li>"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
