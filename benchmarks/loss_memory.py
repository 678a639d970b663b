"""Whether time and memory of the loss stay flat in vocabulary-sized buffers: 512 anchors, K 16, width 256, up to 151,936 ids.

For every vocabulary a process of its own trains a one-layer drafter against a frozen random head and reports what a step needs
above weights, gradients and optimizer state (high-water mark of resident memory, the head and the inputs not counted) and its
CPU time over the time of the two GEMMs that the head cannot do without. `logits_mb` is one full copy of the logits, which a
plain cross-entropy holds two to four times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.report import ROOT, benchmark_parser, publish
from benchmarks.step_ours import OurStep
from benchmarks.step_setting import Setting, make_inputs
from benchmarks.step_worker import peak_bytes

NAME = "loss_memory"
VOCABULARIES = (32_000, 151_936)
ANCHORS, TOKENS, WIDTH = 512, 768, 256


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--vocabulary", type=int, help="measure this one in this very process and print it")
    arguments = parser.parse_args()
    if arguments.vocabulary:
        print(
            json.dumps(measure(arguments.vocabulary, anchors=64 if arguments.quick else ANCHORS, steps=1 if arguments.quick else 3))
        )
        return 0
    figures: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        found = _in_a_process(vocabulary, quick=arguments.quick)
        figures |= {f"vocabulary_{vocabulary}.{key}": value for key, value in found.items()}
    publish(NAME, figures, arguments)
    return 0


def _in_a_process(vocabulary: int, *, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--vocabulary", str(vocabulary), *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(vocabulary: int, *, anchors: int, steps: int) -> dict[str, Any]:
    """One vocabulary: step memory, CPU time and the head's share of it."""
    torch.set_num_threads(1)
    setting = Setting(tokens=TOKENS, anchors=anchors, batch=1, vocab=vocabulary, layers=1)
    inputs = make_inputs(setting)
    system = OurStep(setting, inputs)
    needed = peak_bytes(system)
    seconds = []
    for _ in range(steps):
        began = time.process_time()
        system.step()
        seconds.append(time.process_time() - began)
        system.release()
    rows = anchors * (setting.block_size - 1)
    median = statistics.median(seconds)
    return {
        "anchors": anchors,
        "step_mb": None if needed is None else round(needed / 1e6),
        "logits_mb": round(anchors * setting.block_size * vocabulary * 4 / 1e6),
        "step_cpu_s": round(median, 2),
        "step_vs_head_gemms": round(median / _head_gemm_s(inputs.head, rows), 3),
    }


def _head_gemm_s(head: torch.Tensor, rows: int) -> float:
    """CPU time of logits and input gradient for all rows, from one well-shaped piece of them."""
    piece, columns = 384, 2048
    inputs, weight = torch.ones(piece, WIDTH), head[:columns].contiguous()
    logits, back = torch.empty(piece, columns), torch.empty(piece, WIDTH)
    times = 40
    for attempt in range(2):  # the first round is the warm-up
        began = time.process_time() if attempt else 0.0
        for _ in range(times):
            torch.mm(inputs, weight.t(), out=logits)
            torch.mm(logits, weight, out=back)
    return (time.process_time() - began) / times * (rows / piece) * (len(head) / columns)


if __name__ == "__main__":
    raise SystemExit(main())
