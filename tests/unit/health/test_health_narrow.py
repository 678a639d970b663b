"""Narrowing, explaining and renumbering: what is shown of a report, never what was judged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import DataError
from dflash.health import explain, narrowed
from dflash.health.step_numbers import StepNumbers
from dflash.records import Finding
from tests.support.health_runs import healthy, judged
from tests.support.log_simulator import nonfinite, spike

SICK = judged(nonfinite(spike(healthy(seed=6, steps=700), step=330, factor=9), steps=[500], skipped=False))


def finding(message: str, *, record: int = 0, **values: object) -> Finding:
    return Finding(
        detector="loss spike", severity="warn", domain="training", message=message, first_step=record, last_step=record,
        onset_step=record, bucket=0, values=values, batch_ids=(record,),
    )  # fmt: skip


def test_what_lies_before_no_longer_counts_and_what_reaches_into_it_does() -> None:
    assert SICK.verdict == "unhealthy"
    last = max(f.last_step for f in SICK.findings if f.severity == "critical")
    still = narrowed(SICK, since_step=last, min_coverage_frac=0.99)
    assert (still.verdict, still.damage) == ("unhealthy", SICK.damage)
    after = narrowed(SICK, since_step=last + 1, min_coverage_frac=0.99)
    assert after.verdict != "unhealthy"
    assert (after.damage, after.decision) == (None, None)
    assert all(f.last_step > last for f in after.findings)
    assert narrowed(SICK, since_step=0, min_coverage_frac=0.99).findings == SICK.findings


def test_every_finding_can_be_explained_by_its_number() -> None:
    for number, wanted in enumerate(SICK.findings, start=1):
        found, text = explain(SICK, str(number))
        assert found == [wanted]
        assert "What to do:" in text
        assert max(map(len, text.splitlines())) <= 80
    for nothing in ("0", str(len(SICK.findings) + 1), "no such detector"):
        with pytest.raises(DataError, match="has no finding"):
            explain(SICK, nothing)


def test_a_detectors_name_finds_all_of_its_findings() -> None:
    found, text = explain(SICK, "Non-Finite")
    assert [f.detector for f in found] == ["non-finite"] * len(found)
    assert len(found) >= 1
    assert "Batches" in text or "Concerned" in text


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(-5, 10**9))
def test_the_step_of_every_record_is_exact_whatever_the_distances(gaps: list[int], start: int) -> None:
    steps, numbers = [], StepNumbers()
    for gap in gaps:
        start += gap
        steps.append(start)
        numbers.append(start)
    assert [numbers.of(record) for record in range(len(steps))] == steps
    if steps:
        assert numbers.of(len(steps) + 7) == steps[-1]


def test_equal_distances_cost_nothing() -> None:
    numbers = StepNumbers()
    for step in range(20, 200_000, 20):
        numbers.append(step)
    assert numbers.of(5000) == 100_020
    assert len(numbers._steps) == 1


def test_sentences_and_values_are_translated_and_counts_are_left_alone() -> None:
    numbers = StepNumbers()
    for step in range(0, 1000, 10):
        numbers.append(step)
    shown = numbers.in_steps(
        finding("loss 3 at step 7 of bucket 0, not back in 50 steps, steps 8 to 9", record=7, alarm_step=9, z=7.0, steps=3)
    )
    assert shown.message == "loss 3 at step 70, not back in 50 steps, steps 80 to 90"
    assert (shown.first_step, shown.onset_step, shown.batch_ids, shown.bucket) == (70, 70, (), None)
    assert shown.values == {"alarm_step": 90, "z": 7.0, "steps": 3}
