"""A page that lets a person see what is trained on: sample texts with the supervised tokens coloured, bucket by bucket.

Everything shown is escaped and cannot leave its place (control and direction signs are made visible or kept inside); the page
is one file without scripts or outside resources, and says so to the browser. Long samples show their beginning and their end:
a page with every token of a hundred long samples opens on no telephone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from dflash.data.buckets import bucket_of
from dflash.data.columns import TokenizedSample
from dflash.data.preview_style import PAGE_STYLE
from dflash.records import BucketStats, DataManifest

HEAD_TOKENS = 700
TAIL_TOKENS = 300
"""Tokens shown of a longer sample: of its beginning, and of its end."""

_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}


def preview_page(samples: Sequence[TokenizedSample], manifest: DataManifest, tokenizer: PreTrainedTokenizerBase) -> str:
    """HTML of some samples of a data set.

    Args:
        samples: what to show, in any order; a few of each bucket.
        manifest: the data set's manifest, for the figures.
        tokenizer: turns ids into text.

    Returns:
        A complete page.
    """
    special = frozenset(tokenizer.added_tokens_decoder)
    ordered = sorted(samples, key=lambda sample: bucket_of(len(sample.input_ids), manifest.edges_tokens))
    sections = "\n".join(
        _section(manifest.buckets[bucket], list(group), tokenizer, special)
        for bucket, group in groupby(ordered, key=lambda sample: bucket_of(len(sample.input_ids), manifest.edges_tokens))
    )
    name = escape(manifest.fingerprint[:16])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Data preview {name}</title><style>{PAGE_STYLE}</style></head><body>
<h1>Training data, as tokens</h1>
<p>Data set <code>{name}</code> for target <code>{escape(manifest.target_id)}</code></p>
{_figures(manifest)}
<p class="legend"><span><mark><i>supervised</i></mark> what the drafter learns to predict</span>
<span><i>context</i> what it only sees</span><span><b>special</b> token of the template</span>
<span><u>&#9166;</u> line break</span></p>
{_table(manifest)}
{sections}
</body></html>
"""


def _figures(manifest: DataManifest) -> str:
    share = manifest.supervised_tokens / max(manifest.tokens, 1)
    quarantined = ", ".join(f"{escape(code)} {count:,}" for code, count in manifest.quarantined.items()) or "none"
    flags = ", ".join(f"{escape(str(key))}={escape(str(value))}" for key, value in manifest.template_flags.items()) or "none"
    figures = (
        ("samples", f"{manifest.samples:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("supervised", f"{share:.0%}"),
        ("answers by", "the target itself" if manifest.on_policy else "the corpus"),
        ("template flags", flags),
        ("set aside", quarantined),
        ("tokens cut off", f"{manifest.dropped_tokens:,}"),
    )
    return '<dl class="figures">' + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures) + "</dl>"


def _table(manifest: DataManifest) -> str:
    most = max((bucket.tokens for bucket in manifest.buckets), default=0) or 1
    rows = "".join(
        f"<tr><td>{bucket.bucket}</td><td>{bucket.upper_edge_tokens:,}</td><td>{bucket.samples:,}</td><td>{bucket.tokens:,}</td>"
        f"<td>{bucket.supervised_tokens / max(bucket.tokens, 1):.0%}</td>"
        f'<td class="bar"><s style="width:{100 * bucket.tokens / most:.1f}%"></s></td></tr>'
        for bucket in manifest.buckets
    )
    head = "<th>bucket</th><th>up to</th><th>samples</th><th>tokens</th><th>supervised</th><th>share of tokens</th>"
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _section(
    bucket: BucketStats, samples: Sequence[TokenizedSample], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> str:
    articles = "\n".join(_article(sample, tokenizer, special) for sample in samples)
    title = f"Bucket {bucket.bucket}: up to {bucket.upper_edge_tokens:,} tokens"
    return f"<section><h2>{title} <small>{len(samples)} of {bucket.samples:,} samples</small></h2>\n{articles}\n</section>"


def _article(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase, special: frozenset[int]) -> str:
    ids = [int(token) for token in sample.input_ids]
    supervised = sum(end - start for start, end in sample.loss_spans)
    left_out = len(ids) - HEAD_TOKENS - TAIL_TOKENS
    if left_out <= 0:
        text = _shown(ids, sample.loss_spans, 0, tokenizer, special)
    else:
        head = _shown(ids[:HEAD_TOKENS], sample.loss_spans, 0, tokenizer, special)
        tail = _shown(ids[-TAIL_TOKENS:], sample.loss_spans, len(ids) - TAIL_TOKENS, tokenizer, special)
        text = f"{head}</pre><p class=gap>{left_out:,} tokens left out</p><pre>{tail}"
    facts = (sample.source, f"{len(ids):,} tokens", f"{supervised:,} supervised", f"{sample.turns} turns")
    shown = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f"<article><header><strong>{escape(sample.sample_id)}</strong>{shown}</header><pre>{text}</pre></article>"


def _shown(
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    offset: int,
    tokenizer: PreTrainedTokenizerBase,
    special: frozenset[int],
) -> str:
    """HTML of tokens that begin at place `offset` of their sample."""
    mask = [False] * len(ids)
    for start, end in spans:
        for place in range(max(start - offset, 0), min(end - offset, len(ids))):
            mask[place] = True
    pieces = _pieces(zip(ids, mask, strict=True), tokenizer)
    runs = groupby(pieces, key=lambda piece: piece[2])
    html = []
    for supervised, run in runs:
        inner = "".join(f"<b>{_visible(text)}</b>" if token in special else f"<i>{_visible(text)}</i>" for text, token, _ in run)
        html.append(f"<mark>{inner}</mark>" if supervised else inner)
    return "".join(html)


def _pieces(tokens: Iterable[tuple[int, bool]], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int, bool]]:
    """Text, id and mask of each token; tokens that are parts of one character come together, under the last one's mask.

    Each is decoded behind the one before it, as some decoders drop the space that a text begins with.
    """
    before: list[int] = []
    waiting: list[int] = []
    for token, supervised in tokens:
        waiting.append(token)
        text = _decoded(before + waiting, tokenizer)[len(_decoded(before, tokenizer)) :]
        if text.endswith("\ufffd") and len(waiting) < 4:
            continue
        yield text, token, supervised
        before, waiting = waiting, []
    if waiting:
        yield _decoded(waiting, tokenizer), waiting[-1], False


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _visible(text: str) -> str:
    return escape(text.translate(_CONTROL_PICTURES)).replace("\n", "<u>&#9166;</u>\n")
