"""Policies for rows that cannot be used, and the bucket that a length belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.buckets import bucket_of
from dflash.data.quarantine import BadRowError, Quarantine
from dflash.errors import DataError
from dflash.records import QuarantinedRow

BAD = QuarantinedRow("a.jsonl:3", "wrong_type: prompt is list, not a text")
LONG = QuarantinedRow("a.jsonl:4", "over_long: sample 'x' has 900 tokens, the limit is 80")
UNFINISHED = QuarantinedRow("a.jsonl:5", "unfinished: answer 0 has no stop token within 24 tokens")


def quarantine(*, bad_rows: str = "quarantine", over_long: str = "quarantine", max_bad_frac: float = 0.5) -> Quarantine:
    return Quarantine(bad_rows=bad_rows, over_long=over_long, max_bad_frac=max_bad_frac)


def test_each_reason_follows_its_own_policy() -> None:
    strict = quarantine(bad_rows="error")
    strict.add(LONG)
    strict.add(UNFINISHED)
    with pytest.raises(BadRowError, match=r"a\.jsonl:3: wrong_type: prompt is list") as caught:
        strict.add(BAD)
    assert "data.bad_rows: quarantine" in caught.value.remedy
    short = quarantine(over_long="error")
    short.add(BAD)
    with pytest.raises(BadRowError, match="900 tokens") as caught:
        short.add(LONG)
    assert "data.max_length_tokens" in caught.value.remedy


def test_rows_are_counted_by_reason_and_listed_as_json(tmp_path: Path) -> None:
    held = quarantine()
    for row in (LONG, BAD, LONG, UNFINISHED):
        held.add(row)
    assert held.counts == {"over_long": 2, "unfinished": 1, "wrong_type": 1}
    held.write(tmp_path / "q.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert lines[1] == {"origin": BAD.origin, "reason": BAD.reason}
    assert len(lines) == 4


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    faulty=st.integers(0, 6), silent=st.integers(0, 6), good=st.integers(0, 10), frac=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
)
def test_faulty_rows_are_judged_over_all_rows_and_the_targets_doing_is_not(
    tmp_path_factory: pytest.TempPathFactory, faulty: int, silent: int, good: int, frac: float
) -> None:
    held = quarantine(max_bad_frac=frac)
    for row in [BAD] * faulty + [UNFINISHED] * silent:
        held.add(row)
    total = faulty + silent + good
    listed = tmp_path_factory.mktemp("q") / "q.jsonl"
    if good > 0 and faulty <= frac * total:
        held.check(total_rows=total, listed_in=listed)
        assert not listed.exists()
        return
    with pytest.raises(DataError) as caught:
        held.check(total_rows=total, listed_in=listed)
    if faulty + silent:
        assert f"{faulty + silent} of {total} rows" in caught.value.what
        blames_the_target = faulty <= frac * total and silent >= faulty
        assert ("max_new_tokens" in caught.value.remedy) == blames_the_target, "the remedy is for what broke the limit"
        assert len(listed.read_text().splitlines()) == faulty + silent


@pytest.mark.parametrize(("silent", "warned"), [(0, False), (5, False), (6, True)])
def test_a_warning_says_what_the_targets_answers_cost(caplog: pytest.LogCaptureFixture, silent: int, warned: bool) -> None:
    held = quarantine(max_bad_frac=0.5)
    for row in [UNFINISHED] * silent + [BAD] * 9:
        held.add(row)
    held.warn(total_rows=10)
    assert (f"6 of 10 conversations are left out for their answers (unfinished {silent})" in caplog.text) == warned
    assert ("max_new_tokens" in caplog.text) == warned


EDGES = (4, 9, 20)


@pytest.mark.parametrize("length", range(1, 21))
def test_a_length_belongs_to_the_first_bucket_that_holds_it(length: int) -> None:
    assert bucket_of(length, EDGES) == min(k for k, edge in enumerate(EDGES) if length <= edge)


@pytest.mark.parametrize("length", [-1, 0, 21])
def test_a_length_outside_all_buckets_is_an_error(length: int) -> None:
    with pytest.raises(DataError, match=rf"{length} tokens fits no bucket"):
        bucket_of(length, EDGES)
