"""Sources: what they are known by, how many rows each gives, and what a reading without tokenizing tells."""

from __future__ import annotations

import gzip
import hashlib
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workshop import GOOD, TOKENIZER, Workshop, rows

from dflash.data.fingerprint import target_id
from dflash.data.prepare import plan_build
from dflash.data.sources import describe_file, describe_sources, plan_units, read_rows, source_uris, survey_source
from dflash.data.synthetic import normalise_prompt
from dflash.errors import StorageError
from dflash.records import Conversation, QuarantinedRow


def test_a_file_is_known_by_its_name_and_its_bytes(workshop: Workshop) -> None:
    file = Path(workshop.corpus(*GOOD))
    source = describe_file(str(file))
    assert (source.label, source.size_bytes, source.lines) == ("a.jsonl", file.stat().st_size, 4)
    assert source.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    os.utime(file, (1, 1))
    assert describe_file(str(file)) == source, "dates do not count"
    packed = file.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert (describe_file(str(packed)).lines, describe_file(str(packed)).label) == (4, "a.jsonl.gz")
    with pytest.raises(StorageError, match="nowhere"):
        describe_file(str(file.with_name("nowhere.jsonl")))


def test_globs_give_files_in_order_and_each_once(workshop: Workshop) -> None:
    b, a = workshop.corpus(*GOOD, name="b.jsonl"), workshop.corpus(*GOOD)
    pattern = str(workshop.folder / "*.jsonl")
    assert source_uris(workshop.config(pattern).data) == (a, b)
    assert source_uris(workshop.config(b, pattern).data) == (b, a), "a file that is named before a pattern keeps its place"
    with pytest.raises(StorageError):
        source_uris(workshop.config(str(workshop.folder / "*.parquet")).data)


def test_the_generator_is_known_by_what_it_gives(workshop: Workshop) -> None:
    def generated(**settings: object) -> tuple[str, str, int]:
        data = workshop.config(source="synthetic", **{"num_conversations": 5, **settings}).data
        (source,) = describe_sources(data, progress=lambda *_: None)
        return source.label, source.sha256, source.lines

    assert generated() == generated()
    assert generated()[0] == "synthetic-7"
    assert len({generated()[1], generated(seed=8)[1], generated(num_conversations=6)[1]}) == 3


def test_a_survey_counts_what_a_build_will_meet(workshop: Workshop) -> None:
    chat = {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")], "id": "r1"}
    corpus = workshop.corpus("{oops", *rows("one", "two"), chat, "[3]", "")
    data = workshop.config(corpus).data
    source = describe_file(corpus)
    found = survey_source(data, source, limit=None)
    assert (found.rows, found.conversations, found.answers) == (5, 2, 2)
    assert found.quarantined == {"duplicate_id": 1, "not_json": 1, "wrong_type": 1}
    assert found.first_bad is not None
    assert found.first_bad.origin == f"{corpus}:1"
    short = survey_source(data, source, limit=1)
    assert (short.rows, short.conversations) == (2, 1), "it stops with the last conversation that is wanted"
    kinds = [type(row) for row in read_rows(data, source, limit=None)]
    assert kinds == [QuarantinedRow, Conversation, Conversation, QuarantinedRow, QuarantinedRow]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 14))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_number_of_conversations_is_shared_out_exactly(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], wanted: int
) -> None:
    folder = tmp_path_factory.mktemp("share")
    TOKENIZER.save_pretrained(str(folder / "target"))
    place = Workshop(folder, folder / "target")
    files = [
        place.corpus(*rows(*(f"{number} {index}" for index in range(size))), name=f"{number}.jsonl")
        for number, size in enumerate(sizes)
    ]
    data = place.config(*files, num_conversations=wanted).data
    job, _ = plan_build(place.config(*files), tokenizer=TOKENIZER, vocab_size=400, target_fingerprint="t", progress=lambda *_: None)
    units = plan_units(data, describe_sources(data, progress=lambda *_: None), job.recipe)
    taken = [sum(isinstance(row, Conversation) for row in read_rows(data, spec.source, limit=spec.limit)) for spec in units]
    assert sum(taken) == min(wanted, sum(sizes))
    assert [spec.source.uri for spec in units] == files[: len(units)]
    whole = plan_units(place.config(*files).data, describe_sources(data, progress=lambda *_: None), job.recipe)
    for spec, count, size in zip(units, taken, sizes, strict=False):
        assert (spec.limit is None) == (spec in whole)
        assert spec.limit is None or spec.limit == count <= size


def test_files_of_one_name_have_journals_of_their_own(workshop: Workshop) -> None:
    (workshop.folder / "b").mkdir()
    files = workshop.corpus(*GOOD), workshop.corpus(*GOOD[:2], name="b/a.jsonl"), workshop.corpus(*GOOD, name="a b.jsonl")
    _, units = plan_build(
        workshop.config(*files), tokenizer=TOKENIZER, vocab_size=400, target_fingerprint="t", progress=lambda *_: None
    )
    journals = [spec.journal for spec in units]
    assert len(set(journals)) == 3
    assert all("/" not in name and " " not in name for name in journals)
    workshop.corpus(*GOOD, *rows("late"))
    _, again = plan_build(
        workshop.config(*files), tokenizer=TOKENIZER, vocab_size=400, target_fingerprint="t", progress=lambda *_: None
    )
    assert [spec.journal for spec in again] == journals, "a changed file finds the answers of its unchanged rows"
    assert again[0].unit != units[0].unit


def test_a_target_is_named_without_its_place(workshop: Workshop) -> None:
    target = workshop.config(workshop.corpus(*GOOD)).target
    named = {"/models/qwen/": "qwen", "./local/x": "x", "org/name": "org/name", "demo": "demo"}
    for path, name in named.items():
        assert target_id(target.model_copy(update={"path": path})) == name


@given(st.text())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_prompts_are_normalised_as_written_down(text: str) -> None:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = [" " if unicodedata.category(char)[0] == "P" and char not in "-*/%" else char for char in folded]
    assert normalise_prompt(text) == " ".join("".join(kept).split())
