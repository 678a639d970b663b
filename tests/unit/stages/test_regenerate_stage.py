"""Answers as a conversation file: what is left out is listed, and nothing is asked in vain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.config import Config, parse_config
from dflash.data.quarantine import BadRowError
from dflash.data.tokenizer import load_tokenizer
from dflash.errors import ConfigError, DataError, StorageError
from dflash.stages.answerer import open_answerer
from dflash.stages.regenerate import RegenerateStage, regenerate_stage
from tests.support.full_disk import full_disk

GOOD = [{"prompt": f"What is {number} + 2?", "id": f"r{number}", "kind": "sum"} for number in range(4)]
BAD = ["not json", {"messages": []}]


def config(folder: Path, rows: list[Any], **data: Any) -> Config:
    file = folder / "corpus.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    text = json.dumps(
        {
            "run": {"name": "tiny", "root": str(folder / "runs")},
            "target": {"path": "demo", "mask_token": "<|mask|>"},
            "data": {
                "source": "files", "files": [str(file)], "bad_rows": "quarantine", "max_bad_frac": 0.5, **data,
                "answers": {"max_new_tokens": 24, "keep_unfinished": True, **data.get("answers", {})},
            },
        }
    )  # fmt: skip
    return parse_config(text, origin="test")


def regenerate(settings: Config, output: Path | None = None) -> RegenerateStage:
    return regenerate_stage(settings, output=None if output is None else str(output), progress=lambda *_: None)


def rows(file: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_every_row_ends_in_one_of_the_two_files(tmp_path: Path) -> None:
    stage = regenerate(config(tmp_path, [GOOD[0], BAD[0], *GOOD[1:], BAD[1]]))
    assert stage.output == str(tmp_path / "runs" / "answers" / "tiny.jsonl")
    written = rows(stage.output)
    assert [row["id"] for row in written] == ["r0", "r1", "r2", "r3"]
    assert (stage.conversations, stage.answers, stage.exact) == (4, 4, 4)
    for row, asked in zip(written, GOOD, strict=True):
        question, answer = row["messages"]
        assert question == {"role": "user", "content": asked["prompt"]}
        assert answer["role"] == "assistant"
        assert answer["content"]
        assert row["kind"] == "sum"
        assert row["sampling"]["max_tokens"] == 24
    assert [row["origin"].rpartition(":")[2] for row in rows(stage.quarantine)] == ["2", "6"]
    assert sum(stage.quarantined.values()) == 2
    assert {path.name for path in (tmp_path / "runs" / "answers").iterdir() if path.suffix == ".partial"} == set()


def test_running_it_again_asks_nothing_and_writes_the_same(tmp_path: Path) -> None:
    settings = config(tmp_path, GOOD)
    first = regenerate(settings)
    content, journal = Path(first.output).read_bytes(), Path(first.journal).read_bytes()
    assert regenerate(settings) == first
    assert (Path(first.output).read_bytes(), Path(first.journal).read_bytes()) == (content, journal)


def test_a_corpus_under_another_name_and_order_finds_its_answers(tmp_path: Path) -> None:
    first = regenerate(config(tmp_path, GOOD))
    journal = Path(first.journal).read_bytes()
    renamed = [{"prompt": row["prompt"], "id": f"other-{row['id']}"} for row in reversed(GOOD)]
    again = regenerate(config(tmp_path, renamed), tmp_path / "b.jsonl")
    assert Path(again.journal).read_bytes() == journal
    answers = [[row["messages"][1] for row in rows(file)] for file in (first.output, again.output)]
    assert answers[0] == answers[1][::-1]


def test_too_many_bad_rows_stop_it_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing was asked yet"):
        regenerate(config(tmp_path, [*GOOD[:1], *BAD]))
    assert list((tmp_path / "runs" / "answers").iterdir()) == []


def test_a_bad_row_stops_it_where_none_is_tolerated(tmp_path: Path) -> None:
    with pytest.raises(BadRowError, match=r"corpus\.jsonl:2"):
        regenerate(config(tmp_path, [GOOD[0], BAD[0], *GOOD], bad_rows="error"))


def test_an_output_that_cannot_be_written_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        regenerate(config(tmp_path, GOOD), tmp_path / "file" / "out.jsonl")
    assert not list((tmp_path / "runs" / "answers").glob("journal*"))


def test_an_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    many = [*GOOD, {"prompt": "What is it? " * 200}]  # too long for the limit: set aside, and that is not tolerated
    with pytest.raises(BadRowError, match="over_long"):
        regenerate(config(tmp_path, many, over_long="error"), output)
    assert output.read_text() == "old"
    assert regenerate(config(tmp_path, many, over_long="drop"), output).quarantined == {"over_long": 1}
    assert len(rows(output)) == 4


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_full_disk_is_one_clear_error_and_the_next_run_goes_on(tmp_path: Path, suffix: str) -> None:
    settings, output = config(tmp_path, [*GOOD, BAD[0]]), tmp_path / f"out{suffix}"
    for limit_bytes in (0, 60, 250):
        with full_disk(limit_bytes=limit_bytes), pytest.raises(StorageError, match=r"cannot .*: File too large"):
            regenerate(settings, output)
        assert not output.exists()
        assert not list(tmp_path.rglob("*.partial"))
    assert regenerate(settings, output).conversations == 4
    assert output.exists()


def test_a_server_without_an_address_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path, GOOD, answers={"engine": "server", "regenerate": False})
    with pytest.raises(ConfigError, match="there is no server"):
        regenerate(settings)


def test_opening_an_engine_loads_and_asks_nothing(tmp_path: Path) -> None:
    nowhere = {"engine": "server", "server": {"url": "http://127.0.0.1:9/v1", "max_retries": 0}}
    for answers in ({}, nowhere):
        with open_answerer(config(tmp_path, GOOD, answers=answers), load_tokenizer(config(tmp_path, GOOD).target)) as engine:
            assert engine.window > 1
