"""Whether data arrive between the GPUs of this host: direct copies between every pair, and one sum over all of them.

Invariant: what arrives is compared with what was sent, bit for bit. Hard decision: each sum runs in processes of its own under a
time limit, because a platform whose IOMMU or ACS rewrites addresses between PCIe cards does not fail: it hangs, or delivers zeros.

Usage: `python infra/host/p2p_check.py`; exit status 0 only if everything arrived. `--device cpu` walks the same path without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

SEED = 20


def pattern(nbytes: int, device: torch.device, *, seed: int) -> torch.Tensor:
    """Random bytes on a device, `[nbytes]` uint8, the same for the same seed wherever they are made."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)


def wrong_bytes(source: torch.device, target: torch.device, *, nbytes: int) -> int:
    """Bytes that differ after a copy from one device straight to another."""
    sent = pattern(nbytes, source, seed=SEED)
    arrived = sent.to(target, copy=True).cpu()
    return int((arrived != pattern(nbytes, torch.device("cpu"), seed=SEED)).sum())


def check_copies(devices: list[torch.device], *, nbytes: int) -> list[str]:
    """Copy between every ordered pair; returns a line for each pair whose bytes did not arrive."""
    faults = []
    for source, target in itertools.permutations(range(len(devices)), 2):
        if wrong := wrong_bytes(devices[source], devices[target], nbytes=nbytes):
            faults.append(f"copy {source} -> {target}: {wrong} of {nbytes} bytes are wrong")
    return faults


def reduce_rank(rank: int, world: int, *, device: torch.device, nbytes: int, meeting: str, limit_s: float) -> bool:
    """One rank of the sum; returns whether it got what arithmetic says."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=limit_s)
    )
    mine = torch.full((nbytes // 4,), float(rank + 1), device=device)
    distributed.all_reduce(mine)
    right = bool((mine.cpu() == world * (world + 1) / 2).all())
    distributed.destroy_process_group()
    return right


def check_sum(world: int, *, kind: str, nbytes: int, limit_s: float) -> list[str]:
    """Sum over all devices, a process each; returns a line for each rank that failed or hung."""
    with tempfile.TemporaryDirectory(prefix="dflash-p2p-") as folder:
        shared = ["--device", kind, "--count", str(world), "--bytes", str(nbytes), "--limit", str(limit_s)]
        program = [sys.executable, os.fspath(Path(__file__).resolve()), *shared, "--meeting", f"{folder}/meeting"]
        ranks = [subprocess.Popen([*program, "--rank", str(rank)]) for rank in range(world)]
        faults = []
        end_s = time.monotonic() + limit_s  # one limit for all: eight ranks that hang take no longer than one
        try:
            for rank, process in enumerate(ranks):
                try:
                    if process.wait(max(0.0, end_s - time.monotonic())):
                        faults.append(f"sum: rank {rank} ended with status {process.returncode}")
                except subprocess.TimeoutExpired:
                    faults.append(f"sum: rank {rank} hung for {limit_s:.0f} s")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return faults


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check that data arrive between the GPUs of this host.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--count", type=int, help="devices, all GPUs if absent")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="size of each copy")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="longest time of the sum")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    count = arguments.count or torch.cuda.device_count()
    devices = [torch.device("cuda", index) if arguments.device == "cuda" else torch.device("cpu") for index in range(count)]
    if arguments.rank is not None:
        right = reduce_rank(
            arguments.rank,
            count,
            device=devices[arguments.rank],
            nbytes=arguments.bytes,
            meeting=arguments.meeting,
            limit_s=arguments.limit,
        )
        return 0 if right else 1
    if count < 2:
        print(f"{count} devices: nothing to copy between")
        return 0
    faults = check_copies(devices, nbytes=arguments.bytes)
    faults += check_sum(count, kind=arguments.device, nbytes=arguments.bytes, limit_s=arguments.limit)
    for fault in faults:
        print(fault)
    if faults:
        print("set NCCL_P2P_DISABLE=1 in /etc/dflash/gpu.env, and see infra/README.md: direct copies between GPUs")
        return 1
    print(f"{count * (count - 1)} copies and one sum over {count} devices: every byte arrived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
