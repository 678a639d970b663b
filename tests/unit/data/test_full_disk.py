"""A disk that fills up while a data set is built: one clear error wherever it happens, and the next build is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from workshop import GOOD, Workshop, rows

from dflash.data.journal import AnswerEntry, AnswerJournal, answer_digest
from dflash.data.prepare import load_data
from dflash.errors import StorageError
from tests.support.full_disk import full_disk


@pytest.mark.parametrize("edges", [(24, 40, 80), "auto"])
def test_a_build_on_a_full_disk_is_refused_and_the_next_is_right(workshop: Workshop, edges: Any) -> None:
    files = [workshop.corpus(*GOOD, *("{oops" for _ in range(8))), workshop.corpus(*rows("one more"), name="b.jsonl")]
    settings: dict[str, Any] = {"bad_rows": "quarantine", "max_bad_frac": 0.7, "bucket_edges_tokens": edges, "num_buckets": 2}
    golden = workshop.prepare(workshop.config(*files, **settings, store=str(workshop.folder / "golden"))).manifest
    said = set()
    for limit_bytes in (0, 120, 300, 900, 1500, 2100, 2250, 2400, 3000):
        root = workshop.folder / str(limit_bytes)
        config = workshop.config(*files, **settings, store=str(root))
        with full_disk(limit_bytes=limit_bytes), pytest.raises(StorageError, match=r"cannot write .*: File too large") as caught:
            workshop.prepare(config)
        assert str(root) in caught.value.what
        said.add(caught.value.what.partition(str(root))[0])
        assert not list(root.glob("*/manifest*"))
        assert not [path for path in root.rglob("*") if ".tmp" in path.name]
        data = workshop.prepare(config)
        assert data.manifest == golden
        load_data(data.location, fingerprint=data.fingerprint, verify="full")
        assert not list(root.glob("*/.scratch"))
    assert said == {"cannot write unfinished files in ", "cannot write "}, "both kinds of places were met"


@pytest.mark.parametrize("blocked", ["store is a file", "lock is a folder"])
def test_a_place_that_cannot_hold_data_sets_is_named(workshop: Workshop, blocked: str) -> None:
    root = workshop.folder / "place"
    if blocked == "store is a file":
        root.write_bytes(b"")
    else:
        (root / ".lock").mkdir(parents=True)
    with pytest.raises(StorageError, match=f"cannot keep data sets in {root}"):
        workshop.prepare(workshop.config(workshop.corpus(*GOOD), store=str(root)))


def entry(number: int) -> AnswerEntry:
    digest = answer_digest([number], max_new_tokens=4, temperature=0.0, key="")
    return AnswerEntry(
        digest, conversation_id="c", turn=1, content="x" * 50, reasoning=None,
        prompt_tokens=1, tokens=2, finish_reason="stop", exact=True,
    )  # fmt: skip


def test_a_journal_that_cannot_grow_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with AnswerJournal(path) as journal:
        journal.append(entry(number) for number in range(3))
    size = path.stat().st_size
    with (
        full_disk(limit_bytes=size + 40),
        pytest.raises(StorageError, match=f"cannot record answers in {path}: File too large"),
        AnswerJournal(path) as journal,
    ):
        journal.append([entry(3)])
    with AnswerJournal(path) as journal:
        assert [journal.find(entry(number).digest) == entry(number) for number in range(4)] == [True, True, True, False]
        journal.append([entry(3)])
        assert journal.find(entry(3).digest) == entry(3)
