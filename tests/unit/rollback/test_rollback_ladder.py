"""The ladder, its budgets, what is skipped and what happens to the learning rate: as values in, values out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config.rollback import RollbackConfig
from dflash.records import LedgerEntry, LrOverlay
from dflash.records.rollback import Damage, LedgerLine, RollbackEntry, RollbackPlan, SavedState
from dflash.rollback import Situation, decide, lr_factor, merged, open_regions, overlay_in_force, skips_in_force
from dflash.rollback.ladder import clean_steps, decision_key
from dflash.rollback.skips import culprits, size_of

RULE = RollbackConfig()
DAMAGE = Damage(
    segment=0, onset_step=2500, alarm_step=2510, first_position=2499, end_position=2511, last_step=2520, reason="loss exploded"
)
DAY_S = 86_400.0


def clean(step: int, segment: int = 0) -> LedgerEntry:
    return LedgerEntry(step, segment, "clean", "", "")


def saved(*steps: int, segment: int = 0) -> dict[int, SavedState]:
    return {step: SavedState(segment, step) for step in steps}


def situation(*ledger: LedgerLine, steps: tuple[int, ...] = (0, 1000, 2000), now_s: float = 0.0, alive: bool = True) -> Situation:
    lines = (*(clean(step) for step in steps), *ledger)
    return Situation("run", lines, saved(*steps), batches_per_epoch=100_000, alive=alive, now_s=now_s)


def rolled_back(segment: int, *, onset: int, target: int, region: int | None = None, at_s: float = 0.0) -> list[LedgerLine]:
    plan = RollbackPlan(
        key=f"k{segment}", action="rollback", rung=1, segment=segment, onset_step=onset, alarm_step=onset + 5,
        region_step=onset if region is None else region, target_step=target, skip=((onset, onset + 5),), overlay=None, reason="r",
    )  # fmt: skip
    return [
        RollbackEntry("begin", plan, target, None, at_s),
        RollbackEntry("end", plan, target, segment + 1, at_s),
    ]


def test_the_first_rollback_takes_the_newest_clean_one_and_skips_what_was_consumed() -> None:
    plan = decide(DAMAGE, situation(), rule=RULE)
    assert plan is not None
    assert (plan.action, plan.rung, plan.target_step, plan.region_step) == ("rollback", 1, 2000, 2500)
    assert (plan.skip, plan.overlay) == (((2499, 2511),), None)


def test_the_second_goes_before_the_last_target_skips_more_and_warms_up_again() -> None:
    plan = decide(replace(DAMAGE, segment=1), situation(*rolled_back(0, onset=2400, target=2000)), rule=RULE)
    assert plan is not None
    assert (plan.rung, plan.target_step, plan.region_step) == (2, 1000, 2400)
    assert plan.skip == ((2311, 2511),)
    assert plan.overlay == LrOverlay(from_step=1000, rewarm_from=0.1, rewarm_steps=200, cap=1.0)


def test_the_third_keeps_the_target_and_caps_the_rate() -> None:
    ledger = [*rolled_back(0, onset=2400, target=2000), *rolled_back(1, onset=2450, target=1000, region=2400)]
    plan = decide(replace(DAMAGE, segment=2), situation(*ledger), rule=RULE)
    assert plan is not None
    assert (plan.rung, plan.target_step) == (3, 1000)
    assert plan.skip == ((2011, 2511),)
    assert plan.overlay is not None
    assert plan.overlay.cap == RULE.lr_cap


def test_the_fourth_is_a_halt_that_says_why() -> None:
    ledger = [line for n in range(3) for line in rolled_back(n, onset=2400, target=1000, region=2400)]
    plan = decide(replace(DAMAGE, segment=3), situation(*ledger), rule=RULE)
    assert plan is not None
    assert (plan.action, plan.rung, plan.skip) == ("halt", 4, ())
    assert plan.reason == "loss exploded; halted because 3 rollbacks around step 2400 did not help"


def test_progress_past_the_region_forgives_and_nothing_else_does() -> None:
    spent = rolled_back(0, onset=2400, target=2000)
    assert len(open_regions([*spent, clean(3400, 1)], region_steps=1000)) == 1
    assert open_regions([*spent, clean(3401, 1)], region_steps=1000) == ()
    for state in ("writing", "durable", "probation", "suspect", "bad"):
        assert len(open_regions([*spent, replace(clean(3401, 1), state=state)], region_steps=1000)) == 1, "only clean is progress"
    # A checkpoint that was clean before the rollback is no progress.
    assert len(open_regions([clean(3401), *spent], region_steps=1000)) == 1


def test_a_rollback_that_found_its_target_damaged_counts_where_it_really_went() -> None:
    begin, end = rolled_back(0, onset=2400, target=2000)
    assert isinstance(end, RollbackEntry)
    (region,) = open_regions([begin, replace(end, target_step=1000)], region_steps=1000)
    assert region.last_target == 1000


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_per_day": 1}, "the budget of 1 rollbacks a day is spent"),
        ({"max_per_run": 1}, "the budget of 1 rollbacks a run is spent"),
        ({"enabled": False}, "rollbacks are switched off (rollback.enabled)"),
        ({"max_skip_frac": 0.0}, "batches of epoch 0 would be skipped, 0 are allowed"),
    ],
)
def test_every_budget_halts(change: dict[str, object], why: str) -> None:
    rule = RollbackConfig.model_validate(change)
    plan = decide(replace(DAMAGE, segment=1), situation(*rolled_back(0, onset=50, target=0)), rule=rule)
    assert plan is not None
    assert plan.action == "halt"
    assert why in plan.reason


def test_yesterdays_rollbacks_leave_the_budget_of_a_day_alone() -> None:
    old = rolled_back(0, onset=50, target=0, at_s=0.0)
    rule = RollbackConfig(max_per_day=1)
    assert decide(replace(DAMAGE, segment=1), situation(*old, now_s=DAY_S + 1), rule=rule).action == "rollback"  # type: ignore[union-attr]
    assert decide(replace(DAMAGE, segment=1), situation(*old, now_s=DAY_S - 1), rule=rule).action == "halt"  # type: ignore[union-attr]


def test_other_regions_wait_for_the_cool_down_unless_nobody_trains() -> None:
    before = rolled_back(0, onset=50, target=2400)
    soon = replace(DAMAGE, segment=1, last_step=2600)
    assert decide(soon, situation(*before), rule=RULE) is None
    assert decide(soon, situation(*before, alive=False), rule=RULE) is not None
    assert decide(replace(soon, last_step=2700), situation(*before), rule=RULE) is not None


def test_one_segment_is_abandoned_once_and_has_one_key() -> None:
    assert decide(DAMAGE, situation(*rolled_back(0, onset=2400, target=2000)), rule=RULE) is None
    first, grown = decide(DAMAGE, situation(), rule=RULE), decide(replace(DAMAGE, onset_step=2300), situation(), rule=RULE)
    assert first is not None
    assert grown is not None
    assert first.key == grown.key == decision_key("run", 0)
    assert len({decision_key("run", 0), decision_key("run", 1), decision_key("other", 0)}) == 3


def test_without_a_clean_checkpoint_before_the_onset_the_run_halts() -> None:
    plan = decide(replace(DAMAGE, onset_step=900), situation(steps=(1000,)), rule=RULE)
    assert plan is not None
    assert (plan.action, plan.target_step) == ("halt", None)
    assert "no clean checkpoint at or before step 900" in plan.reason


def test_a_line_about_an_abandoned_checkpoint_says_nothing_of_its_successor() -> None:
    assert clean_steps([clean(0), clean(10, segment=0)], {0: SavedState(0, 0), 10: SavedState(1, 10)}) == [0]


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(RANGES)
@settings(deadline=None, derandomize=True)
def test_merged_ranges_are_the_same_positions_apart_from_each_other(ranges: list[tuple[int, int]]) -> None:
    result = merged(ranges)
    wanted = {position for first, end in ranges for position in range(first, end)}
    assert {position for first, end in result for position in range(first, end)} == wanted
    assert size_of(result) == len(wanted)
    assert all(before[1] < after[0] for before, after in pairwise(result))


def test_a_wider_skip_grows_backwards_but_never_into_the_state_returned_to() -> None:
    assert culprits(100, 110, at_least=0, not_before=0) == ((100, 110),)
    assert culprits(100, 110, at_least=50, not_before=0) == ((60, 110),)
    assert culprits(100, 110, at_least=50, not_before=90) == ((90, 110),)


def test_skips_and_overlay_come_from_finished_rollbacks_alone() -> None:
    begin, end = rolled_back(0, onset=100, target=0)
    assert isinstance(end, RollbackEntry)
    assert skips_in_force([begin]) == ()
    assert skips_in_force([begin, end]) == ((100, 105),)
    overlay = LrOverlay(from_step=10, rewarm_from=0.1, rewarm_steps=20, cap=0.5)
    capped = replace(end, plan=replace(end.plan, overlay=overlay))
    again = rolled_back(1, onset=900, target=800)
    # The ramp begins where training really went on: at the target, here step 0.
    assert overlay_in_force([begin, capped, *again]) == replace(overlay, from_step=0)


def test_the_learning_rate_ramps_up_to_its_cap() -> None:
    overlay = LrOverlay(from_step=10, rewarm_from=0.1, rewarm_steps=20, cap=0.5)
    assert lr_factor(None, step=3) == lr_factor(overlay, step=9) == 1.0
    assert lr_factor(overlay, step=10) == pytest.approx(0.1)
    assert lr_factor(overlay, step=15) == pytest.approx(0.325)
    assert lr_factor(overlay, step=20) == lr_factor(overlay, step=500) == 0.5
    assert lr_factor(replace(overlay, cap=1.0), step=30) == 1.0
