"""The grid of runs: every fault at three strengths with five seeds, shuffled and interleaved, over all mixes of a split.

Faults that outlast a window are also put into windowed logs: a record every few steps, of their mean loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.health.faults import TRAINING, WINDOWED, Fault
from benchmarks.health.faults_operations import OPERATIONS
from benchmarks.health.labels import Label
from benchmarks.health.mixes import DEVELOPMENT, HELD_OUT, Mix
from benchmarks.health.runs import SAVE_INTERVAL, Run, healthy_run
from dflash.config import Config, parse_config

STEPS = 1600
STRENGTHS = 3
SEEDS = 5
SPLITS: dict[str, tuple[Mix, ...]] = {"development": DEVELOPMENT, "held-out": HELD_OUT}
_SEED_OF = {"development": 1000, "held-out": 5_000_000}


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    split: str
    fault: Fault | None
    strength: int
    seed: int
    interleaved: bool
    mix: Mix
    windowed: bool = False


def bench_config() -> Config:
    """The default thresholds, with room to skip."""
    return parse_config(
        "target: {mask_token_id: 1}\ndata: {num_conversations: 10}\n"
        "checkpoint: {interval_steps: 200}\nrollback: {max_skip_frac: 1.0}\n",
        origin="bench",
    )


def cells(split: str, *, strengths: int, seeds: int) -> Iterator[Cell]:
    """All runs of a split; the mixes take turns, so that every fault meets each of them."""
    mixes = SPLITS[split]
    for number, fault in enumerate((*TRAINING, *OPERATIONS)):
        for strength in range(STRENGTHS)[-strengths:]:
            for seed in range(seeds):
                for interleaved in (False, True):
                    turn = number + strength + seed + (2 if interleaved else 0)
                    yield Cell(split, fault, strength, seed, interleaved, mixes[turn % len(mixes)])
    for seed in range(seeds * strengths):
        yield Cell(split, None, 0, seed, seed % 2 == 1, mixes[seed % len(mixes)])
    for number, each in enumerate((*WINDOWED, None)):
        for strength in range(STRENGTHS)[-strengths:]:
            for seed in range(seeds):
                yield Cell(
                    split, each, strength, seed, seed % 2 == 1, mixes[(number + strength + seed) % len(mixes)], windowed=True
                )


def build(cell: Cell, config: Config) -> tuple[Run, Label | None, int]:
    """The run of a cell, its label, and the seed of its items."""
    name = "" if cell.fault is None else cell.fault.__name__
    seed = _SEED_OF[cell.split] + 97 * cell.seed + 13 * cell.strength + cell.interleaved + 1000 * sum(name.encode())
    steps = 2 * STEPS if cell.windowed else STEPS  # so that they have as many records as fit the detectors' windows
    run = healthy_run(cell.mix, seed=seed, steps=steps, interleaved=cell.interleaved, train=config.train)
    if cell.fault is None:
        return run, None, seed
    rng = np.random.default_rng([seed, 1])
    step = int(rng.integers(820, 1180))
    step += 25 if step % SAVE_INTERVAL < 25 else 0
    return run, cell.fault(run, rng, step, cell.strength), seed
