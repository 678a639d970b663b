"""Sets of hashes in sorted arrays, against Python's own sets."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import prompt_hashes
from dflash.data.prompt_hashes import PromptHashes, PromptTable, write_table
from dflash.data.seen_ids import SeenIds, id_digests


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_seen_ids_are_a_set(batches: list[list[int]]) -> None:
    seen, known = SeenIds(), set()
    for batch in batches:
        expected = []
        for number in batch:
            expected.append(number in known)
            known.add(number)
        assert seen.add(id_digests([str(number) for number in batch])).tolist() == expected


def hashed(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@given(st.lists(st.lists(st.integers(0, 60), max_size=9), max_size=9), st.lists(st.integers(0, 60), max_size=9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_prompt_tables_are_a_set(batches: list[list[int]], second: list[int]) -> None:
    table = PromptTable()
    for batch in batches:
        table.add(b"".join(bytes.fromhex(hashed(number))[:16] for number in batch))
    wanted = {number for batch in batches for number in batch}
    rows = [bytes(row) for row in table.table()]
    assert rows == sorted({bytes.fromhex(hashed(number))[:16] for number in wanted})
    other = PromptTable()
    other.add(b"".join(bytes.fromhex(hashed(number))[:16] for number in second))
    hashes = PromptHashes([table.table(), other.table()])
    assert {number for number in range(61) if hashed(number) in hashes} == wanted | set(second)


def test_equal_beginnings_do_not_confuse_the_search() -> None:
    digests = [bytes(8) + bytes([low]) + bytes(7) for low in (3, 1, 200)]
    table = PromptTable()
    table.add(b"".join(digests))
    hashes = PromptHashes([table.table()])
    assert [(bytes(8) + bytes([low]) + bytes(7)).hex() in hashes for low in (0, 1, 2, 3, 200)] == [False, True, False, True, True]


def test_tables_are_compacted_on_the_way_and_stored_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_hashes, "_COMPACT_ABOVE", 10)
    table = PromptTable()
    for number in range(200):
        table.add(bytes.fromhex(hashed(number % 7))[:16])
    assert len(table.table()) == 7
    write_table(tmp_path / "t.npy", table.table())
    assert np.array_equal(np.load(tmp_path / "t.npy", allow_pickle=False), table.table())
    write_table(tmp_path / "empty.npy", PromptTable().table())
    assert np.load(tmp_path / "empty.npy", allow_pickle=False).shape == (0, 16)
