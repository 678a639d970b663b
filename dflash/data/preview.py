"""A page that lets a person see what is trained on: sample texts with the supervised tokens coloured.

Everything shown is escaped; the page is one file without scripts or outside resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from dflash.data.shards import TokenizedSample
from dflash.records import DataManifest

_STYLE = """
:root { --ink:#1d2430; --soft:#5d6878; --line:#dfe4ea; --page:#f6f8fa; --card:#fff;
  --on:#cdeed6; --on-edge:#8fd3a3; --tag:#7a4fb3; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e9f0; --soft:#93a0b2; --line:#2c3644; --page:#11161d; --card:#182029;
  --on:#17492b; --on-edge:#2f8350; --tag:#c6a5f3; } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1080px; padding:28px 24px 60px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
h1 { font-size:22px; margin:0 0 4px } h2 { font-size:16px; margin:30px 0 10px }
p { margin:4px 0; color:var(--soft) }
.legend span { padding:1px 7px; border-radius:4px; margin-right:8px }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; margin:14px 0 }
th,td { text-align:right; padding:4px 16px 4px 0; border-bottom:1px solid var(--line); font-weight:400 }
th { color:var(--soft); font-size:13px }
article { background:var(--card); border:1px solid var(--line); border-radius:8px; margin:10px 0; padding:10px 14px }
header { display:flex; gap:14px; flex-wrap:wrap; color:var(--soft); font-size:13px; margin-bottom:6px }
header b { color:var(--ink); font-weight:600 }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.65 ui-monospace,SFMono-Regular,Menlo,monospace }
.on { background:var(--on); box-shadow:inset 0 -1px 0 var(--on-edge) }
.t { border-left:1px solid color-mix(in srgb, var(--soft) 32%, transparent) }
.s { color:var(--tag) } .n { color:var(--soft); opacity:.75 }
"""


def preview_page(samples: Sequence[TokenizedSample], manifest: DataManifest, tokenizer: PreTrainedTokenizerBase) -> str:
    """HTML of some samples of a data set.

    Args:
        samples: what to show, in order.
        manifest: the data set's manifest, for the figures above.
        tokenizer: turns ids into text.

    Returns:
        A complete page.
    """
    special = frozenset(tokenizer.added_tokens_decoder)
    articles = "\n".join(_article(sample, tokenizer, special) for sample in samples)
    rows = "".join(
        f"<tr><td>{b.bucket}</td><td>{b.upper_edge_tokens}</td><td>{b.samples:,}</td><td>{b.tokens:,}</td>"
        f"<td>{b.supervised_tokens:,}</td></tr>"
        for b in manifest.buckets
    )
    supervised = manifest.supervised_tokens / max(manifest.tokens, 1)
    quarantined = ", ".join(f"{escape(code)} {count}" for code, count in manifest.quarantined.items()) or "none"
    written_by = "the target itself" if manifest.on_policy else "the corpus"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Data preview {escape(manifest.fingerprint[:16])}</title><style>{_STYLE}</style></head><body>
<h1>Training data, as tokens</h1>
<p>Data set <code>{escape(manifest.fingerprint[:16])}</code> for target <code>{escape(manifest.target_path)}</code>; answers written
by {written_by}. {manifest.samples:,} samples, {manifest.tokens:,} tokens, {supervised:.0%} supervised;
quarantined rows: {quarantined}.</p>
<p class="legend"><span class="on">supervised: the drafter learns to predict these</span><span class="s">special token</span>
Thin lines part tokens; <span class="n">&#9166;</span> is a line break inside a token.</p>
<table><tr><th>bucket</th><th>up to tokens</th><th>samples</th><th>tokens</th><th>supervised</th></tr>{rows}</table>
<h2>{len(samples)} samples, spread over buckets</h2>
{articles}
</body></html>
"""


def _article(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase, special: frozenset[int]) -> str:
    supervised = sum(sample.loss_mask)
    spans = "".join(_spans(sample, tokenizer, special))
    return (
        f"<article><header><b>{escape(sample.sample_id)}</b><span>{escape(sample.kind)}</span>"
        f"<span>{len(sample.input_ids)} tokens</span><span>{supervised} supervised</span></header><pre>{spans}</pre></article>"
    )


def _spans(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase, special: frozenset[int]) -> Iterator[str]:
    tokens = zip(sample.input_ids, sample.loss_mask, strict=True)
    for supervised, run in groupby(tokens, key=lambda pair: pair[1]):
        inner = "".join(
            f'<span class="t s">{_visible(text)}</span>' if is_special else f'<span class="t">{_visible(text)}</span>'
            for text, is_special in _pieces((token for token, _ in run), tokenizer, special)
        )
        yield f'<span class="on">{inner}</span>' if supervised else inner


def _pieces(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, special: frozenset[int]) -> Iterator[tuple[str, bool]]:
    """Text of each token; tokens that are parts of one character come together."""
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and len(waiting) < 4:
            continue
        yield text, token in special
        waiting.clear()
    if waiting:
        yield tokenizer.decode(waiting, skip_special_tokens=False, clean_up_tokenization_spaces=False), False


def _visible(text: str) -> str:
    return escape(text).replace("\n", '<span class="n">&#9166;</span>\n')
