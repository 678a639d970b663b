"""Training on equal work beside SpecForge's step loop: tokens a CPU second, loss, and acceptance length.

Two sizes. The demo: its target answers synthetic prompts, and the trained drafters are decoded by our decoder on held-out ones.
`2x2048_64` of `train_step.py` (vocabulary 32,000, K 16, random text): speed and loss. Features, the anchors of every step, the
order of the batches, the first weights and the learning rates are made once and read by all. Each system trains in a process of
its own, a stretch of steps in turn, so what slows the machine slows all of them; a figure is the median over the stretches of CPU
time within one turn. Ours is the trainer's step with labels, metrics and run log, SpecForge's the loop of its own model
(`objective_chunk_blocks` at its default and at 0, its fastest here). Noise is what other anchors and another order make of our own
loss and acceptance length. SpecForge runs in the environment that `make bench-peers` makes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end_setup import LARGE, Setup, Size, training_loop, write_large
from benchmarks.report import ROOT, benchmark_parser, publish
from benchmarks.system_process import ABSENT, PEERS_PYTHON
from dflash.config import load_config
from dflash.evaluate.probe import paired_gain

NAME = "end_to_end"
PEERS = {"specforge": "SpecForge", "specforge_0": "SpecForge_chunk_0"}
STRETCH_STEPS, LARGE_STRETCH_STEPS = 20, 1
FULL = Size(chats=640, steps=500, heldout=48, large_steps=8)
QUICK = Size(chats=32, steps=20, heldout=6, large_steps=2)

Turns = dict[str, list[dict[str, Any]]]
"""Answers of every stretch, by system."""


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    size = QUICK if arguments.quick else FULL
    systems = ["ours", *(PEERS if PEERS_PYTHON.is_file() else ())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = _prefixed("demo", _demo(folder, systems, size)) | _prefixed(LARGE, _large(folder, systems, size))
    publish(NAME, figures, arguments)
    return 0


def _demo(folder: Path, systems: Sequence[str], size: Size) -> dict[str, Any]:
    setup = Setup(load_config(ROOT / "configs" / "demo.yaml"))
    tokens = setup.write_work(folder / "demo.safetensors", size, seed=0, weights_seed=0)
    setup.write_work(folder / "again.safetensors", size, seed=1, weights_seed=0)
    turns = _train(systems, folder / "demo.safetensors", steps=size.steps, stretch=STRETCH_STEPS)
    with training_loop("ours", folder / "again.safetensors") as loop:
        again: list[float] = loop.ask(f"steps 0 {size.steps}")["losses"]
        loop.ask(f"save {folder / 'again-ours.safetensors'}")
    figures = _speed(turns, tokens, stretch=STRETCH_STEPS) | _losses(turns)
    figures["loss_noise"] = round(_tail(again) / _tail(_all_losses(turns["ours"])) - 1, 5)
    return figures | _acceptance(setup, folder, systems, size) | {"steps": size.steps, "tokens": sum(tokens)}


def _large(folder: Path, systems: Sequence[str], size: Size) -> dict[str, Any]:
    tokens = write_large(folder / "large.safetensors", size.large_steps)
    turns = _train(systems, folder / "large.safetensors", steps=size.large_steps, stretch=LARGE_STRETCH_STEPS)
    return _speed(turns, tokens, stretch=LARGE_STRETCH_STEPS) | _losses(turns) | {"steps": size.large_steps, "tokens": sum(tokens)}


def _train(systems: Sequence[str], work: Path, *, steps: int, stretch: int) -> Turns:
    """Every stretch of every system, in turn; leaves `<system>.safetensors` beside the work."""
    loops = {system: training_loop(system, work) for system in systems}
    turns: Turns = {system: [] for system in systems}
    try:
        for first in range(0, steps, stretch):
            for system, loop in loops.items():
                turns[system].append(loop.ask(f"steps {first} {min(steps, first + stretch)}"))
        for system, loop in loops.items():
            loop.ask(f"save {work.with_name(f'{work.stem}-{system}.safetensors')}")
    finally:
        for loop in loops.values():
            loop.__exit__(None, None, None)
    return turns


def _speed(turns: Turns, tokens: list[int], *, stretch: int) -> dict[str, Any]:
    # The first stretch chooses kernels and fills caches; where it is the only one, it has to do.
    counted = slice(1 if len(turns["ours"]) > 1 else 0, None)
    stretches = [sum(tokens[first : first + stretch]) for first in range(0, len(tokens), stretch)][counted]
    figures: dict[str, Any] = {}
    for system, label in {"ours": "ours", **PEERS}.items():
        if system not in turns:
            figures[f"{label}.tokens_per_cpu_s"] = ABSENT
            continue
        cpu = [turn["cpu_s"] for turn in turns[system][counted]]
        figures[f"{label}.tokens_per_cpu_s"] = round(statistics.median(t / s for t, s in zip(stretches, cpu, strict=True)))
        if system != "ours":
            ratios = [theirs / own["cpu_s"] for theirs, own in zip(cpu, turns["ours"][counted], strict=True)]
            figures[f"speed_vs_{label}"] = round(statistics.median(ratios), 2)
            figures[f"speed_vs_{label}_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
    return figures


def _losses(turns: Turns) -> dict[str, Any]:
    """Mean loss of the last tenth of the steps, and how far the peers' are from ours."""
    own = _all_losses(turns["ours"])
    figures: dict[str, Any] = {"ours.final_loss": round(_tail(own), 4)}
    for system, label in PEERS.items():
        if system in turns:
            theirs = _all_losses(turns[system])
            figures[f"loss_vs_{label}"] = float(f"{_tail(own) / _tail(theirs) - 1:.1e}")
            figures[f"first_loss_vs_{label}"] = float(f"{own[0] / theirs[0] - 1:.1e}")
    return figures


def _all_losses(turns: list[dict[str, Any]]) -> list[float]:
    return [loss for turn in turns for loss in turn["losses"]]


def _tail(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def _acceptance(setup: Setup, folder: Path, systems: Sequence[str], size: Size) -> dict[str, Any]:
    prompts = setup.prompts(size.heldout)
    labels = {"demo-ours": "ours", "demo-specforge": "SpecForge", "again-ours": "ours_again"}
    if "specforge" not in systems:
        del labels["demo-specforge"]
    found = {label: setup.probe(folder / f"{name}.safetensors", prompts) for name, label in labels.items()}
    figures: dict[str, Any] = {f"{label}.acceptance_length": round(each.acceptance_length, 3) for label, each in found.items()}
    for label, key in {"SpecForge": "acceptance_gain_over_SpecForge_ci", "ours_again": "acceptance_noise_ci"}.items():
        if label in found:
            gain = paired_gain(found["ours"], found[label], evaluate=setup.config.evaluate)
            figures[key] = [round(end, 3) for end in gain or ()]
    return figures | {"heldout_prompts": len(prompts)}


def _prefixed(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in figures.items()}


if __name__ == "__main__":
    raise SystemExit(main())
