"""The journal of answers: found again by content, whatever was killed, and small in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import journal as journal_module
from dflash.data.journal import AnswerEntry, AnswerJournal, answer_digest
from dflash.errors import DataError


def digest(*ids: int, key: str = "c/0", temperature: float = 0.0, max_new_tokens: int = 8) -> str:
    return answer_digest(ids, max_new_tokens=max_new_tokens, temperature=temperature, key=key)


def entry(of: str, content: str = "yes") -> AnswerEntry:
    return AnswerEntry(of, "c", 0, content, None, prompt_tokens=3, tokens=2, finish_reason="stop", exact=True)


class TestDigest:
    def test_it_depends_on_everything_that_decides_an_answer(self) -> None:
        variants = [digest(1, 2), digest(2, 1), digest(1, 2, 0), digest(12), digest(1, 2, max_new_tokens=9)]
        variants += [digest(1, 2, temperature=0.5), digest(1, 2, temperature=0.5, key="c/1")]
        assert len(set(variants)) == len(variants)
        assert all(len(bytes.fromhex(variant)) == 16 for variant in variants)

    def test_equal_prompts_have_one_greedy_answer_but_samples_of_their_own(self) -> None:
        assert digest(1, 2, key="a/0") == digest(1, 2, key="b/3")
        assert digest(1, 2, key="a/0", temperature=0.1) != digest(1, 2, key="b/3", temperature=0.1)


@pytest.mark.parametrize("merge_entries", [1, 2, 1000])
def test_what_was_appended_is_found_before_and_after_reopening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_entries: int
) -> None:
    monkeypatch.setattr(journal_module, "_MERGE_ENTRIES", merge_entries)
    path = tmp_path / "deep" / "journal.jsonl"
    wanted = {digest(number): entry(digest(number), f"Grüße {number}\n") for number in range(20)}
    with AnswerJournal(path) as book:
        for first in range(0, 20, 3):
            book.append(list(wanted.values())[first : first + 3])
            assert len(book) == min(20, first + 3)
        assert {key: book.find(key) for key in wanted} == wanted
    with AnswerJournal(path) as book:
        assert {key: book.find(key) for key in wanted} == wanted
        assert book.find(digest(99)) is None
        book.append([])
    assert len(path.read_bytes().splitlines()) == 20


def test_digests_that_begin_alike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MERGE_ENTRIES", 3)
    alike = [f"{'a' * 16}{number:016x}" for number in range(8)]
    with AnswerJournal(tmp_path / "j") as book:
        for number, name in enumerate(alike):
            book.append([entry(name, str(number))])
            for known, other in enumerate(alike):
                found = book.find(other)
                assert (found.content if found else None) == (str(known) if known <= number else None)


def test_of_two_answers_to_one_prompt_the_first_counts(tmp_path: Path) -> None:
    with AnswerJournal(tmp_path / "j") as book:
        book.append([entry(digest(1), "first"), entry(digest(1), "second")])
        found = book.find(digest(1))
    assert found is not None and found.content == "first"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batches=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), cut=st.integers(1, 500), zeros=st.booleans()
)
def test_a_torn_end_costs_only_lines_that_are_not_whole(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], cut: int, zeros: bool
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    lines: list[int] = []
    with AnswerJournal(path) as book:
        for batch in batches:
            book.append([entry(digest(number), f"answer {number}") for number in batch])
            lines += batch
    content = path.read_bytes()[: max(0, path.stat().st_size - cut)]
    kept = content.count(b"\n")
    path.write_bytes(content + (bytes(50) if zeros else b""))
    with AnswerJournal(path) as book:
        assert len(book) == kept
        for number in range(10):
            assert (book.find(digest(number)) is not None) == (number in lines[:kept])
        book.append([entry(digest(77))])
    with AnswerJournal(path) as book:
        assert len(book) == kept + 1
        assert book.find(digest(77)) is not None


@pytest.mark.parametrize(
    "damage",
    [b'{"digest": "ab"}', b"[]", b"{}", b"\xff\xfe", b"null", bytes(10)],
    ids=["lacks fields", "list", "empty", "not UTF-8", "null", "zeros"],
)
def test_a_damaged_line_is_named_with_its_number(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "j"
    with AnswerJournal(path) as book:
        book.append([entry(digest(1)), entry(digest(2))])
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, damage, second, b""]))
    with pytest.raises(DataError, match="damaged") as caught:
        AnswerJournal(path)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize("field", [{"schema_version": 1}, {"digest": "abc"}, {"digest": "G" * 32}, {"finish_reason": "eos"}])
def test_a_line_of_another_kind_is_refused(tmp_path: Path, field: dict[str, object]) -> None:
    path = tmp_path / "j"
    with AnswerJournal(path) as book:
        book.append([entry(digest(1))])
    path.write_text(json.dumps({**json.loads(path.read_text()), **field}) + "\n")
    with pytest.raises(DataError, match="damaged"):
        AnswerJournal(path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with AnswerJournal(path) as book:
        with pytest.raises(DataError, match="somebody else"):
            AnswerJournal(path)
        book.append([entry(digest(1))])
    with AnswerJournal(path) as book:
        assert len(book) == 1


def test_an_append_is_one_write_that_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    sizes: list[int] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        sizes.append(path.stat().st_size)
        sync(descriptor)

    with AnswerJournal(path) as book:
        monkeypatch.setattr(os, "fsync", recorded)
        book.append([entry(digest(number)) for number in range(50)])
        assert sizes == [path.stat().st_size]


def test_memory_holds_no_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MERGE_ENTRIES", 64)
    with AnswerJournal(tmp_path / "j") as book:
        for number in range(640):
            book.append([entry(digest(number), "x" * 1000)])
        index = book._index
        assert not index._new
        assert index._keys.nbytes + index._offsets.nbytes == 16 * 640
