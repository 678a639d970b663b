"""Whole builds at the exact limit of length, one token below it and above it; every policy, against the unlimited build."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from workshop import TOKENIZER, Workshop, samples_of

from dflash.config import Config
from dflash.data.prepare import PreparedData
from dflash.data.quarantine import BadRowError
from dflash.data.reader import Sample, SampleStore
from dflash.errors import DataError

CHAT = {
    "id": "chat",
    "messages": [
        {"role": role, "content": f"{text} {number}"}
        for number in range(3)
        for role, text in (("user", "what is the weather and"), ("assistant", "yes and the numbers talk"))
    ],
}
SHORT = {"id": "short", "prompt": "hi", "completion": "yes yes"}


def config_of(place: Workshop, limit: int, policy: str, **data: Any) -> Config:
    settings = {"max_bad_frac": 1.0, **data}
    return place.config(
        place.corpus(CHAT, SHORT), over_long=policy, max_length_tokens=limit, bucket_edges_tokens=(limit,), **settings
    )


@pytest.fixture
def whole(workshop: Workshop) -> Sample:
    """The conversation without any limit."""
    config = config_of(workshop, 1000, "error")
    return samples_of(workshop.prepare(config), config)[0]


def of_chat(data: PreparedData, config: Config) -> list[Sample]:
    """The samples that the conversation became: all but the last, which is the short one's."""
    return samples_of(data, config)[: data.manifest.samples - 1]


def at(part: Sample, whole: Sample) -> int:
    """Where a piece lies in the whole; numbers make every stretch that holds one unique."""
    size = len(part.input_ids)
    places = [
        start for start in range(len(whole.input_ids) - size + 1) if (whole.input_ids[start : start + size] == part.input_ids).all()
    ]
    assert len(places) == 1
    return places[0]


@pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
@pytest.mark.parametrize("more", [0, 1, 100])
def test_a_sample_of_exactly_the_limit_or_less_is_left_alone(workshop: Workshop, whole: Sample, policy: str, more: int) -> None:
    config = config_of(workshop, len(whole.input_ids) + more, policy)
    data = workshop.prepare(config)
    [sample] = of_chat(data, config)
    assert (sample.input_ids == whole.input_ids).all()
    assert (sample.loss_mask == whole.loss_mask).all()
    assert data.manifest.quarantined == {}


def test_one_token_more_stops_the_build_or_is_counted(workshop: Workshop, whole: Sample) -> None:
    limit = len(whole.input_ids) - 1
    with pytest.raises(BadRowError, match=rf"a\.jsonl:1: over_long: the sample has {limit + 1} tokens, the limit is {limit}"):
        workshop.prepare(config_of(workshop, limit, "error"))
    config = config_of(workshop, limit, "drop")
    data = workshop.prepare(config)
    assert (data.manifest.quarantined, data.manifest.samples, data.manifest.rows) == ({"over_long": 1}, 1, 2)
    [file] = data.manifest.quarantine_files
    assert file.rows == 1
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used \(over_long 1\)"):
        workshop.prepare(config_of(workshop, limit, "drop", max_bad_frac=0.49))
    assert workshop.prepare(config_of(workshop, limit, "drop", max_bad_frac=0.5)).reused


@pytest.mark.parametrize("share", [(1, -1), (1, 0), (1, 1), (2, 0), (3, 1), (4, 0)], ids=str)
def test_truncation_keeps_exactly_the_beginning(workshop: Workshop, whole: Sample, share: tuple[int, int]) -> None:
    divisor, extra = share
    limit = len(whole.input_ids) // divisor + extra
    config = config_of(workshop, limit, "truncate")
    data = workshop.prepare(config)
    [sample] = of_chat(data, config)
    assert (sample.input_ids == whole.input_ids[:limit]).all()
    assert (sample.loss_mask == whole.loss_mask[:limit]).all()
    assert data.manifest.tokens == min(limit, len(whole.input_ids)) + data.manifest.buckets[0].tokens - len(sample.input_ids)


@pytest.mark.parametrize("divisor", [1.01, 1.5, 2, 2.5, 3, 4, 6])
def test_pieces_hold_every_supervised_token_in_its_place(workshop: Workshop, whole: Sample, divisor: float) -> None:
    limit = int(len(whole.input_ids) / divisor)
    config = config_of(workshop, limit, "split")
    data = workshop.prepare(config)
    pieces = of_chat(data, config)
    assert len(pieces) >= min(divisor // 1.5, 3), "one for each answer at least, where they do not fit together"
    starts = [at(piece, whole) for piece in pieces]
    ends = [start + len(piece.input_ids) for start, piece in zip(starts, pieces, strict=True)]
    assert all(end <= after for end, after in zip(ends, starts[1:], strict=False)), "in order, without overlap"
    assert all(len(piece.input_ids) <= limit and piece.loss_mask.any() for piece in pieces)
    covered = np.zeros(len(whole.input_ids), np.int64)
    for start, end, piece in zip(starts, ends, pieces, strict=True):
        assert (piece.loss_mask == whole.loss_mask[start:end]).all()
        covered[start:end] += 1
    lost = whole.loss_mask & (covered == 0)
    assert not (lost[1:] & lost[:-1]).any(), "no two supervised tokens in a row are in no piece"
    if all(end == after for end, after in pairwise([starts[0], *ends])):
        assert (np.concatenate([piece.input_ids for piece in pieces]) == whole.input_ids[starts[0] : ends[-1]]).all()


def test_pieces_have_names_of_their_own_and_one_prompt_hash_each(workshop: Workshop, whole: Sample) -> None:
    config = config_of(workshop, len(whole.input_ids) // 2, "split")
    data = workshop.prepare(config)

    tables = [pq.read_table(f"{data.location}/{shard.path}") for shard in data.manifest.shards]
    names = [name for table in tables for name in table["sample_id"].to_pylist()]
    assert names == [*(f"a.jsonl/chat#{number}" for number in range(1, len(names))), "a.jsonl/short"]
    assert data.manifest.prompt_files[0].rows == 4, "three questions and the short one"
    assert data.manifest.sources[0].rows == 2


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_only_the_last_answer_carries_loss_on_request(workshop: Workshop, supervise: str) -> None:
    config = config_of(workshop, 1000, "error", supervise=supervise)
    with SampleStore(workshop.prepare(config).location, fingerprint=None, reader=config.data.reader) as store:
        sample = store.read([0])[0]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]).astype(int))).reshape(-1, 2)
    answers = [TOKENIZER.decode(sample.input_ids[start:end]) for start, end in edges.tolist()]
    expected = [f"yes and the numbers talk {number}<|im_end|>" for number in range(3)]
    assert answers == (expected if supervise == "all" else expected[-1:])
