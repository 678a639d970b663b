"""The scoring bench itself: its runs hold what their labels say, and its scores count what they claim to count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.health.baselines import RuleScore, add, fired
from benchmarks.health.faults import TRAINING, WINDOWED
from benchmarks.health.faults_operations import OPERATIONS, queue_sinks, torn_lines, two_writers
from benchmarks.health.grid import SPLITS, STEPS, bench_config, build, cells
from benchmarks.health.labels import Label
from benchmarks.health.mixes import DEVELOPMENT, HELD_OUT
from benchmarks.health.runs import healthy_run, items_of
from benchmarks.health.score import Score, score_run
from benchmarks.health.watch import Said, Watched, clean_checkpoints, watch
from benchmarks.health.windowed import EVERY, points_of, score_windowed, watch_windowed
from dflash.health.lines import EventLine, LogReplaced, StepLine, TornLine
from dflash.records import Finding, RollbackPlan
from tests.support.health_runs import healthy, judged

CONFIG = bench_config()
SAVES = [0, 200, 400, 600, 800, 1000]
REPORT = judged(healthy(seed=1, steps=300))
LABEL = Label(
    kind="level shift", onset=900, end=1599, due=900, severity="critical", detectors=frozenset({"sustained rise"}),
    tolerated=frozenset({"loss spike"}), causes=frozenset({"instability"}), rolls_back=True, culprits=(900, 901),
)  # fmt: skip


def finding(step: int, detector: str = "sustained rise", severity: Any = "critical", **values: Any) -> Finding:
    return Finding(detector, severity, "training", "", step, step + 5, step, None, {"alarm_step": step + 50, **values}, ())


def plan(target: int, *, alarm: int = 950, skip: tuple[tuple[int, int], ...] = ((899, 951),)) -> RollbackPlan:
    return RollbackPlan("key", "rollback", 1, 0, 900, alarm, 900, target, skip, None, "")


def scored(*findings: Finding, decision: RollbackPlan | None = None, label: Label | None = LABEL) -> Score:
    watched = Watched(tuple(Said(f, f.first_step + 8) for f in findings), decision, 950, REPORT)
    return score_run(label, watched, saves=SAVES, soak_steps=200, interleaved=True)


def test_a_found_and_rightly_treated_fault_scores_in_full() -> None:
    score = scored(finding(903, cause="instability"), finding(905, "loss spike", "warn"), decision=plan(600))
    assert score.is_right()
    assert (score.recalled, score.delays, score.skipped_culprits, score.right_causes) == (1, [53], 2, 1)


def test_each_kind_of_mistake_is_counted_where_it_belongs() -> None:
    assert scored(finding(903, cause="transient"), decision=plan(600)).right_causes == 0
    assert scored(finding(903), decision=plan(800)).right_targets == 0
    assert scored(finding(903), decision=plan(600, skip=((901, 951),))).skipped_culprits == 1
    assert scored(finding(903), decision=plan(600, alarm=850)).right_decisions == 0
    assert scored(finding(903)).right_decisions == 0
    assert scored(finding(903, severity="warn"), decision=plan(600)).recalled == 0
    false = scored(finding(300), finding(320), finding(500), decision=plan(600), label=None)
    assert (false.false_events, false.false_criticals, false.right_decisions) == (2, 2, 0)


def test_a_checkpoint_is_clean_only_beside_every_critical_span() -> None:
    damaged = replace(REPORT, findings=(finding(903),), last_step=1100)
    assert clean_checkpoints(damaged, SAVES, CONFIG) == [0, 200, 400, 600]
    assert clean_checkpoints(replace(REPORT, last_step=700), SAVES, CONFIG) == [0, 200, 400]


@pytest.mark.parametrize("mix", [*DEVELOPMENT, *HELD_OUT], ids=lambda mix: mix.name)
def test_a_healthy_run_is_a_whole_log_of_its_mix(mix: Any) -> None:
    run = healthy_run(mix, seed=1, steps=400, interleaved=True, train=CONFIG.train)
    items = list(items_of(run, seed=1))
    steps = [item for item in items if isinstance(item, StepLine)]
    assert [step.step for step in steps] == list(range(400))
    assert {len(step.micro_batches) for step in steps} == {mix.micro_batches}
    rows = [row for step in steps for batch in step.micro_batches for row in batch.rows]
    assert len(rows) == len(set(rows))
    order = [batch.bucket for step in steps for batch in step.micro_batches]
    if len(mix.buckets) > 1:
        assert all(len(set(order[i : i + 4])) > 1 for i in range(len(order) - 3))
    assert next(item.event for item in items if isinstance(item, EventLine)) == "start"


@pytest.mark.parametrize("fault", [*TRAINING, *OPERATIONS], ids=lambda fault: fault.__name__)
def test_a_fault_changes_the_run_where_its_label_says(fault: Any) -> None:
    cell = next(cell for cell in cells("development", strengths=1, seeds=1) if cell.fault is fault)
    run, label, seed = build(cell, CONFIG)
    assert label is not None
    assert 0 <= label.onset <= label.due <= STEPS + 60
    assert label.onset <= label.end < STEPS + 120
    assert not label.rolls_back or label.severity == "critical"
    again = build(cell, CONFIG)[0]
    assert np.array_equal(run.columns.loss, again.columns.loss)
    assert sum(isinstance(item, StepLine) for item in items_of(run, seed=seed)) == run.columns.present.sum()


def test_the_splits_share_neither_mixes_nor_seeds() -> None:
    assert not {mix.name for mix in SPLITS["development"]} & {mix.name for mix in SPLITS["held-out"]}
    seeds = [{build(cell, CONFIG)[2] for cell in list(cells(split, strengths=1, seeds=1))[:6]} for split in SPLITS]
    assert not seeds[0] & seeds[1]


def test_watching_tells_when_a_thing_was_first_said() -> None:
    cell = next(cell for cell in cells("development", strengths=1, seeds=1) if cell.fault and cell.fault.__name__ == "nan_forever")
    run, label, seed = build(cell, CONFIG)
    assert label is not None
    watched = watch(items_of(run, seed=seed), CONFIG, saves=SAVES, positions_per_step=cell.mix.micro_batches)
    assert watched.decision is not None
    assert label.onset <= watched.decided_step <= label.onset + 16
    (alarm,) = [each for each in watched.said if each.finding.severity == "critical"]
    assert alarm.finding.onset_step == label.onset
    assert label.onset <= alarm.seen_step <= label.onset + 16


def test_the_simple_rules_fire_as_they_are_written() -> None:
    run = healthy_run(DEVELOPMENT[0], seed=2, steps=600, interleaved=True, train=CONFIG.train)
    run.columns.loss[400] *= 12
    rows = fired(run)
    loss = run.columns.loss[:, 0]
    assert np.array_equal(np.flatnonzero(rows["loss > 3.0"]), [i for i in range(128, 600) if loss[i] > 3.0])
    before = loss[272:400]
    assert rows["mean + 6 sd of 128"][400] == (loss[400] > before.mean() + 6 * before.std())
    assert rows["3x mean of 10"][400] == (loss[400] > 3 * loss[390:400].mean())
    score = RuleScore()
    add(score, rows["loss > 3.0"], None)
    assert score.false_alarms > 0
    assert score.right_decisions == 0


def test_lines_that_are_no_records_stand_where_the_fault_puts_them() -> None:
    (one,) = [c for c in cells("development", strengths=1, seeds=1) if c.fault is torn_lines and not c.interleaved]
    run, label, seed = build(one, CONFIG)
    assert label is not None
    items = list(items_of(run, seed=seed))
    (torn,) = [i for i, item in enumerate(items) if isinstance(item, TornLine)]
    assert isinstance(items[torn + 1], LogReplaced)
    around = [item.step for item in (items[torn - 1], items[torn + 2]) if isinstance(item, StepLine)]
    assert around == [label.onset - 1, label.onset + 1]


def test_two_writers_take_turns_in_one_log() -> None:
    run = healthy_run(DEVELOPMENT[0], seed=3, steps=400, interleaved=True, train=CONFIG.train)
    label = two_writers(run, np.random.default_rng(0), 200, 1)
    steps = run.columns.step.tolist()
    assert steps[199:205] == [199, 200, 180, 201, 181, 202]
    assert sorted(set(steps)) == list(range(400))
    assert len(steps) == 440
    assert (label.due, label.severity) == (201, "critical")


@pytest.mark.parametrize("strength", range(3))
def test_the_sinking_queue_crosses_three_quarters_when_it_is_due(strength: int) -> None:
    run = healthy_run(DEVELOPMENT[0], seed=3, steps=STEPS, interleaved=True, train=CONFIG.train)
    label = queue_sinks(run, np.random.default_rng(0), 1000, strength)
    ready = run.columns.ready
    assert ready[label.due - 60] > 0.75 * 300 > ready[label.due + 60]
    assert ready[-1] == pytest.approx((200, 170, 120)[strength], abs=5)


def test_a_windowed_log_holds_means_and_names_what_is_not_finite() -> None:
    run = healthy_run(DEVELOPMENT[2], seed=3, steps=160, interleaved=True, train=CONFIG.train)
    run.columns.nonfinite[50] = True
    points = list(points_of(run))
    assert [step for step, _ in points] == list(range(EVERY - 1, 160, EVERY))
    c = run.columns
    weights = c.n_tokens[8:16] / c.n_tokens[8:16].sum()
    assert points[1][1].loss == pytest.approx(float((c.loss[8:16] * weights).sum()))
    assert [point.nonfinite != () for _, point in points] == [step == 55 for step, _ in points]


def test_damage_in_a_windowed_log_is_found_and_told_in_steps() -> None:
    cell = next(
        c for c in cells("development", strengths=1, seeds=1) if c.windowed and c.fault and c.fault.__name__ == "nan_forever"
    )
    run, label, _ = build(cell, CONFIG)
    assert label is not None
    score = score_windowed(label, watched := watch_windowed(run, CONFIG))
    assert (score.recalled, score.right_decisions, score.targets, score.steps) == (1, 1, 0, 2 * STEPS)
    (alarm,) = [each.finding for each in watched.said if each.finding.severity == "critical"]
    assert label.onset <= alarm.onset_step <= label.onset + EVERY
    assert score_windowed(None, watched).right_decisions == 0


def test_the_windowed_cells_come_last_and_leave_the_others_as_they_were() -> None:
    flags = [cell.windowed for cell in cells("held-out", strengths=3, seeds=5)]
    assert flags == sorted(flags)
    assert sum(flags) == (len(WINDOWED) + 1) * 15
