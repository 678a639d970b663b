"""One system's process of `train_step.py`: does a step when asked and says what it cost.

Requests are lines on stdin, answers JSON lines on stdout: `step` -> CPU seconds, `peak` -> bytes above weights, gradients
and optimizer state, `gradients PATH` -> loss, with the gradients in a safetensors file. The peak is the process's high-water
mark of resident memory, which the kernel counts whatever allocator or library asked for it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.step_setting import SETTINGS, Setting, make_inputs
from benchmarks.system_process import serve

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def main() -> int:
    """Serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--setting", required=True, choices=sorted(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    serve(lambda: build(arguments.system, SETTINGS[arguments.setting]), _answer)
    return 0


def build(name: str, setting: Setting) -> Any:
    """A system with its inputs; imports are here because no environment has all of them."""
    inputs = make_inputs(setting)
    if name == "ours":
        from benchmarks.step_ours import OurStep

        return OurStep(setting, inputs)
    from benchmarks.step_peers import peer

    return peer(name, setting, inputs)


def _answer(system: Any, request: list[str]) -> dict[str, Any]:
    if request[0] == "step":
        began = time.process_time()
        system.step()
        spent = time.process_time() - began
        system.release()
        return {"cpu_s": spent}
    if request[0] == "peak":
        return {"peak_bytes": peak_bytes(system)}
    loss, gradients = system.gradients()
    save_file({name: tensor.contiguous() for name, tensor in gradients.items()}, request[1])
    system.release()
    return {"loss": loss}


def peak_bytes(system: Any) -> int | None:
    """Bytes that a step needs besides what it keeps; None where the kernel does not count them."""
    if not CLEAR.exists():
        return None
    system.step()
    system.release()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    CLEAR.write_text(RESET_PEAK)
    system.step()
    peak = _status_bytes("VmHWM")
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in system.model.parameters() if p.grad is not None)
    system.release()
    return peak - before - gradients


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
