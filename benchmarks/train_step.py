"""What a training step of the drafter costs, beside the peers' steps on the same work: CPU time, useful FLOP, memory.

Setting: target 8 layers, width 256, vocabulary 32,000; drafter 2 layers, K 16; 2 sequences of 2048 tokens with 64 anchors each,
and of 512 with 128; float32, one thread. Every system runs in a process of its own and does a step in turn, so what slows the
machine slows all of them; the figures are medians of process CPU time and of its ratios within a round. A step is anchors,
labels, embedding, drafter, loss, backward, clipping and AdamW; the target's features are given. Loss and gradients of every
system are compared first, on the same anchors. The peers run in the environment that `make bench-peers` makes; without it
their rows say so. Memory is what a step needs above weights, gradients and optimizer state, as resident memory of the process:
`_mb` with allocations returned to the kernel at once (what is alive), `_resident_mb` with the allocator as it comes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.report import ROOT, benchmark_parser, publish
from benchmarks.step_setting import SETTINGS, Setting, draw_anchors
from benchmarks.system_process import ABSENT, PEERS_PYTHON, SystemProcess

NAME = "train_step"
PEERS = {
    "specforge": "SpecForge",
    "specforge_0": "SpecForge_chunk_0",
    "specforge_8": "SpecForge_chunk_8",
    "speculators": "speculators",
}
LABELS = {"ours": "ours", **PEERS}
QUICK_ROUNDS = 2
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which freed memory returns to the kernel at once."""


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--setting", choices=sorted(SETTINGS), help="only this one; a stored result keeps the other's figures")
    parser.add_argument("--only", choices=["time", "memory"], help="only these figures; a stored result keeps the others")
    parser.add_argument("--rounds", type=int, default=7, help="steps of every system after the first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    systems = ["ours", *(PEERS if PEERS_PYTHON.is_file() else ())]
    if arguments.quick:
        systems = [name for name in systems if name in {"ours", "specforge", "specforge_0"}]
    settings = [arguments.setting] if arguments.setting else ["2x2048_64"] if arguments.quick else sorted(SETTINGS)
    figures: dict[str, Any] = {} if arguments.quick else _stored()
    for name in settings:
        found: dict[str, Any] = {}
        if arguments.only != "time":
            found |= _memory_figures(name, ["ours"] if arguments.quick else systems)
        if arguments.only != "memory":
            found |= _time_figures(name, systems, QUICK_ROUNDS if arguments.quick else arguments.rounds)
        figures |= {f"{name}.{key}": value for key, value in found.items()}
    publish(NAME, dict(sorted(figures.items())), arguments)
    return 0


def _stored() -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{NAME}.json"
    return dict(json.loads(path.read_text())["figures"]) if path.is_file() else {}


def _time_figures(name: str, systems: list[str], rounds: int) -> dict[str, Any]:
    setting = SETTINGS[name]
    workers = {system: _worker(system, name, environment={}) for system in systems}
    peak = []
    try:
        agreement = _agreement(workers)
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for worker in workers.values():
            worker.ask("step")
        for _ in range(rounds):
            peak.append(matmul_flops_per_s())
            for system, worker in workers.items():
                seconds[system].append(worker.ask("step")["cpu_s"])
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)
    return _figures(setting, seconds, agreement, statistics.median(peak))


def _worker(system: str, setting: str, *, environment: dict[str, str]) -> SystemProcess:
    return SystemProcess("benchmarks.step_worker", system, ["--setting", setting], environment=environment)


def _memory_figures(name: str, systems: list[str]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for system in systems:
        for key, at_once in (("mb", True), ("resident_mb", False)):
            with _worker(system, name, environment=ALLOCATOR if at_once else {}) as worker:
                peak = worker.ask("peak")["peak_bytes"]
            found[f"{LABELS[system]}.{key}"] = None if peak is None else round(peak / 1e6)
    return found


def _agreement(workers: dict[str, SystemProcess]) -> dict[str, dict[str, float]]:
    """Relative distance of every peer's loss and gradient from ours, on the same anchors."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {system: Path(folder) / f"{system}.safetensors" for system in workers}
        losses = {system: worker.ask(f"gradients {files[system]}")["loss"] for system, worker in workers.items()}
        ours = load_file(files["ours"])
        for system in workers:
            theirs = load_file(files[system])
            if theirs.keys() != ours.keys():
                raise RuntimeError(f"{system} trains other tensors: {sorted(theirs.keys() ^ ours.keys())}")
            distance = sum(float((theirs[key] - ours[key]).square().sum()) for key in ours) ** 0.5
            norm = sum(float(value.square().sum()) for value in ours.values()) ** 0.5
            found[system] = {"loss": abs(losses[system] / losses["ours"] - 1), "gradient": distance / norm}
    return found


def matmul_flops_per_s() -> float:
    """The machine's float32 matmul rate on one thread, in CPU time."""
    size, times = 1024, 8
    left, right, out = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)
    torch.mm(left, right, out=out)
    began = time.process_time()
    for _ in range(times):
        torch.mm(left, right, out=out)
    return times * 2 * size**3 / (time.process_time() - began)


def _figures(
    setting: Setting, seconds: dict[str, list[float]], agreement: dict[str, dict[str, float]], peak_flops_per_s: float
) -> dict[str, Any]:  # fmt: skip
    draws = [draw_anchors(setting, torch.Generator().manual_seed(seed)).float().mean() for seed in range(8)]
    flops = setting.useful_flops(float(torch.stack(draws).mean()))
    figures: dict[str, Any] = {"matmul_peak_gflops": round(peak_flops_per_s / 1e9, 1), "useful_gflop": round(flops / 1e9, 1)}
    for system, label in LABELS.items():
        if system not in seconds:
            figures[f"{label}.cpu_s"] = "left out by --quick" if PEERS_PYTHON.is_file() else ABSENT
            continue
        median = statistics.median(seconds[system])
        figures[f"{label}.cpu_s"] = round(median, 3)
        figures[f"{label}.flop_efficiency"] = round(flops / median / peak_flops_per_s, 3)
        if system != "ours":
            ratios = [own / theirs for own, theirs in zip(seconds["ours"], seconds[system], strict=True)]
            figures[f"ours_vs_{label}"] = round(statistics.median(ratios), 3)
            figures[f"ours_vs_{label}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
            figures[f"{label}.loss_distance"] = float(f"{agreement[system]['loss']:.1e}")
            figures[f"{label}.gradient_distance"] = float(f"{agreement[system]['gradient']:.1e}")
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
