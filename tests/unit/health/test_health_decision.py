"""Decision, evidence about checkpoints and verdict, as pure functions of findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash.health import critical_training_spans, decide
from dflash.health.verdict import Evidence, judge
from dflash.records import Finding
from tests.support.health_runs import healthy, judged
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
def test_only_critical_training_findings_decide_anything(harmless: dict[str, Any]) -> None:
    assert decide([finding(**harmless)], run="r", clean_steps=[0]) is None
    assert decide([], run="r", clean_steps=[0]) is None


@pytest.mark.parametrize(("clean", "target"), [([0, 50, 100, 150], 100), ([0, 50], 50), ([101, 200], None), ([], None)])
def test_the_target_is_the_newest_clean_checkpoint_not_after_the_onset(clean: list[int], target: int | None) -> None:
    decision = decide([finding()], run="r", clean_steps=clean)
    assert decision is not None
    assert decision.target_step == target
    assert (decision.action, decision.onset_step, decision.alarm_step) == ("halt", 100, 150)
    assert decision.skip_positions == (99, 100, 101)


def test_the_decision_rests_on_the_first_alarm_and_its_key_stays() -> None:
    first = decide([finding()], run="r", clean_steps=[0])
    grown = finding(last_step=900, message="loss of buckets 1, 2 has not come back")
    later = finding(detector="non-finite", onset_step=90, values={"alarm_step": 160, "segment": 0})
    again = decide([later, grown], run="r", clean_steps=[0])
    assert first is not None
    assert again is not None
    assert again.key == first.key
    assert again.onset_step == 100


@pytest.mark.parametrize(
    "other",
    [
        {"run": "s"},
        {"values": {"alarm_step": 150, "segment": 1}},
        {"onset_step": 99},
        {"values": {"alarm_step": 151, "segment": 0}},
    ],
)
def test_other_evidence_gives_another_key(other: dict[str, Any]) -> None:
    run = other.pop("run", "r")
    first, second = decide([finding()], run="r", clean_steps=[]), decide([finding(**other)], run=run, clean_steps=[])
    assert first is not None
    assert second is not None
    assert first.key != second.key


def test_two_alarms_at_one_step_are_one_decision() -> None:
    pair = [finding(), finding(detector="non-finite", onset_step=95, batch_ids=(94, 95))]
    decision = decide(pair, run="r", clean_steps=[0])
    assert decision is not None
    assert decision.onset_step == 95
    assert decision.skip_positions == (94, 95, 99, 100, 101)


def test_spans_for_checkpoints_reach_from_the_onset_to_the_last_evidence() -> None:
    records = nonfinite(spike(healthy(seed=1, steps=2000), step=1300, factor=3, forever=True), steps=range(400, 420), skipped=True)
    report = judged(records)
    spans = critical_training_spans(report)
    assert spans[0] == (400, 419)
    assert 1290 <= spans[1][0] <= 1300
    assert spans[1][1] >= 1990
    assert len(spans) == 2
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
