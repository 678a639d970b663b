"""Causes of clusters: each explanation with its statistic, the best supported named, and the action untouched by any of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash.health.causes import Surroundings, classified
from dflash.health.decision import damage_of
from dflash.records import Finding

NOTHING = Surroundings(
    planned=(),
    planned_steps=12,
    saves={"saves": 2, "p": 0.2, "ratio": 1.0},
    saves_proven=False,
    near_save_steps=10,
    samples=100_000,
)


def finding(step: int, detector: str = "loss spike", *, severity: Any = "warn", last: int | None = None, **values: Any) -> Finding:
    base = {"rows": [8 * step, 8 * step + 1], "epoch": 0, "resolved_step": step + 1} if detector == "loss spike" else {}
    return Finding(
        detector=detector, severity=severity, domain="training", message=f"{detector} at {step}", first_step=step,
        last_step=step if last is None else last, onset_step=step, bucket=0, values={**base, **values}, batch_ids=(step,),
    )  # fmt: skip


def named(*findings: Finding, around: Surroundings = NOTHING) -> list[str]:
    told, _ = classified(findings, around)
    return [str(f.values.get("cause")) for f in told]


def test_a_recovered_spike_is_a_transient_and_an_open_one_unknown() -> None:
    spike = finding(100)
    still = replace(spike, values={key: value for key, value in spike.values.items() if key != "resolved_step"})
    assert named(spike) == ["transient"]
    assert named(still) == ["unknown"]


def test_damage_without_another_explanation_is_instability_and_names_its_whole_cluster() -> None:
    alarm = finding(102, "sustained rise", severity="critical", last=400, alarm_step=152)
    assert named(finding(100), alarm, finding(350)) == ["instability"] * 3
    assert named(finding(100), finding(900, "sustained rise", severity="critical", alarm_step=950)) == ["transient", "instability"]


def test_the_same_samples_in_a_later_epoch_are_adversarial() -> None:
    first, again = finding(100), finding(900, rows=[800, 7], epoch=1, grad_z=9.0)
    assert named(first, again) == ["adversarial batch", "adversarial batch"]
    told, clusters = classified([first, again], NOTHING)
    test = told[1].values["tests"]["adversarial batch"]
    assert (test["shared_samples"], test["with_step"], test["samples"], test["grad_z"]) == (1, 100, [800], 9.0)
    assert len(clusters) == 2


@pytest.mark.parametrize(("epoch", "samples"), [(0, 100_000), (1, 20)])
def test_shared_samples_prove_nothing_within_an_epoch_or_where_chance_shares_them(epoch: int, samples: int) -> None:
    around = replace(NOTHING, samples=samples)
    assert named(finding(100), finding(900, rows=[800, 7], epoch=epoch), around=around) == ["transient", "transient"]


def test_a_link_with_saves_needs_proof() -> None:
    near = finding(404, steps_since_save=4)
    assert named(near) == ["transient"]
    told, _ = classified([near], NOTHING)
    assert told[0].values["tests"]["save-linked"]["verdict"] == "save-linked unproven"
    proven = replace(NOTHING, saves_proven=True)
    assert named(near, around=proven) == ["save-linked"]
    assert named(finding(460, steps_since_save=60), around=proven) == ["transient"]


def test_what_is_outside_training_is_named_before_training_is_blamed() -> None:
    assert named(finding(10, "short window", severity="info", z=1.0)) == ["window artefact"]
    assert named(finding(10, "bucket mix", severity="info"), finding(12)) == ["bucket mix", "transient"]
    assert named(finding(10, "dead metric"), finding(11, "accuracy drop")) == ["sensor missing", "sensor missing"]
    planned = replace(NOTHING, planned=((95, "epoch"),))
    assert named(finding(100), finding(104), around=planned) == ["planned shift", "planned shift"]
    assert named(finding(100, "sustained rise", severity="critical", alarm_step=150), around=planned) == ["instability"]


def test_a_replay_and_a_bad_resume_are_what_they_are() -> None:
    repeated = finding(400, "repeated data", severity="critical", last=500, alarm_step=400)
    assert named(repeated, finding(405)) == ["replayed data", "replayed data"]
    assert named(finding(400, "bad resume", severity="critical", alarm_step=430)) == ["bad resume"]


def test_a_cause_changes_neither_damage_nor_what_is_no_training_signal() -> None:
    alarm = finding(102, "sustained rise", severity="critical", alarm_step=152)
    queue = finding(90, "queue decline")
    told, clusters = classified([queue, alarm], NOTHING)
    assert "cause" not in told[0].values
    assert damage_of(told, segment=0, last_step=200) == damage_of([queue, alarm], segment=0, last_step=200)
    (summary,) = [cluster.summary() for cluster in clusters]
    assert (summary["cause"], summary["damage"], summary["detectors"]) == ("instability", True, ["sustained rise"])
    assert summary["tests"].keys() >= {"sensor missing", "window artefact", "bucket mix", "planned shift", "save-linked"}
