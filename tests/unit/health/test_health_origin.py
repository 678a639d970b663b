"""The founding incident, simulated: a curve that seems to reset 127 times, from three different causes and from all at once.

2805 records, six buckets with the top one at 52 %, two saves with unlogged steps behind them, a queue that sinks from 300
to 220, no NaN. Each cause is rightly named, and the counts are those of the simple rules that people looked at.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from benchmarks.health.mixes import BucketKind, Mix
from benchmarks.health.runs import Run, healthy_run, items_of, rebucket
from dflash.config import Config, parse_config
from dflash.health import HealthChecker
from dflash.health.lines import StepLine
from dflash.records import Finding, HealthReport
from tests.support.health_runs import found

STEPS, SAVES, GAPS = 2805, (1200, 2400), (27, 18)
CONFIG = "target: {mask_token_id: 1}\ndata: {num_conversations: 10}\ntrain: {lr: 6.0e-4, warmup_frac: 0.04}\n"
SIX = (
    BucketKind(3.7, 0.038, 180, 2.2),
    BucketKind(1.1, 0.09, 420, 1.1),
    BucketKind(0.8, 0.10, 560, 0.9),
    BucketKind(0.65, 0.11, 640, 0.8),
    BucketKind(0.58, 0.135, 700, 0.7),
    BucketKind(0.50, 0.52, 720, 0.65),
)


def law(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.standard_t(5, size)


MIX = Mix("origin", SIX, law)


@functools.cache
def config() -> Config:
    return parse_config(CONFIG, origin="test")


def calm_run(*, with_short_bucket: bool) -> Run:
    run = healthy_run(MIX, seed=11, steps=STEPS, interleaved=True, train=config().train)
    run.columns.loss[:150] = np.minimum(run.columns.loss[:150], 2.9)  # the incident's log begins after the first fall
    if not with_short_bucket:
        rebucket(run, run.columns.bucket == 0, 5, first=0)
    run.events = [each for each in run.events if each[1] in ("start", "finish")]
    for save in SAVES:
        run.events += [(save, "save_begin", {"step": save}), (save + 30, "save_durable", {"step": save})]
    return run


def add_explosions(run: Run, count: int) -> None:
    """Single batches that explode, far apart, each back at once."""
    for at in np.linspace(220, STEPS - 40, count).astype(int):
        run.columns.loss[at, 0] = 6.0
        run.columns.accuracy[at, 0] = 0.0
        run.columns.grad_norm[at] *= 40.0


def add_save_artefacts(run: Run) -> None:
    """Unlogged steps behind each save, slow ones during it, and a record of few samples at its end."""
    for save, gap in zip(SAVES, GAPS, strict=True):
        run.columns.present[save + 1 : save + gap] = False
        run.columns.step_time_s[save : save + 30] *= 4.0
        run.columns.n_tokens[save + gap] = 5
        run.columns.loss[save + gap] = 3.4
        run.columns.accuracy[save + gap] = 0.0


def sink_queue(run: Run) -> None:
    age = np.clip((np.arange(STEPS) - 900) / 1000, 0, 1)
    run.columns.ready = np.minimum(run.columns.ready, (300 - 80 * age).astype(np.int64))


def judged(run: Run) -> tuple[HealthReport, list[StepLine]]:
    items = list(items_of(run, seed=3))
    checker = HealthChecker(config().health, config().train, config().checkpoint)
    checker.feed(items)
    now_s = max(item.wall_time_s for item in items if isinstance(item, StepLine))
    return checker.report(run="origin", now_s=now_s, ended=False, remedy=lambda damage: None), [
        item for item in items if isinstance(item, StepLine)
    ]


def assert_counts_are_those_of_the_simple_rules(report: HealthReport, steps: list[StepLine]) -> tuple[int, int]:
    above = [s for s in steps if s.ce is not None and s.ce > 3.0]
    drops = [b for a, b in itertools.pairwise(steps) if a.accuracy - b.accuracy > 0.05]
    counts = report.stats["counts"]
    for name, records in (("loss_above", above), ("accuracy_drop", drops)):
        assert (counts[name]["records"], counts[name]["of"]) == (len(records), len(steps))
        assert sum(counts[name]["per_bucket"].values()) == len(records)
        if records:
            assert (counts[name]["first"]["step"], counts[name]["last"]["step"]) == (records[0].step, records[-1].step)
    return len(above), len(drops)


def causes(findings: list[Finding]) -> set[str]:
    return {str(f.values["cause"]) for f in findings}


def test_a_short_bucket_alone_can_make_all_of_it_and_is_named() -> None:
    report, steps = judged(calm_run(with_short_bucket=True))
    above, drops = assert_counts_are_those_of_the_simple_rules(report, steps)
    assert 110 <= above <= 145
    assert drops > 100
    assert report.stats["counts"]["loss_above"]["per_bucket"] == {"0": above}
    (mix,) = [f for f in found(report, "bucket mix") if f.bucket == 0]
    assert (mix.severity, mix.values["cause"]) == ("info", "bucket mix")
    assert mix.values["records"] >= 0.8 * above
    assert not [f for f in found(report, "loss spike") if f.severity != "info"]
    assert report.damage is None


def test_explosions_of_single_batches_alone_can_make_all_of_it_and_are_transients() -> None:
    run = calm_run(with_short_bucket=False)
    add_explosions(run, 127)
    report, steps = judged(run)
    above, _ = assert_counts_are_those_of_the_simple_rules(report, steps)
    assert above == 127
    assert report.stats["counts"]["loss_above"]["percent"] == pytest.approx(100 * 127 / 2805, abs=0.01)
    spikes = [f for f in found(report, "loss spike") if f.values["loss"] > 3.0]
    assert len(spikes) >= 90  # as many as one detector keeps
    assert causes(spikes) == {"transient"}
    assert all(f.values["grad_z"] > 4 for f in spikes)
    assert report.damage is None


def test_two_saves_make_their_own_few_and_prove_no_link() -> None:
    run = calm_run(with_short_bucket=False)
    add_save_artefacts(run)
    report, steps = judged(run)
    above, _ = assert_counts_are_those_of_the_simple_rules(report, steps)
    assert above == 2
    gaps = [f for f in found(report, "step integrity") if f.values.get("missing_steps")]
    assert [(f.first_step, f.last_step, f.values["in_save"]) for f in gaps] == [(1201, 1226, True), (2401, 2417, True)]
    assert found(report, "save stall")
    artefacts = found(report, "short window")
    assert {f.first_step for f in artefacts} == {1227, 2418}
    assert causes(artefacts) == {"window artefact"}
    assert {f.values["tests"]["save-linked"]["verdict"] for f in artefacts} <= {"save-linked unproven", "not near a save"}
    assert not found(report, "save correlation")
    assert report.damage is None


def test_all_at_once_each_keeps_its_name() -> None:
    run = calm_run(with_short_bucket=True)
    add_explosions(run, 20)
    add_save_artefacts(run)
    sink_queue(run)
    run.columns.lr[0] = 6e-4
    report, steps = judged(run)
    assert_counts_are_those_of_the_simple_rules(report, steps)
    assert causes(found(report, "bucket mix")) == {"bucket mix"}
    assert {f.first_step for f in found(report, "short window")} >= {1227, 2418}
    exploded = [f for f in found(report, "loss spike") if f.values["loss"] == pytest.approx(6.0)]
    assert len(exploded) >= 18
    assert causes(exploded) == {"transient"}
    (decline,) = [f for f in found(report, "queue decline") if f.values["queue"] == "ready"]
    assert (decline.values["settled"], decline.values["level"]) == (pytest.approx(299, abs=3), pytest.approx(220, abs=6))
    (rate,) = found(report, "lr mismatch")
    assert (rate.first_step, rate.values["lr"]) == (0, 6e-4)
    assert rate.values["scheduled_lr"] == pytest.approx(6e-4 / round(0.04 * STEPS))
    assert not found(report, "non-finite")
    assert report.damage is None
