"""The whole rollback loop as a state machine: thousands of fault histories, with any actor dying between any two lines."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from dflash.config import CheckpointConfig
from dflash.config.rollback import RollbackConfig
from dflash.records.rollback import RollbackEntry
from tests.support.amount import amount
from tests.support.rollback_simulator import Fault, World, simulate

STEPS = 300
SOAK = 15
HISTORIES = int(os.environ.get("DFLASH_ROLLBACK_HISTORIES", "120"))
"""Raised to thousands by the release tests."""
KILL_FRAC = 0.02

RULE = RollbackConfig(region_steps=80, cooldown_steps=15, skip_positions=(6, 12), rewarm_steps=10, max_skip_frac=0.2, max_per_day=6)
SAVES = CheckpointConfig(interval_steps=10, window_steps=SOAK, soak_steps=SOAK, keep_clean=3, keep_other=2)


def world(*faults: Fault) -> World:
    return World(faults=list(faults), total_steps=STEPS, rule=RULE, saves=SAVES, batches_per_epoch=200)


def random_faults(rng: random.Random, *, max_latency: int) -> list[Fault]:
    kinds = ("batch", "batch", "step", "always", "disk", "disk")
    return [
        Fault(rng.choice(kinds), rng.randrange(STEPS - 40), rng.randrange(1, max_latency), rng.randrange(1, 6))
        for _ in range(rng.randrange(5))
    ]


def check_invariants(done: World) -> None:
    ends = Counter(line.plan.key for line in done.ledger if isinstance(line, RollbackEntry) and line.phase != "begin")
    assert all(count == 1 for count in ends.values()), "a request had more than one effect"
    assert set(done.requests) <= set(done.acks), "a request was never answered"
    begun = [line for line in done.ledger if isinstance(line, RollbackEntry) and line.phase == "begin"]
    assert len(begun) <= RULE.max_per_run
    per_region = Counter(line.plan.region_step for line in begun)
    assert all(count <= RULE.max_per_region for count in per_region.values())
    segments = [segment for segment, _ in done.starts]
    assert segments == sorted(set(segments)), "a segment number was used twice"


@pytest.mark.parametrize("chunk", range(4))
def test_any_history_ends_and_never_returns_to_a_damaged_state(chunk: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(chunk * HISTORIES // 4, (chunk + 1) * HISTORIES // 4):
        rng = random.Random(seed)
        done = world(*random_faults(rng, max_latency=SOAK))
        simulate(done, rng=rng, kill_frac=KILL_FRAC, max_ticks=20_000)
        check_invariants(done)
        assert not [back for back in done.returns if back.damaged], f"seed {seed} went back to a damaged checkpoint"
        if done.over == "finished":
            assert len(done.live) == STEPS
            assert not done.shown(), f"seed {seed} finished with damage in its log"
        outcomes[f"{done.over}, {min(len(done.returns), 2)}"] += 1
    # The histories are worth something only if they end in every way.
    assert {"finished, 0", "finished, 1", "halted, 2"} <= set(outcomes)


def test_damage_that_outlives_the_soak_still_ends() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        done = world(*random_faults(rng, max_latency=4 * SOAK))
        simulate(done, rng=rng, kill_frac=KILL_FRAC, max_ticks=20_000)
        check_invariants(done)


def test_without_delays_the_newest_truly_clean_checkpoint_is_chosen() -> None:
    seen, seeds = 0, amount(30, full=60)
    for seed in range(seeds):
        done = world(*random_faults(random.Random(seed), max_latency=SOAK))
        simulate(done, rng=None, kill_frac=0.0, max_ticks=5_000)
        for back in done.returns:
            if back.entry.plan.rung == 1:
                assert back.entry.target_step == back.best, f"seed {seed}"
                seen += 1
    assert seen > seeds // 3


@pytest.mark.parametrize("latency", [1, 7, SOAK - 1])
def test_a_fault_that_returns_halts_within_three_rollbacks_of_its_region(latency: int) -> None:
    for at in (12, 100, 250):
        for seed in range(4):
            done = world(Fault("always", at, latency))
            simulate(done, rng=random.Random(seed), kill_frac=KILL_FRAC, max_ticks=20_000)
            assert done.over == "halted"
            assert len(done.returns) <= RULE.max_per_region


def test_one_bad_batch_costs_one_rollback_and_only_the_skipped_batches() -> None:
    done = world(Fault("batch", 150, latency=4))
    simulate(done, rng=random.Random(3), kill_frac=0.0, max_ticks=20_000)
    assert (done.over, len(done.returns)) == ("finished", 1)
    skip = done.returns[0].entry.plan.skip
    assert any(first <= 150 < end for first, end in skip)
    left_out = {position for first, end in skip for position in range(first, end)}
    assert len(left_out) < 12
    consumed = [record.position for record in done.live]
    assert consumed == [position for position in range(STEPS + len(left_out)) if position not in left_out]


def test_a_run_without_faults_is_left_alone_whoever_dies() -> None:
    for seed in range(8):
        done = world()
        simulate(done, rng=random.Random(seed), kill_frac=0.05, max_ticks=20_000)
        assert (done.over, done.requests) == ("finished", {})
        assert [record.position for record in done.live] == list(range(STEPS))


def test_a_passing_fault_of_the_machine_is_survived() -> None:
    done = world(Fault("step", 120, latency=3, times=2))
    simulate(done, rng=random.Random(1), kill_frac=0.0, max_ticks=20_000)
    assert (done.over, [back.entry.plan.rung for back in done.returns]) == ("finished", [1, 2])
    first, second = (back.entry.target_step for back in done.returns)
    assert second < first


def test_a_spoiled_target_is_replaced_by_the_clean_one_before_it() -> None:
    """The files rot after they were judged clean: seen only when the rollback verifies them."""
    done = world(Fault("batch", 150, latency=4))
    spoiled: list[int] = []

    class Rotting(random.Random):
        def choices(self, *args: object, **kwargs: object) -> list[str]:  # type: ignore[override]
            pending = [plan for plan in done.requests.values() if plan.target_step is not None]
            if pending and not spoiled:
                assert pending[0].target_step is not None
                done.disk[pending[0].target_step].spoiled = True
                spoiled.append(pending[0].target_step)
            return super().choices(*args, **kwargs)  # type: ignore[arg-type]

    simulate(done, rng=Rotting(5), kill_frac=0.0, max_ticks=20_000)
    assert done.over == "finished"
    back = done.returns[0]
    assert back.entry.plan.target_step == spoiled[0]
    assert back.entry.target_step is not None
    assert back.entry.target_step < spoiled[0]
