"""Healthy runs are called healthy, however odd they look to a pooled rule."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from dflash.records import StepRecord
from tests.support.health_runs import found, healthy, judged, steps_of, summary_of
from tests.support.log_simulator import Record, change_steps, scaled, simulate_run

NAMES = [
    "non-finite", "gradient spike", "loss spike", "sustained rise", "divergence", "bad resume", "repeated data",
    "accuracy drop", "gradient explosion", "lr mismatch", "bucket run", "share drift", "bucket mix", "short window",
    "save correlation", "save failure", "save stall", "queue decline", "target imbalance", "throughput", "dead metric",
    "simple rules", "step integrity", "stale log",
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_healthy_run_is_healthy(seed: int) -> None:
    report = judged(healthy(seed=seed, steps=2000))
    assert report.verdict == "healthy"
    assert not [finding for finding in report.findings if finding.severity == "critical"]
    assert report.decision is None
    assert report.coverage_frac == 1.0
    assert (report.first_step, report.last_step, report.records) == (0, 1999, 2000)


def test_the_report_says_what_was_checked() -> None:
    report = judged(healthy(seed=1, steps=2000))
    assert [row.detector for row in report.detectors] == NAMES
    warm_up = 6 * 24  # points that the six buckets learn from before they are judged
    assert summary_of(report, "loss spike").checked == 2000 - warm_up
    assert summary_of(report, "non-finite").checked == 2000
    assert summary_of(report, "lr mismatch").checked == 2000
    assert summary_of(report, "save failure").checked == 9
    assert all(row.rule for row in report.detectors)


def pooled_rule_fires(records: tuple[Record, ...]) -> int:
    """The simple rule that the founding incident was judged by: loss above 3.0 in a run that sits at 0.6."""
    return sum(record.ce is not None and record.ce > 3.0 for record in steps_of(records)[400:])


def test_the_multimodal_mix_that_trips_a_pooled_rule_is_silent() -> None:
    records = healthy(seed=2, steps=2000)
    losses = [record.ce for record in steps_of(records)[1000:] if record.ce is not None]
    assert statistics.median(losses) < 1.0
    assert pooled_rule_fires(records) > 100
    report = judged(records)
    assert not found(report, "loss spike")
    assert report.verdict == "healthy"


def test_a_rare_bucket_in_its_warm_up_blinds_no_other() -> None:
    order = [1 + step % 5 for step in range(600)]
    order[::200] = [0, 0, 0]
    records = simulate_run(seed=5, steps=600, lr=lambda step: 1e-3, order=order)
    spiked = change_steps(records, lambda r: scaled(r, loss=8.0) if r.step == 503 else r)
    report = judged(spiked)
    assert [f.first_step for f in found(report, "loss spike")] == [503]
    assert "bucket 0 (3)" in summary_of(report, "loss spike").note
    assert "0" not in report.stats["buckets"]


def test_batches_of_few_tokens_may_be_noisy() -> None:
    rng = np.random.default_rng(0)

    def noisy_and_small(record: StepRecord) -> StepRecord:
        if record.step % 37:
            return record
        (micro,) = scaled(record, loss=float(np.exp(rng.uniform(0.5, 0.9)))).micro_batches
        frac = 8 / micro.n_tokens
        assert micro.ce_sum is not None
        small = type(micro)(**{f: getattr(micro, f) for f in micro.__slots__} | {"n_tokens": 8, "ce_sum": micro.ce_sum * frac})
        return type(record)(**{f: getattr(record, f) for f in record.__slots__} | {"micro_batches": (small,)})

    records = healthy(seed=3, steps=1500)
    assert not found(judged(change_steps(records, noisy_and_small)), "loss spike")


def test_a_bucket_that_mixes_easy_with_hard_batches_is_never_damage() -> None:
    rng = np.random.default_rng(1)
    hard = {int(step) for step in rng.choice(2000, size=100, replace=False)}
    records = change_steps(healthy(seed=4, steps=2000), lambda r: scaled(r, loss=3.0) if r.step in hard else r)
    report = judged(records)
    assert len(found(report, "loss spike")) > 20
    assert not found(report, "loss spike", severity="critical")


def test_a_run_too_short_to_judge_is_not_called_healthy() -> None:
    report = judged(healthy(seed=1, steps=2000)[:15])
    assert report.verdict == "blind"
    assert "too few" in report.headline
    running = judged(healthy(seed=1, steps=2000)[:15], ended=False)
    assert running.verdict == "healthy"
    assert "not judged yet" in running.headline


def test_an_empty_log_is_blind() -> None:
    checker_report = judged(healthy(seed=1, steps=2000)[:1], ended=False)
    assert checker_report.verdict == "blind"
    assert checker_report.last_step is None
    assert "no step yet" in checker_report.headline
