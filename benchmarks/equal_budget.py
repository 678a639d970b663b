"""Acceptance of our drafter over SpecForge's, for the same steps and for the same CPU time.

The demo's target and its own answers, three seeds (first weights, order, anchors). Our loss is the default of this project,
settled beforehand: cross-entropy with static decay. `equal steps`: both see the same batches, anchors and learning rates. `equal
time`: ours gets as many more steps as fit into the CPU time of SpecForge's model and loop (its fastest setting here, all blocks in
one chunk), with the schedule laid out for them; the share that fits is measured on stretches in turn, and what was really used
is told. Trained drafters decode the same held-out prompts; intervals are by bootstrap over the prompts, each with its sums over
the seeds. Needs `make bench-peers`; a quarter of an hour.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.end_to_end_setup import Setup, Size, training_loop
from benchmarks.report import ROOT, benchmark_parser, publish
from benchmarks.system_process import ABSENT, PEERS_PYTHON
from dflash.config import EvaluateConfig, load_config
from dflash.evaluate.bootstrap import percentile_interval, resample_counts, resampled_ratios, widened
from dflash.records import ProbeFigures

NAME = "equal_budget"
PEER = "specforge_0"
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
STRETCH_STEPS = 20
FULL = Size(chats=640, steps=1000, heldout=64, large_steps=0)
QUICK = Size(chats=32, steps=40, heldout=4, large_steps=0)
MARGIN = 0.98
"""Of the share that was measured: ours must not have used more than SpecForge."""


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    if not PEERS_PYTHON.is_file():
        print(ABSENT, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    size, seeds = (QUICK, QUICK_SEEDS) if arguments.quick else (FULL, SEEDS)
    setup = Setup(load_config(ROOT / "configs" / "demo.yaml"))
    probes: dict[str, list[ProbeFigures]] = {}
    costs = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            folder = Path(name) / str(seed)
            folder.mkdir()
            costs.append(_train(setup, folder, size, seed=seed))
            prompts = setup.prompts(size.heldout)
            for system in ("peer", "steps", "time"):
                probes.setdefault(system, []).append(setup.probe(folder / f"{system}.safetensors", prompts))
            print(
                f"seed {seed}: {costs[-1]}, {[round(found[-1].acceptance_length, 3) for found in probes.values()]}", file=sys.stderr
            )
    publish(NAME, _figures(probes, costs, size, evaluate=setup.config.evaluate), arguments)
    return 0


def _train(setup: Setup, folder: Path, size: Size, *, seed: int) -> dict[str, float]:
    """Train the three drafters of a seed; leaves `peer`, `steps` and `time.safetensors`; returns CPU seconds and steps."""
    work, more = folder / "work.safetensors", folder / "more.safetensors"
    setup.write_work(work, size, seed=seed, weights_seed=seed)
    with training_loop("ours", work) as ours, training_loop(PEER, work) as peer:
        spent: dict[str, list[float]] = {"steps": [], "peer": []}
        for first in range(0, size.steps, STRETCH_STEPS):
            for name, loop in (("steps", ours), ("peer", peer)):
                spent[name].append(loop.ask(f"steps {first} {min(size.steps, first + STRETCH_STEPS)}")["cpu_s"])
        for name, loop in (("steps", ours), ("peer", peer)):
            loop.ask(f"save {folder / name}.safetensors")
    # The first stretch chooses kernels and fills caches: it says nothing of the others.
    fits = statistics.median(theirs / own for own, theirs in zip(spent["steps"][1:], spent["peer"][1:], strict=True))
    longer = replace(size, steps=round(MARGIN * fits * size.steps))
    setup.write_work(more, longer, seed=seed, weights_seed=seed)
    with training_loop("ours", more) as ours:
        used_s = ours.ask(f"steps 0 {longer.steps}")["cpu_s"]
        ours.ask(f"save {folder / 'time.safetensors'}")
    costs = {"peer_cpu_s": sum(spent["peer"]), "steps_cpu_s": sum(spent["steps"]), "time_cpu_s": used_s, "time_steps": longer.steps}
    return {name: round(value, 2) for name, value in costs.items()}


def _figures(
    probes: Mapping[str, Sequence[ProbeFigures]], costs: Sequence[Mapping[str, float]], size: Size, *, evaluate: EvaluateConfig
) -> dict[str, Any]:
    figures: dict[str, Any] = {"peer": "SpecForge, objective_chunk_blocks 0", "our_loss": "decay", "seeds": len(costs)}
    figures |= {"steps": size.steps, "heldout_prompts": size.heldout}
    for system, label in {"peer": "SpecForge", "steps": "ours_equal_steps", "time": "ours_equal_time"}.items():
        figures[f"{label}.acceptance_length_each"] = [round(found.acceptance_length, 3) for found in probes[system]]
    figures["ours_equal_time.steps_each"] = [cost["time_steps"] for cost in costs]
    for system, label in {"steps": "equal_steps", "time": "equal_time"}.items():
        low, middle, high = gain_over(probes[system], probes["peer"], evaluate=evaluate)
        figures[f"{label}.cpu_of_SpecForge"] = [round(cost[f"{system}_cpu_s"] / cost["peer_cpu_s"], 3) for cost in costs]
        figures[f"{label}.acceptance_over_SpecForge"] = round(middle, 3)
        figures[f"{label}.acceptance_over_SpecForge_ci"] = [round(low, 3), round(high, 3)]
    return figures


def gain_over(new: Sequence[ProbeFigures], old: Sequence[ProbeFigures], *, evaluate: EvaluateConfig) -> tuple[float, float, float]:
    """Acceptance length of some drafters over that of others, all on the same prompts: lower end, ratio, upper end."""
    counted = [np.sum([each.counted for each in side], axis=0) for side in (new, old)]
    verifications = [np.sum([each.verifications for each in side], axis=0) for side in (new, old)]
    counts = resample_counts(len(counted[0]), samples=evaluate.bootstrap_samples, seed=evaluate.seed)
    drawn = [resampled_ratios(tokens, steps, counts=counts) for tokens, steps in zip(counted, verifications, strict=True)]
    low, high = percentile_interval(np.divide(*drawn), confidence=widened(evaluate.confidence, prompts=len(counted[0])))
    own, theirs = (tokens.sum() / steps.sum() for tokens, steps in zip(counted, verifications, strict=True))
    return float(low), float(own / theirs), float(high)


if __name__ == "__main__":
    raise SystemExit(main())
