"""Decision, evidence about checkpoints and verdict, as pure functions of findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash.health import critical_training_spans, damage_of
from dflash.health.decision import decided
from dflash.health.verdict import Evidence, judge
from dflash.records import Finding, LrOverlay
from tests.support.health_runs import healthy, judged, remedy
from tests.support.log_simulator import nonfinite, spike


def finding(**changes: Any) -> Finding:
    base = Finding(
        detector="loss spike", severity="critical", domain="training", message="loss has not come back", first_step=100,
        last_step=180, onset_step=100, bucket=None, values={"alarm_step": 150, "segment": 0}, batch_ids=(99, 100, 101),
    )  # fmt: skip
    return replace(base, **changes)


def evidence(*findings: Finding, **changes: Any) -> Evidence:
    base = Evidence(
        findings=findings, steps=1000, last_step=999, coverage_frac=1.0, loss_points=800, learning=0, recent_steps=200,
        min_coverage_frac=0.99, ended=False,
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.parametrize("harmless", [{"severity": "warn"}, {"domain": "operations"}, {"domain": "diagnosis"}])
def test_only_critical_training_findings_are_damage(harmless: dict[str, Any]) -> None:
    assert damage_of([finding(**harmless)], segment=0, last_step=200) is None
    assert damage_of([], segment=0, last_step=200) is None


def test_damage_rests_on_the_first_alarm_and_stays() -> None:
    first = damage_of([finding()], segment=3, last_step=200)
    assert first is not None
    assert (first.segment, first.onset_step, first.alarm_step, first.last_step) == (3, 100, 150, 200)
    assert (first.first_position, first.end_position) == (99, 102)
    grown = finding(last_step=900)
    later = finding(detector="non-finite", onset_step=90, values={"alarm_step": 160, "segment": 0})
    assert damage_of([later, grown], segment=3, last_step=200) == first


def test_two_alarms_at_one_step_are_one_damage() -> None:
    pair = [finding(), finding(detector="non-finite", message="NaN", onset_step=95, batch_ids=(94, 95))]
    damage = damage_of(pair, segment=0, last_step=200)
    assert damage is not None
    assert (damage.onset_step, damage.first_position, damage.end_position) == (95, 94, 102)
    assert damage.reason == "NaN; loss has not come back"


def test_the_decision_in_words() -> None:
    damage = damage_of([finding()], segment=0, last_step=200)
    assert damage is not None
    back = remedy(damage, clean_steps=[0, 50])
    assert back is not None
    assert decided(back, last_step=None) == "roll back to checkpoint step-50, skip 3 batches of the plan (rung 1 of the ladder)."
    assert decided(back, last_step=199).endswith("(rung 1 of the ladder); what was trained since is lost, 150 steps up to now.")
    halt = remedy(damage, clean_steps=[])
    assert halt is not None
    assert decided(halt, last_step=199).startswith(
        "halt the run; there is no clean checkpoint to go back to. loss has not come back; halted"
    )
    warmed = decided(replace(back, overlay=LrOverlay(50, 0.1, 200, 0.5)), last_step=None)
    assert warmed.endswith("; the learning rate is warmed up again over 200 steps to 0.5 of the schedule.")


def test_spans_for_checkpoints_reach_from_the_onset_to_the_last_evidence() -> None:
    records = nonfinite(spike(healthy(seed=1, steps=2000), step=1300, factor=3, forever=True), steps=range(400, 420), skipped=True)
    report = judged(records)
    spans = critical_training_spans(report)
    assert spans[0] == (400, 419)
    assert 1290 <= spans[1][0] <= 1300
    assert spans[1][1] >= 1990
    assert all(first >= 1290 and last >= 1990 for first, last in spans[1:])  # one damage, seen by several detectors
    assert critical_training_spans(judged(healthy(seed=1, steps=2000))) == []


def test_damage_comes_before_everything_else() -> None:
    stale = finding(detector="stale log", domain="operations")
    verdict, headline = judge(evidence(finding(), stale, steps=10, coverage_frac=0.1))
    assert verdict == "unhealthy"
    assert "loss has not come back" in headline


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "no step yet"),
        ({"coverage_frac": 0.985}, "98.5 %"),
        ({"loss_points": 0, "ended": True}, "too few"),
        ({"findings": (finding(detector="stale log", domain="operations", message="no sign"),)}, "no sign"),
    ],
)
def test_saying_too_little_is_blind(changes: dict[str, Any], says: str) -> None:
    verdict, headline = judge(evidence(**changes))
    assert verdict == "blind"
    assert says in headline


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"last_step": 990}, "watch"),
        ({"last_step": 800}, "watch"),
        ({"last_step": 799}, "healthy"),
        ({"last_step": 990, "values": {"resolved_step": 995}}, "healthy"),
        ({"last_step": 990, "severity": "info"}, "healthy"),
    ],
)
def test_a_warning_presses_while_it_is_recent_and_unsettled(changes: dict[str, Any], verdict: str) -> None:
    warning = finding(**({"severity": "warn"} | changes))
    assert judge(evidence(warning))[0] == verdict


def test_the_headline_of_a_healthy_run_says_how_much_was_seen() -> None:
    assert judge(evidence())[1] == "1,000 steps checked, nothing to act on."
    settled = finding(severity="warn", values={"resolved_step": 1})
    assert "1 earlier warning settled or past" in judge(evidence(settled))[1]
    assert "2 buckets still learning" in judge(evidence(learning=2))[1]
    assert "not judged yet" in judge(evidence(loss_points=0))[1]
