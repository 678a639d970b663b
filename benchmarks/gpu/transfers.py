"""What moves between device and host: features through pinned buffers, checkpoints beside the training, sums over ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setting import Figures, Setting, copy_rates, require
from benchmarks.gpu.shapes import fullest, new_drafter, new_stepper, published, random_features, random_head
from dflash.checkpoint import CheckpointWriter, RunIdentity, WriterHooks, load_checkpoint
from dflash.config import CheckpointConfig, ClusterConfig
from dflash.records import TrainerState
from dflash.train.footprint import STAGING_BYTES
from dflash.train.group import Alone, ProcessGroup
from dflash.train.sharding import whole
from dflash.train.transfer import Courier, Peer, Staged, arrives

THREADS, ROUNDS = 3, 4
LEAST_OF_BANDWIDTH = 0.5
"""Of the measured copy rate: snapshots are one copy a tensor, and small ones reach less."""
FLAT_TOLERANCE = 1e-5
LR = 1e-3


def staging(setting: Setting) -> Figures:
    """Both ways between GPUs, walked on one: every byte arrives, whatever other threads carry and compute meanwhile."""
    size = 1 << 14 if setting.tiny else 400 * 2**20
    rates = copy_rates(setting)
    figures: Figures = {}
    ways: dict[str, Courier] = {
        "staged": Staged(setting.device, setting.device, buffer_bytes=1 << 12 if setting.tiny else STAGING_BYTES)
    }
    if setting.cuda:
        ways["peer"] = Peer(setting.device, setting.device)
    for name, courier in ways.items():
        require(arrives(courier, setting.device), f"{name}: known numbers do not arrive")
        wrong = _carried_by_threads(setting, courier, size // 4)
        require(not wrong, f"{name}: {len(wrong)} of {THREADS * ROUNDS} tensors arrived changed")
        sent = setting.normal(size // 4, seed=0)
        setting.wait()
        begin_s = time.perf_counter()
        for _ in range(ROUNDS):
            courier.carry(sent, after=courier.mark())
        figures[f"{name}_gb_per_s"] = ROUNDS * size / (time.perf_counter() - begin_s) / 1e9
    # A chunk leaves the device while the one before enters it: at best the slower of both directions.
    possible = min(rates["device_to_pinned_gb_per_s"], rates["pinned_to_device_gb_per_s"])
    figures |= {"one_way_pinned_gb_per_s": possible, "staged_of_one_way": figures["staged_gb_per_s"] / possible}
    if setting.cuda:
        require(figures["staged_of_one_way"] >= 0.3, f"the staged way reaches {figures['staged_of_one_way']:.0%} of a pinned copy")
    return figures


def _carried_by_threads(setting: Setting, courier: Courier, numbers: int) -> list[int]:
    """Several threads make tensors on the device and carry them through one courier; returns what arrived changed."""
    computing, wrong = threading.Lock(), []

    def carry(thread: int) -> None:
        for number in range(ROUNDS):
            with computing, courier.computing():
                value = thread * ROUNDS + number
                made = setting.normal(numbers, seed=value)
                for _ in range(20):  # still running when the mark is taken
                    made = made.mul(1.5).sub_(made.mul(0.5))
                end = courier.mark()
            found = courier.carry(made, after=end)
            if not torch.equal(found, made):
                wrong.append(value)

    threads = [threading.Thread(target=carry, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def checkpoint_blocked(setting: Setting) -> Figures:
    """A snapshot holds what the tensors were when it was asked for, and blocks for little more than its copy."""
    count, width = (3, 64) if setting.tiny else (16, 4096)
    groups = ("drafter", "optimizer")
    live = {group: {f"{group}.{n}": torch.zeros(width, width, device=setting.device) for n in range(count)} for group in groups}
    events: list[tuple[str, Mapping[str, Any]]] = []
    defects: list[BaseException] = []
    hooks = WriterHooks(
        before_snapshot=lambda: None,
        whole=whole,
        before_commit=lambda: None,
        on_event=lambda name, _step, details: events.append((name, details)),
        on_defect=defects.append,
        on_operation=lambda _name: None,
    )
    begin_s = time.perf_counter()
    writer = CheckpointWriter(
        setting.folder / "checkpoints", identity=RunIdentity("data", "target", 5), drafter=live["drafter"],
        optimizer=live["optimizer"], rule=CheckpointConfig(), hooks=hooks,
    )  # fmt: skip
    made_s = time.perf_counter() - begin_s
    tensors = [tensor for group in live.values() for tensor in group.values()]
    for step, queued in ((1, True), (2, False)):
        _train_a_little(setting, tensors, queued=queued)
        writer.save(_state(step), wait=False)
        for tensor in tensors:
            tensor.add_(100)  # the next update must not reach the snapshot
        writer.close()
        _require_saved(setting, step, tensors)
    require(not defects, f"the writing thread failed: {defects}")
    staged = [details for name, details in events if name == "save_staged"][-1]
    durable = [details for name, details in events if name == "save_durable"][-1]
    rate = staged["bytes"] / staged["blocked_s"] / 1e9
    pinned = copy_rates(setting)["device_to_pinned_gb_per_s"]
    if setting.cuda:
        require(rate >= LEAST_OF_BANDWIDTH * pinned, f"the snapshot blocks at {rate:.1f} GB/s, a pinned copy reaches {pinned:.1f}")
    return {
        "state_mb": staged["bytes"] / 1e6,
        "blocked_ms": 1e3 * staged["blocked_s"],
        "blocked_gb_per_s": rate,
        "of_pinned_copy": rate / pinned,
        "write_s": durable["write_s"],
        "buffers_made_s": made_s,
    }


def _train_a_little(setting: Setting, tensors: list[Tensor], *, queued: bool) -> None:
    """Updates behind long work that the device has not done yet when the snapshot is asked for."""
    if queued:
        left = setting.normal(*tensors[0].shape, seed=0)
        for _ in range(20):
            left = torch.mm(left, left).clamp_(-1, 1)
    for number, tensor in enumerate(tensors):
        tensor.fill_(float(number)).add_(1)
    if not queued:
        setting.wait()


def _require_saved(setting: Setting, step: int, tensors: list[Tensor]) -> None:
    loaded = load_checkpoint(setting.folder / "checkpoints" / f"step-{step}")
    saved = [*loaded.drafter.items(), *loaded.optimizer.items()]
    require(len(saved) == len(tensors), f"{len(saved)} tensors were saved of {len(tensors)}")
    half = len(tensors) // 2
    for name, tensor in saved:
        number = int(name.rpartition(".")[2]) + (half if name.startswith("optimizer") else 0)
        require(bool((tensor == number + 1).all()), f"step {step}: {name} holds {tensor.flatten()[0]:g}, not {number + 1}")


def _state(step: int) -> TrainerState:
    return TrainerState(
        step=step, plan_position=step, segment=0, plan_sha256="p", config_sha256="c", seed=0, total_steps=9,
        skipped_positions=(), overlay=None, nonfinite_in_row=0, guard=None,
    )  # fmt: skip


class _Several:
    """One rank that the step takes for several: its gradients lie in one flat buffer and go through the collective."""

    rank, size = 0, 2

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sum_(self, tensor: Tensor) -> None:
        """Over the one rank."""
        self._group.sum_(tensor)

    def gather(self, word: Any) -> list[Any]:
        """The one rank's."""
        return self._group.gather(word)


def collectives(setting: Setting) -> Figures:
    """One rank of NCCL (gloo on a CPU): sums and words come back, and a step through them equals a step without."""
    cluster = ClusterConfig(device=setting.device.type, collective_timeout_s=60.0)  # type: ignore[arg-type]
    group = ProcessGroup(cluster, rank=0, size=1, store=setting.folder / "meeting-point")
    try:
        numbers = setting.normal((1 << 12) if setting.tiny else (1 << 28), seed=0)
        wanted = numbers.clone()
        group.sum_(numbers)
        require(torch.equal(numbers, wanted), "the sum over one rank changed the numbers")
        word = {"loss": math.inf, "names": ["a", "ü"]}
        require(group.gather(word) == [word], "a word came back changed")
        spent_s = setting.seconds(lambda: group.sum_(numbers), repeats=5)
        figures: Figures = {"sum_gb_per_s": numbers.numel() * 4 / spent_s / 1e9, "gather_ms": 1e3 * _gather_s(group)}
        return figures | {"flat_step_off": _flat_step(setting, group)}
    finally:
        group.close()


def _gather_s(group: ProcessGroup) -> float:
    begin_s = time.perf_counter()
    for _ in range(10):
        group.gather({"a": 1})
    return (time.perf_counter() - begin_s) / 10


def _flat_step(setting: Setting, group: ProcessGroup) -> float:
    """Relative difference of the weights after two steps, with gradients in one flat buffer and without."""
    config = published(tiny=True)
    expected = config.target.expected
    assert expected is not None
    head = random_head(setting, vocabulary=expected.vocab_size, width=expected.hidden_size)
    found = []
    for ranks in (_Several(group), Alone()):
        drafter = new_drafter(setting, config.drafter, target_hidden_size=expected.hidden_size, attention="chunked")
        stepper = new_stepper(setting, config, drafter, head, group=ranks)
        for seed in (1, 2):
            stepper.accumulate(random_features(setting, config, fullest(config), seed=seed))
            stepper.update(lr=LR, norm_limit=math.inf)
        found.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    off = float((found[0] - found[1]).norm() / found[1].norm())
    require(off <= FLAT_TOLERANCE, f"weights differ by {off:.2g}")
    return off
