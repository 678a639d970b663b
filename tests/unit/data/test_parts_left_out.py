"""What becomes of a piece or a context of a conversation is never silent, and a sample's id is unique in its data set."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
from chat_toys import THINKING, toy_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from workshop import GOOD, Workshop, rows

from dflash.config import Config
from dflash.data.bad_rows import check_share, forbids
from dflash.data.limits import qualified_id, sample_ids
from dflash.data.prepare import PreparedData, prepare_data
from dflash.data.quarantine import BadRowError
from dflash.errors import DataError

REWRITING = toy_tokenizer(THINKING)
"""Two answers become two samples: the template drops the first one's empty thoughts once it is history."""

LATER_TOO_LONG = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the weather"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "and the weather " * 40},
    ],
    "id": "talk",
}


def prepared(place: Workshop, *corpus: Any, **data: Any) -> tuple[Config, PreparedData]:
    config = place.config(place.corpus(*corpus), template_flags={"enable_thinking": False}, **data)
    built = prepare_data(
        config,
        tokenizer=REWRITING,
        vocab_size=len(REWRITING),
        target_fingerprint="t",
        answerer=None,
        progress=lambda *_: None,
    )
    return config, built


def listed(data: PreparedData) -> list[dict[str, str]]:
    return [json.loads(line) for file in data.manifest.quarantine_files for line in data.store.read(file.path).splitlines()]


def ids_of(data: PreparedData) -> list[str]:
    tables = [pq.read_table(f"{data.location}/{shard.path}") for shard in data.manifest.shards]
    return [name for table in tables for name in table["sample_id"].to_pylist()]


class TestContexts:
    def test_a_context_that_is_dropped_is_listed_and_counted_although_its_row_is_kept(self, workshop: Workshop) -> None:
        _, data = prepared(workshop, GOOD[0], LATER_TOO_LONG, over_long="drop", bad_rows="error", max_bad_frac=0.0)
        assert sorted(ids_of(data)) == ["a.jsonl/r0", "a.jsonl/talk"]
        assert data.manifest.quarantined == {"part_over_long": 1}
        [part] = listed(data)
        assert part["origin"] == "a.jsonl:2"
        assert part["reason"].startswith("part_over_long: context 2 of 2: the sample has ")
        whole = int(part["reason"].split("has ")[1].split(" tokens")[0])
        assert data.manifest.dropped_tokens == whole
        assert sum(file.rows for file in data.manifest.quarantine_files) == 1

    def test_no_context_may_be_too_long_where_none_is_tolerated(self, workshop: Workshop) -> None:
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: over_long: the sample has \d+ tokens, the limit is 80"):
            prepared(workshop, GOOD[0], LATER_TOO_LONG, over_long="error")
        assert workshop.manifests() == []

    def test_a_context_without_a_pair_is_listed_too(self, workshop: Workshop) -> None:
        prompt = {"role": "user", "content": "the weather " * 60}
        turns = [*LATER_TOO_LONG["messages"][:2], prompt, {"role": "assistant", "content": "fine"}]
        _, data = prepared(workshop, {"messages": turns}, over_long="truncate")
        assert data.manifest.quarantined == {"part_no_supervised_pair": 1}
        assert data.manifest.samples == 1
        [part] = listed(data)
        assert "context 2 of 2: " in part["reason"]

    def test_all_contexts_too_long_is_one_bad_row_with_its_plain_reason(self, workshop: Workshop) -> None:
        long = {"role": "assistant", "content": "and the weather " * 40}
        turns = [LATER_TOO_LONG["messages"][0], long, *LATER_TOO_LONG["messages"][2:]]
        _, data = prepared(workshop, *GOOD, {"messages": turns}, over_long="drop", max_bad_frac=0.2)
        assert data.manifest.quarantined == {"over_long": 1}
        assert data.manifest.dropped_tokens == 0, "only rows that are kept are counted in tokens"

    def test_a_part_of_a_repeated_row_is_not_counted(self, workshop: Workshop) -> None:
        twice = [LATER_TOO_LONG, LATER_TOO_LONG | {"kind": "again"}]
        _, data = prepared(workshop, *twice, over_long="drop", bad_rows="quarantine", max_bad_frac=0.5)
        assert data.manifest.quarantined == {"duplicate_id": 1, "part_over_long": 1}
        _, once = prepared(workshop, twice[0], over_long="drop")
        assert data.manifest.dropped_tokens == once.manifest.dropped_tokens


@pytest.mark.parametrize("edges", ["auto", (24, 40, 80)])
@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_tokens_of_kept_rows_are_in_samples_or_counted_as_dropped(workshop: Workshop, policy: str, edges: Any) -> None:
    corpus = [*GOOD, {"prompt": "the weather " * 40, "completion": "and the weather " * 40}]
    if policy == "truncate":
        corpus = [*GOOD, {"prompt": "hi", "completion": "and the weather " * 40}]
    _, data = prepared(workshop, *corpus, over_long=policy, bucket_edges_tokens=edges, num_buckets=3)
    longest = workshop.config(workshop.corpus(*corpus), template_flags={"enable_thinking": False}, max_length_tokens=1000,
                              bucket_edges_tokens=(1000,))  # fmt: skip
    whole = prepare_data(
        longest, tokenizer=REWRITING, vocab_size=len(REWRITING), target_fingerprint="t", answerer=None, progress=lambda *_: None
    )
    assert whole.manifest.dropped_tokens == 0
    assert data.manifest.dropped_tokens > 0
    assert data.manifest.tokens + data.manifest.dropped_tokens == whole.manifest.tokens
    assert data.manifest.quarantined == {}


def test_parts_are_no_faulty_rows(workshop: Workshop) -> None:
    data = workshop.config(workshop.corpus(*GOOD), max_bad_frac=0.0).data
    check_share({"part_over_long": 9}, rows=3, data=data, example=None, listed_in="")
    assert not forbids("part_over_long", data)
    with pytest.raises(DataError, match=r"1 of 3 rows cannot be used \(not_json 1\)"):
        check_share({"part_over_long": 9, "not_json": 1}, rows=3, data=data, example=None, listed_in="")


class TestIds:
    def test_files_that_number_their_rows_alike_give_different_samples(self, workshop: Workshop) -> None:
        (workshop.folder / "b").mkdir()
        files = [
            workshop.corpus(*rows("one", "two"), {"prompt": "x", "completion": "yes"}, name=name) for name in ("a.jsonl", "b.jsonl")
        ]
        files.append(workshop.corpus(*rows("three"), name="b/a.jsonl"))
        data = workshop.prepare(workshop.config(*files))
        assert sorted(ids_of(data)) == [
            "a.jsonl/r0", "a.jsonl/r1", "a.jsonl:3", "a.jsonl~2/r0", "b.jsonl/r0", "b.jsonl/r1", "b.jsonl:3",
        ]  # fmt: skip
        assert [source.label for source in data.manifest.sources] == ["a.jsonl", "b.jsonl", "a.jsonl~2"]

    def test_a_file_that_is_added_renames_no_sample(self, workshop: Workshop) -> None:
        (workshop.folder / "b").mkdir()
        first = workshop.corpus(*rows("one", "two"))
        old = workshop.prepare(workshop.config(first))
        new = workshop.prepare(workshop.config(first, workshop.corpus(*rows("three"), name="b/a.jsonl")))
        assert new.location == old.location
        assert new.manifest.shards[: len(old.manifest.shards)] == old.manifest.shards
        assert ids_of(new) == [*ids_of(old), "a.jsonl~2/r0"]

    def test_the_same_file_under_two_paths_is_refused_even_with_a_number_of_conversations(self, workshop: Workshop) -> None:
        (workshop.folder / "b").mkdir()
        files = [workshop.corpus(*rows("one", "two"), name=name) for name in ("a.jsonl", "b/a.jsonl")]
        for number in (None, 3):
            with pytest.raises(DataError, match="have the same name and the same content"):
                workshop.prepare(workshop.config(*files, num_conversations=number))

    def test_an_id_that_looks_like_a_piece_is_told_from_one(self, workshop: Workshop) -> None:
        long = {"prompt": "hi", "completion": "and the weather " * 40, "id": "x"}
        corpus = workshop.corpus(long, GOOD[0] | {"id": "x#1"}, GOOD[1] | {"id": "x#1#"}, long | {"id": "x#2"})
        found = ids_of(workshop.prepare(workshop.config(corpus, over_long="split")))
        assert len(found) == 6
        assert len(set(found)) == len(found)
        assert {"a.jsonl/x#1", "a.jsonl/x#1#", "a.jsonl/x#1##", "a.jsonl/x#2##1"} <= set(found)

    @given(
        st.dictionaries(st.text("a#1/:~", max_size=5).filter(bool), st.integers(1, 3), max_size=6),
        st.lists(st.sampled_from(["a", "a:1", "b", "a~2", "a#1"]), min_size=2, max_size=2, unique=True),
    )
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_whatever_the_ids_and_labels(self, pieces: dict[str, int], labels: list[str]) -> None:
        found = [
            name
            for label in labels
            # The row's number is 1 in all files; ids are unique inside a file, as those of rows without one are.
            for own, count in {**pieces, f"{label}:1": 1}.items()
            for name in sample_ids(qualified_id(own, label=label, row="1"), count)
        ]
        assert len(set(found)) == len(found)
