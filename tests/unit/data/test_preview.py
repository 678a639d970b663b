"""The preview page: every token once, supervised ones marked, nothing hostile gets through."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from chat_families import family_renderer, family_tokenizer
from chat_toys import talk
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from dflash.data.columns import TokenizedSample
from dflash.data.preview import HEAD_TOKENS, TAIL_TOKENS, preview_page
from dflash.records import BucketStats, DataManifest

EDGES = (64, 256, 4000)


def manifest(**changes: Any) -> DataManifest:
    fields: dict[str, Any] = {
        "fingerprint": "0123456789abcdef0123", "recipe_fingerprint": "r", "sources": (), "target_id": "toy",
        "target_fingerprint": "t",
        "tokenizer_sha256": "k", "template_sha256": "c", "template_flags": {}, "vocab_size": 400, "mask_token_id": 1,
        "mask_token_uses": 0, "on_policy": True, "answer_sampling": {}, "rows": 9, "samples": 9, "tokens": 900,
        "supervised_tokens": 300, "max_length_tokens": 4000, "edges_tokens": EDGES, "quarantined": {},
        "dropped_tokens": 0,
        "buckets": tuple(BucketStats(k, edge, 3, 300, 100) for k, edge in enumerate(EDGES)),
        "prompt_files": (), "quarantine_files": (), "shards": (),
    }  # fmt: skip
    return DataManifest(**{**fields, **changes})


def sample(*contents: str, family: str = "qwen3", name: str = "s1", source: str = "toy") -> TokenizedSample:
    rendered = family_renderer(family).render(talk(*contents))
    return TokenizedSample(name, source, rendered.input_ids, rendered.loss_spans, rendered.turns)


@dataclass
class Page(HTMLParser):
    """What a browser would see: tags in use, samples' texts, marked texts."""

    tags: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    marked: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, samples: list[TokenizedSample], tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Page:
        page = cls()
        HTMLParser.__init__(page)
        page.feed(preview_page(samples, manifest(**changes), tokenizer))
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag == "pre":
            self.texts.append("")
        if tag == "mark" and "pre" in self.open:
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes nothing"

    def handle_data(self, data: str) -> None:
        if "pre" in self.open and "u" not in self.open:
            self.texts[-1] += data
            if "mark" in self.open:
                self.marked[-1] += data


def test_the_text_is_whole_and_the_marked_parts_are_the_answers() -> None:
    tokenizer = family_tokenizer("qwen2.5")
    page = Page.of([sample("2?", "two é漢🙂", "so?", "fine", family="qwen2.5")], tokenizer)
    (text,) = page.texts
    assert text == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\ntwo é漢🙂<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n"
    )
    assert page.marked == ["two é漢🙂<|im_end|>", "fine<|im_end|>"]
    assert page.open == [], "every element is closed"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(alphabet=st.sampled_from("<>&\"'/ script\n\t\x00\x1b\u202e🙂é="), min_size=1, max_size=40))
def test_hostile_text_stays_text(text: str) -> None:
    tokenizer = family_tokenizer("smollm2")
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>" + text
    shown = sample("hi", hostile, name=hostile, source=hostile, family="smollm2")
    page = Page.of([shown], tokenizer, target_id=hostile, template_flags={hostile: hostile}, quarantined={hostile: 1})
    assert not page.tags & {"script", "img", "a", "link", "iframe"}
    assert page.open == []
    pictures = hostile.translate({code: 0x2400 + code for code in range(32) if code != 10})
    assert pictures in page.texts[0]
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", page.texts[0])


def test_samples_are_grouped_by_bucket_and_long_ones_shortened() -> None:
    tokenizer = family_tokenizer("smollm2")
    long, short = sample("hi", "a 3 " * 900, name="long", family="smollm2"), sample("hi", "ho", name="short", family="smollm2")
    page = preview_page([long, short], manifest(), tokenizer)
    assert page.index("Bucket 0: up to 64") < page.index("<strong>short") < page.index("Bucket 2: up to 4,000")
    assert page.index("Bucket 2: up to 4,000") < page.index("<strong>long")
    assert "Bucket 1: up to" not in page, "a bucket without a sample to show has no section"
    left_out = len(long.input_ids) - HEAD_TOKENS - TAIL_TOKENS
    assert f"{left_out:,} tokens left out" in page
    parsed = Page.of([long], tokenizer)
    assert len(parsed.texts) == 2
    assert parsed.texts[1].endswith("<|im_end|>\n")
    assert parsed.marked[1].endswith("<|im_end|>"), "the end shows its own part of the mask"


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_figures_stand_above(on_policy: bool) -> None:
    page = preview_page([], manifest(on_policy=on_policy, quarantined={"over_long": 1200}), family_tokenizer("smollm2"))
    for words in ("0123456789abcdef", "toy", "33%", "over_long 1,200", "the target itself" if on_policy else "the corpus"):
        assert words in page
    assert "http" not in page.replace("http-equiv", ""), "nothing outside the page is asked for"
