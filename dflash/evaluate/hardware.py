"""The machine that figures were measured on: a speed without it means nothing. Neither host names nor paths."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """Processor, cores, memory, GPUs, PyTorch, such as `AMD EPYC 7R13, 2 logical cores, 24 GiB, no GPU, PyTorch 2.13.0`."""
    model = platform.processor() or platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{model}, {psutil.cpu_count()} logical cores, {memory_gib:.0f} GiB, {_gpus()}, PyTorch {torch.__version__}"


def _gpus() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
