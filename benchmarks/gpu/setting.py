"""What every GPU check shares: where it runs, how it times, and how it says that it cannot run or that something is wrong.

Needs torch alone. A figure without a GPU is no figure: on a CPU the same code runs with toy sizes, so that it cannot rot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, Any]
"""What a check measured, by name; units in the names."""

WARM_UPS = 2
MATMUL_WIDTH = 8192
TINY_WIDTH = 64
COPY_BYTES = 1 << 30
TINY_BYTES = 1 << 16


class SkippedError(Exception):
    """A check has no path on this device; the message says why."""


class WrongError(Exception):
    """A check found something wrong; the message says what, with its numbers."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the checks run.

    Attributes:
        tiny: toy sizes.
        folder: for files; empty, and removed afterwards.
    """

    device: torch.device
    tiny: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What the drafter computes in on this device."""
        return torch.bfloat16 if self.cuda else torch.float32

    def need_cuda(self, why: str) -> None:
        """Leave a check that only a GPU can run.

        Raises:
            SkippedError: this is no GPU.
        """
        if not self.cuda:
            raise SkippedError(f"CUDA only: {why}")

    def wait(self) -> None:
        """Until everything queued on the device has run."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def generator(self, seed: int) -> torch.Generator:
        """Random numbers made on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(shape, generator=self.generator(seed), device=self.device, dtype=torch.float32).mul_(scale).to(dtype)

    def seconds(self, work: Callable[[], object], *, repeats: int) -> float:
        """Median time of `work` on the device, warm; by events on a GPU, by the clock on a CPU."""
        for _ in range(WARM_UPS if self.cuda else 1):
            work()
        self.wait()
        return statistics.median(self._once(work) for _ in range(repeats))

    def _once(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Most memory that torch had given out while `work` ran, all of what lived before included; 0 on a CPU."""
        if not self.cuda:
            work()
            return 0
        self.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device))

    def held_bytes(self) -> int:
        """Memory that torch has given out now; 0 on a CPU."""
        return int(torch.cuda.memory_allocated(self.device)) if self.cuda else 0


def matmul_flops(setting: Setting) -> float:
    """Measured rate of a square matrix product in the compute dtype, FLOP/s."""
    width = TINY_WIDTH if setting.tiny else MATMUL_WIDTH
    left, right = (setting.normal(width, width, seed=seed, dtype=setting.dtype) for seed in (0, 1))
    out = torch.empty_like(left)
    return 2.0 * width**3 / setting.seconds(lambda: torch.mm(left, right, out=out), repeats=10)


def copy_rates(setting: Setting) -> Figures:
    """Bytes a second between the device and host memory that is pinned on a GPU, and inside the device."""
    size = TINY_BYTES if setting.tiny else COPY_BYTES
    there = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=setting.cuda)
    other = torch.empty_like(there)
    ways = {
        "device_to_pinned": lambda: here.copy_(there, non_blocking=True),
        "pinned_to_device": lambda: there.copy_(here, non_blocking=True),
        "inside_device": lambda: other.copy_(there),
    }
    return {f"{name}_gb_per_s": size / setting.seconds(way, repeats=5) / 1e9 for name, way in ways.items()}


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of the wanted, in float64."""
    wanted = wanted.detach().double()
    return float((found.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def require(within: bool, message: str) -> None:
    """Fail a check.

    Raises:
        WrongError: not `within`.
    """
    if not within:
        raise WrongError(message)


def device_figures(setting: Setting) -> Figures:
    """What this device can do: the yardsticks of the other checks."""
    figures: Figures = {"torch": torch.__version__, "matmul_tflops": matmul_flops(setting) / 1e12, **copy_rates(setting)}
    if setting.cuda:
        properties = torch.cuda.get_device_properties(setting.device)
        figures |= {
            "device": properties.name,
            "memory_gb": properties.total_memory / 1e9,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(setting.device))),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return figures
