"""Who waits for whom, and which split of the devices would give most tokens a second; pure arithmetic on measured times.

Invariant: nothing here measures; the same figures give the same advice whether they come from a running training or from the
`balance` command. Model: a replica with T targets makes micro-batches at min(T / target time, 1 / drafter time), because the stages
overlap fully and the slower one sets the pace; replicas add up, because they wait for each other only once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one stage of one replica; the rest of its time it was idle.

    Attributes:
        workers: threads of the stage; the seconds are summed over them.
        busy_s: at work; starved_s: waiting for input; blocked_s: waiting for room behind it.
    """

    workers: int
    busy_s: float
    starved_s: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """One replica's stages over `wall_s` seconds in which it trained on `batches` micro-batches."""

    wall_s: float
    batches: int
    reader: StageTime
    targets: StageTime
    drafter: StageTime


@dataclass(frozen=True, slots=True)
class Split:
    """One way to use the devices.

    Attributes:
        devices: used, replicas x (targets + 1).
        batches_per_s: of all replicas.
        bound_by: `targets` or `drafter`, whichever sets the pace.
    """

    replicas: int
    targets: int
    devices: int
    batches_per_s: float
    bound_by: str


def stage_shares(replicas: Sequence[ReplicaTimes]) -> dict[str, dict[str, float]]:
    """Busy, starved and blocked share of each stage's time, over all replicas; what is left of 1 was spent otherwise."""
    shares = {}
    for stage in ("reader", "targets", "drafter"):
        times = [getattr(replica, stage) for replica in replicas]
        total_s = sum(time.workers * replica.wall_s for time, replica in zip(times, replicas, strict=True))
        shares[stage] = {
            f"{kind}_frac": sum(getattr(time, f"{kind}_s") for time in times) / total_s if total_s else 0.0
            for kind in ("busy", "starved", "blocked")
        }
    return shares


def splits(devices: int, *, target_s: float, drafter_s: float) -> tuple[Split, ...]:
    """Every way to split `devices` into equal replicas of one drafter and T targets, the fastest first.

    Args:
        devices: D, at least 2.
        target_s: seconds of one target for a micro-batch, its transfer included.
        drafter_s: seconds of the drafter for a micro-batch, its share of the update included.

    Returns:
        One split for each number of replicas, with all targets that fit; equal speeds: fewer devices first, then fewer replicas.
    """
    found = [
        Split(
            replicas=replicas,
            targets=targets,
            devices=replicas * (targets + 1),
            batches_per_s=replicas * _replica_rate(targets, target_s, drafter_s),
            bound_by=_bound(targets, target_s, drafter_s),
        )
        for replicas in range(1, devices // 2 + 1)
        for targets in range(1, devices // replicas)
    ]
    best: dict[int, Split] = {}
    for split in found:
        known = best.get(split.replicas)
        if known is None or (split.batches_per_s, -split.devices) > (known.batches_per_s, -known.devices):
            best[split.replicas] = split
    return tuple(sorted(best.values(), key=lambda split: (-split.batches_per_s, split.devices, split.replicas)))


def measured_times(replicas: Sequence[ReplicaTimes]) -> tuple[float, float]:
    """(target, drafter) seconds a micro-batch, means over the replicas; zeros without micro-batches."""
    batches = sum(replica.batches for replica in replicas)
    if not batches:
        return 0.0, 0.0
    return (
        sum(replica.targets.busy_s for replica in replicas) / batches,
        sum(replica.drafter.busy_s for replica in replicas) / batches,
    )


def advice(replicas: Sequence[ReplicaTimes], *, devices: int) -> str:
    """One sentence: which side waits, and which split would balance.

    Args:
        replicas: times of all replicas, with one target count.
        devices: GPUs of the run, one a replica where its roles share it; 0 where all share a CPU.
    """
    target_s, drafter_s = measured_times(replicas)
    if not target_s or not drafter_s:
        return "nothing was measured"
    targets = replicas[0].targets.workers
    if devices <= len(replicas):
        slower = "target" if target_s > targets * drafter_s else "drafter"
        if devices:
            times = f"{target_s:.3f} s and {drafter_s:.3f} s a micro-batch"
            return f"target and drafter share a GPU ({times}): most of it is the {slower}'s"
        return (
            f"target and drafter share the CPU ({target_s:.3f} s and {drafter_s:.3f} s a micro-batch): the {slower} sets the pace, "
            "and more workers than cores gain nothing"
        )
    best = splits(devices, target_s=target_s, drafter_s=drafter_s)[0]
    now = len(replicas) * _replica_rate(targets, target_s, drafter_s)
    side = "the targets set the pace" if _bound(targets, target_s, drafter_s) == "targets" else "the drafter sets the pace"
    text = f"{side} ({target_s:.3f} s a target, {drafter_s:.3f} s a drafter and micro-batch)"
    if (best.replicas, best.targets) == (len(replicas), targets) or best.batches_per_s < now * MIN_GAIN:
        return f"{text}; {len(replicas)} x ({targets} + 1) is the best split of {devices} devices"
    return (
        f"{text}; {best.replicas} x ({best.targets} + 1) would be {best.batches_per_s / now:.2f} times as fast on {devices} devices"
    )


MIN_GAIN = 1.05
"""A gain below the noise of the measurement is no reason to start again."""


def _replica_rate(targets: int, target_s: float, drafter_s: float) -> float:
    return min(targets / target_s, 1.0 / drafter_s)


def _bound(targets: int, target_s: float, drafter_s: float) -> str:
    return "targets" if targets / target_s < 1.0 / drafter_s else "drafter"
