"""The verdict: every demand can fail, and a right drill passes all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash.config import CheckpointConfig
from dflash.drill.facts import COMPLETED, DrillFacts, Log, Outcome, Requested
from dflash.drill.faults import FAULTS, fault_named
from dflash.drill.reference import Reference
from dflash.drill.timeline import WIDTH
from dflash.drill.verdict import Check, is_right, judge, newest_truly_clean, steps_lost, verdict_lines
from dflash.errors import ConfigError
from dflash.records import ControlRequest, FaultPlan, PlantedFault, RollbackEntry, RollbackPlan

RULE = CheckpointConfig(interval_steps=50, window_steps=100, soak_steps=100)
CHECK_EVERY_S = 10.0
LAST = {0: (729, 30.2), 1: (1499, 80.0)}
"""Segment 0 takes 0.04 s a step and ends before the request."""
SAVED = frozenset(range(0, 1501, 50))
REFERENCE = Reference("k", "drill-reference-001", "aa", 3.0, (2.8, 3.2), tuple(2.0 - 0.001 * step for step in range(1500)))
LOSS = dict(enumerate(REFERENCE.losses))
HIGH = {step: 1.2 * (loss or 0) for step, loss in LOSS.items()}


def rollback_plan(**changes: Any) -> RollbackPlan:
    plan = RollbackPlan(
        key="segment-0", action="rollback", rung=1, segment=0, onset_step=700, alarm_step=702, region_step=700,
        target_step=600, skip=((699, 703),), overlay=None, reason="damage",
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)


def facts(name: str, **changes: Any) -> DrillFacts:
    """A drill of a fault that went as it should."""
    fault = fault_named(name)
    plan = FaultPlan(fault.name, 700, 700, 700 + fault.bad_batches, 0)
    rollback = rollback_plan()
    entries = (RollbackEntry("begin", rollback, 600, None, 12.0), RollbackEntry("end", rollback, 600, 1, 13.0))
    request = ControlRequest("segment-0", "rollback", "damage", "2026-01-01", "health-check", plan=rollback)
    good = DrillFacts(
        plan=plan,
        ended=COMPLETED,
        struck_step=720 if fault.blow else None,
        hit_checkpoint=750 if fault.blow == "corrupt-and-kill-trainer" else None,
        planted=() if name in ("none", "killed-worker", "corrupt-checkpoint") else (PlantedFault(fault.name, 0, 700, None, 10.0),),
        requests=(Requested(request, 31.0),) if fault.acts else (),
        rollbacks=entries if fault.acts else (),
        bad_checkpoints=frozenset({750}) if fault.blow == "corrupt-and-kill-trainer" else frozenset(),
        found_by=frozenset(fault.seen_as[:1]),
        processes_left=0,
        log=Log(LOSS, {0: 1.0, 1: 40.0}, LAST, {1: 700}, SAVED),
        outcome=Outcome(1500, "aa" if fault.exact else "bb", 3.1, (2.9, 3.3)),
    )
    return dataclasses.replace(good, **changes)


def wrong(name: str, **changes: Any) -> list[str]:
    checks = judge(fault_named(name), facts(name, **changes), REFERENCE, rule=RULE, check_every_s=CHECK_EVERY_S)
    assert is_right(checks) == all(check.holds for check in checks)
    return [check.name for check in checks if not check.holds]


@pytest.mark.parametrize("name", FAULTS)
def test_a_drill_that_goes_as_it_should_is_right(name: str) -> None:
    assert wrong(name) == []


def ended(**changes: Any) -> tuple[RollbackEntry, ...]:
    plan = rollback_plan(**changes)
    return (RollbackEntry("begin", plan, plan.target_step, None, 12.0), RollbackEntry("end", plan, plan.target_step, 1, 13.0))


@pytest.mark.parametrize(
    ("name", "changes", "broken"),
    [
        ("nan", {"planted": ()}, ["fault took effect"]),
        ("nan", {"requests": (), "rollbacks": ()}, ["detected", "rolled back"]),
        ("nan", {"rollbacks": ended(target_step=550)}, ["back at the newest truly clean"]),
        ("nan", {"rollbacks": ended(target_step=750)}, ["back at the newest truly clean"]),
        ("nan", {"rollbacks": ended(skip=((701, 760),))}, ["bad batches left out"]),
        ("nan", {"rollbacks": (*ended(), *ended())}, ["one rollback, no halt"]),
        ("nan", {"ended": "Failed"}, ["flow run completed"]),
        ("nan", {"processes_left": 1}, ["flow run completed"]),
        ("nan", {"log": Log(LOSS, {0: 1.0}, LAST, {}, SAVED)}, ["trains again"]),
        ("nan", {"log": Log(HIGH, {0: 1.0, 1: 40.0}, LAST, {}, SAVED)}, ["recovered"]),
        ("nan", {"log": Log(LOSS, {0: 1.0, 1: 40.0}, {1: (1499, 80.0)}, {}, SAVED)}, ["steps lost"]),
        ("nan", {"log": Log(LOSS | {1400: None}, {0: 1.0, 1: 40.0}, LAST, {}, SAVED)}, ["recovered"]),
        ("nan", {"outcome": Outcome(1500, "bb", 2.5, (2.3, 2.7))}, ["final acceptance"]),
        ("nan", {"outcome": Outcome(1500, "bb", None, None)}, ["final acceptance"]),
        ("save-artefact", {"rollbacks": ended()}, ["no rollback, no halt"]),
        ("save-artefact", {"outcome": Outcome(1500, "cc", 3.0, (2.8, 3.2))}, ["same weights as without the fault"]),
        ("hung-save", {"found_by": frozenset({"throughput"})}, ["reported"]),
        ("corrupt-checkpoint", {"bad_checkpoints": frozenset()}, ["damaged checkpoint refused"]),
        ("corrupt-checkpoint", {"log": Log(LOSS, {0: 1.0, 1: 40.0}, LAST, {1: 750}, SAVED)}, ["resumed from one before"]),
        ("none", {"planted": (PlantedFault("nan", 0, 700, None, 10.0),)}, ["no fault"]),
    ],
)
def test_each_demand_can_fail(name: str, changes: dict[str, Any], broken: list[str]) -> None:
    assert wrong(name, **changes) == broken


def test_the_newest_truly_clean_checkpoint_is_the_last_one_that_soaked_before_the_fault() -> None:
    for onset in range(1, 1000):
        soaked = [step for step in range(0, 1001, 50) if step + 100 <= onset]
        assert newest_truly_clean(onset, durable=SAVED, soak_steps=RULE.soak_steps) == max(soaked, default=0)


def test_a_checkpoint_that_a_slow_disk_made_the_trainer_leave_out_is_not_asked_for() -> None:
    assert newest_truly_clean(700, durable=SAVED - {600}, soak_steps=RULE.soak_steps) == 550
    short = Log(LOSS, {0: 1.0, 1: 40.0}, LAST, {1: 700}, SAVED - {600})
    assert wrong("nan", rollbacks=ended(target_step=550), log=short) == []
    assert wrong("nan", rollbacks=ended(target_step=500), log=short) == ["back at the newest truly clean"]


def test_an_untouched_checkpoint_inside_its_soak_is_as_good() -> None:
    assert wrong("ramp", rollbacks=ended(target_step=700)) == []


def test_steps_lost_are_bounded_by_what_a_rollback_may_cost() -> None:
    good = facts("nan")
    assert steps_lost(good, good.rollbacks[1], onset=700, rule=RULE, check_every_s=CHECK_EVERY_S) == (130, 50 + 100 + 2 + 250)
    late = (Requested(good.requests[0].request, 99.5),)  # checks came every ten seconds, and none saw the fault for a minute
    log = dataclasses.replace(good.log, last_record={0: (1100, 100.0)}, first_step_at_s={0: 1.0, 1: 110.0})
    assert wrong("nan", log=log, requests=late) == ["steps lost"]
    stops_slowly = (Requested(good.requests[0].request, 40.0),)
    assert wrong("nan", log=log, requests=stops_slowly) == []


def test_a_verdict_fits_80_columns_and_names_what_is_wrong() -> None:
    checks = (Check("detected", True, "after 3 steps"), Check("recovered", False, "loss " + "very high " * 20))
    lines = verdict_lines(fault_named("nan"), checks)
    assert max(map(len, lines)) <= WIDTH
    assert "WRONG" in lines[1]
    assert sum("WRONG" in line for line in lines) == 2


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fault 'nap'"):
        fault_named("nap")
