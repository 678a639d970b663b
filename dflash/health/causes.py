"""What a cluster of findings was: every explanation is tested, its statistic kept, and the best supported one named.

Invariant: a cause changes nothing about the action. Damage is damage whatever it is called; the cause tells the person
where to look. A pure function of findings and of a few facts about the run.

The hard decision: explanations are tried in a fixed order, from those that name something outside training (a broken
sensor, too few samples, the mix, a declared change) to those that blame training; `unknown` is an honest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash.health.decision import is_damage
from dflash.records import Finding

Cause = Literal[
    "replayed data", "bad resume", "sensor missing", "window artefact", "bucket mix", "planned shift", "adversarial batch",
    "save-linked", "instability", "transient", "unknown",
]  # fmt: skip

_CLUSTERED = frozenset(
    {"loss spike", "sustained rise", "divergence", "gradient spike", "gradient explosion", "accuracy drop", "non-finite",
     "bad resume", "repeated data", "short window", "bucket mix", "dead metric"}
)  # fmt: skip
_SENSORS = frozenset({"dead metric", "accuracy drop"})
_GAP_STEPS = 50
_SHARED_CHANCE = 0.05


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the explanations are tested against.

    Attributes:
        planned: (step, event) of declared changes.
        planned_steps: how near one must be.
        saves: figures of the correlation of spikes with saves; `proven` whether they are linked.
        near_save_steps: distance from the beginning of a save that counts as near.
        samples: samples consumed so far.
    """

    planned: Sequence[tuple[int, str]]
    planned_steps: int
    saves: Mapping[str, float]
    saves_proven: bool
    near_save_steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Findings that belong together, what was tested and what it was."""

    findings: tuple[Finding, ...]
    cause: Cause
    tests: Mapping[str, Mapping[str, Any]]

    def summary(self) -> dict[str, Any]:
        """For the report."""
        return {
            "first_step": min(finding.first_step for finding in self.findings),
            "last_step": max(finding.last_step for finding in self.findings),
            "cause": self.cause,
            "findings": len(self.findings),
            "detectors": sorted({finding.detector for finding in self.findings}),
            "damage": any(is_damage(finding) for finding in self.findings),
            "tests": {name: dict(values) for name, values in self.tests.items()},
        }


def classified(findings: Sequence[Finding], around: Surroundings) -> tuple[list[Finding], list[Cluster]]:
    """The findings with their cause and the tests behind it, and the clusters.

    Args:
        findings: of one report, in any order; the order is kept.
        around: facts that explanations are tested against.
    """
    spikes = [finding for finding in findings if finding.detector == "loss spike" and finding.values.get("rows")]
    clusters = [_judge(group, spikes, around) for group in _groups([f for f in findings if f.detector in _CLUSTERED])]
    of = {id(finding): cluster for cluster in clusters for finding in cluster.findings}
    told = [
        replace(finding, values={**finding.values, "cause": of[id(finding)].cause, "tests": of[id(finding)].tests})
        if id(finding) in of
        else finding
        for finding in findings
    ]
    return told, clusters


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that begin within `_GAP_STEPS` of the one before, or while damage lasts; what is no fault stays apart."""
    groups: list[list[Finding]] = []
    reach = -1
    for finding in sorted(findings, key=lambda f: (f.onset_step, f.first_step)):
        apart = finding.detector == "bucket mix"
        if apart:
            groups.insert(0, [finding])
            continue
        if not groups or reach < 0 or finding.first_step > reach:
            groups.append([])
        groups[-1].append(finding)
        reach = max(reach, finding.first_step + _GAP_STEPS, finding.last_step if is_damage(finding) else 0)
    return groups


def _judge(group: Sequence[Finding], spikes: Sequence[Finding], around: Surroundings) -> Cluster:
    tests = {
        "sensor missing": _sensor(group),
        "window artefact": _artefact(group),
        "bucket mix": {"supported": all(f.detector == "bucket mix" for f in group)},
        "planned shift": _planned(group, around),
        "save-linked": _save_linked(group, around),
        "adversarial batch": _adversarial(group, spikes, around),
    }
    detectors = {finding.detector for finding in group}
    damaged = any(is_damage(finding) for finding in group)
    settled = all(f.severity == "info" or "resolved_step" in f.values for f in group)
    ordered: list[tuple[Cause, Callable[[], bool]]] = [
        ("replayed data", lambda: "repeated data" in detectors),
        ("bad resume", lambda: "bad resume" in detectors),
        ("sensor missing", lambda: tests["sensor missing"]["supported"]),
        ("window artefact", lambda: tests["window artefact"]["supported"]),
        ("bucket mix", lambda: tests["bucket mix"]["supported"]),
        ("planned shift", lambda: tests["planned shift"]["supported"]),
        ("adversarial batch", lambda: tests["adversarial batch"]["supported"]),
        ("save-linked", lambda: tests["save-linked"]["supported"]),
        ("instability", lambda: damaged),
        ("transient", lambda: settled),
    ]
    cause: Cause = next((name for name, holds in ordered if holds()), "unknown")
    return Cluster(tuple(group), cause, tests)


def _sensor(group: Sequence[Finding]) -> dict[str, Any]:
    dead = [finding for finding in group if finding.detector == "dead metric"]
    return {"dead_metrics": len(dead), "supported": bool(dead) and all(finding.detector in _SENSORS for finding in group)}


def _artefact(group: Sequence[Finding]) -> dict[str, Any]:
    short = [finding for finding in group if finding.detector == "short window"]
    records = sum(int(finding.values.get("records", 1)) for finding in short)
    scaled = max((float(finding.values["z"]) for finding in short), default=None)
    return {"records": records, "largest_z_scaled": scaled, "supported": bool(short) and len(short) == len(group)}


def _planned(group: Sequence[Finding], around: Surroundings) -> dict[str, Any]:
    onset = min(finding.onset_step for finding in group)
    near = [change for change in around.planned if abs(change[0] - onset) <= around.planned_steps]
    step, event = min(near, key=lambda change: abs(change[0] - onset), default=(None, None))
    told = any("planned_event" in finding.values for finding in group)
    damaged = any(is_damage(finding) for finding in group)
    spikes = sum(finding.detector == "loss spike" for finding in group)
    supported = told or (step is not None and not damaged and spikes >= 2)
    return {"event": event, "step": step, "onset_step": onset, "one_settled_shift": told, "supported": supported}


def _save_linked(group: Sequence[Finding], around: Surroundings) -> dict[str, Any]:
    distances = [f.values["steps_since_save"] for f in group if f.values.get("steps_since_save") is not None]
    near = [distance for distance in distances if distance < around.near_save_steps]
    supported = around.saves_proven and bool(near)
    verdict = "proven" if around.saves_proven else "save-linked unproven" if near else "not near a save"
    return {"steps_since_save": min(distances, default=None), **around.saves, "verdict": verdict, "supported": supported}


def _adversarial(group: Sequence[Finding], spikes: Sequence[Finding], around: Surroundings) -> dict[str, Any]:
    """The same samples spiked before: by sample ids, because batches are put together anew in every epoch."""
    best: tuple[int, int | None, list[int]] = (0, None, [])
    own = [finding for finding in group if finding.detector == "loss spike" and finding.values.get("rows")]
    looked_at = 0
    for finding in own:
        rows = set(finding.values["rows"])
        for other in spikes:
            if other is finding or other.first_step == finding.first_step or other.values["epoch"] == finding.values["epoch"]:
                continue
            looked_at += len(rows) * len(other.values["rows"])
            shared = sorted(rows.intersection(other.values["rows"]))
            if len(shared) > best[0]:
                best = (len(shared), other.first_step, shared)
    expected = looked_at / max(around.samples, 1)
    grad_z = max((max(f.values.get("grad_z") or 0.0, f.values.get("grad_z_before") or 0.0) for f in own), default=0.0)
    supported = best[0] > 0 and (expected < _SHARED_CHANCE or best[0] >= 3)
    return {
        "shared_samples": best[0], "with_step": best[1], "samples": best[2][:16], "shared_by_chance": round(expected, 4),
        "grad_z": round(grad_z, 2), "supported": supported,
    }  # fmt: skip
