"""Rows that cannot be used: what stops a build at once, what is listed and counted, and the share that is judged at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import DataConfig
from dflash.data.bad_rows import BadRowFile, check_share, warn_of_answers
from dflash.data.quarantine import BadRowError
from dflash.errors import DataError
from dflash.records import QuarantinedRow

BAD = QuarantinedRow("a.jsonl:3", "wrong_type: prompt is list, not a text")
LONG = QuarantinedRow("a.jsonl:4", "over_long: sample 'x' has 900 tokens, the limit is 80")
UNFINISHED = QuarantinedRow("a.jsonl:5", "unfinished: answer 0 has no stop token within 24 tokens")


def policies(**data: Any) -> DataConfig:
    return DataConfig(num_conversations=1, **{"bad_rows": "quarantine", "over_long": "drop", **data})


def test_each_reason_follows_its_own_policy(tmp_path: Path) -> None:
    strict = BadRowFile(tmp_path / "strict.jsonl", policies(bad_rows="error"))
    strict.add(LONG)
    strict.add(UNFINISHED)
    with pytest.raises(BadRowError, match=r"a\.jsonl:3: wrong_type: prompt is list") as caught:
        strict.add(BAD)
    assert "data.bad_rows: quarantine" in caught.value.remedy
    short = BadRowFile(tmp_path / "short.jsonl", policies(over_long="error"))
    short.add(BAD)
    with pytest.raises(BadRowError, match="900 tokens") as caught:
        short.add(LONG)
    assert "data.max_length_tokens" in caught.value.remedy
    for file, lines in ((strict, 2), (short, 1)):
        file.close()
        assert len(file.path.read_text().splitlines()) == lines, "what was set aside before stays readable"


def test_rows_are_counted_by_reason_and_listed_as_json(tmp_path: Path) -> None:
    held = BadRowFile(tmp_path / "q.jsonl", policies())
    strange = QuarantinedRow("ü.jsonl:1", "not_json: line\nbreak")
    for row in (LONG, BAD, LONG, UNFINISHED, strange):
        held.add(row)
    held.close()
    assert held.counts == {"not_json": 1, "over_long": 2, "unfinished": 1, "wrong_type": 1}
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[1] == {"origin": BAD.origin, "reason": BAD.reason}
    assert lines[4] == {"origin": strange.origin, "reason": strange.reason}
    assert len(lines) == 5


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    faulty=st.integers(0, 6), silent=st.integers(0, 6), good=st.integers(0, 10), frac=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
)
def test_faulty_rows_are_judged_over_all_rows_and_the_targets_doing_is_not(
    faulty: int, silent: int, good: int, frac: float
) -> None:
    counts = {code: count for code, count in (("unfinished", silent), ("wrong_type", faulty)) if count}
    total = faulty + silent + good
    data = policies(max_bad_frac=frac)
    if good > 0 and faulty <= frac * total:
        check_share(counts, rows=total, data=data, example=None, listed_in="q.jsonl")
        return
    with pytest.raises(DataError) as caught:
        check_share(counts, rows=total, data=data, example=BAD, listed_in="all are listed in q.jsonl")
    if faulty + silent:
        assert f"{faulty + silent} of {total} rows" in caught.value.what
        assert BAD.reason in caught.value.what
        assert "q.jsonl" in caught.value.remedy
        blames_the_target = faulty <= frac * total and silent >= faulty
        assert ("max_new_tokens" in caught.value.remedy) == blames_the_target, "the remedy is for what broke the limit"


@pytest.mark.parametrize(("silent", "warned"), [(0, False), (5, False), (6, True)])
def test_a_warning_says_what_the_targets_answers_cost(caplog: pytest.LogCaptureFixture, silent: int, warned: bool) -> None:
    warn_of_answers({"unfinished": silent, "wrong_type": 9}, rows=10, data=policies(max_bad_frac=0.5))
    assert (f"6 of 10 conversations are left out for their answers (unfinished {silent})" in caplog.text) == warned
    assert ("max_new_tokens" in caplog.text) == warned
