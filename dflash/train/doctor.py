"""Pre-flight: what a configuration needs, and whether this machine has it, in seconds and before anything is written.

Invariant: every check reads only; a failure is the same error, with the same remedy, that the run itself would end with
later. `describe_config` looks at the configuration alone, so that a plan for eight GPUs can be read on a laptop.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from dflash.config import Config, section_hash
from dflash.errors import DataError, DeviceError, DflashError, StorageError, TargetError
from dflash.model.parameters import drafter_parameter_count
from dflash.model.target_info import check_drafter_fits, read_target_info
from dflash.train.memory import GB, DevicePlan, MemoryPlan, memory_plan, plan_payload, render_plan

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
HASH_CHARS = 12


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    name: str
    status: Literal["ok", "warn", "fail"]
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """A configuration in words, and the same as JSON-able values."""

    text: str
    payload: dict[str, Any]


def check_devices(config: Config) -> None:
    """Refuse a configuration that asks for more GPUs than this machine has.

    Raises:
        DeviceError: too few CUDA devices.
    """
    needed = config.cluster.devices_needed
    found = torch.cuda.device_count()
    if needed > found:
        cluster = config.cluster
        raise DeviceError(
            f"configuration asks for {needed} CUDA devices ({cluster.replicas} x ({cluster.targets_per_replica} + 1), replicas x "
            f"(targets + 1)), this machine has {found}",
            remedy="run it on a machine with enough GPUs, lower cluster.targets_per_replica, or set cluster.device=cpu",
        )


def run_checks(config: Config) -> tuple[CheckResult, ...]:
    """Every check against this machine; failures are results, not exceptions."""
    return tuple(_guarded(name, check, config) for name, check in _CHECKS.items())


def require_ready(config: Config) -> None:
    """Run every check and raise the first failure.

    Raises:
        DflashError: of the kind that the failure belongs to.
    """
    for check in _CHECKS.values():
        check(config)


def render_checks(results: tuple[CheckResult, ...]) -> str:
    """One line a check, and the remedy under what is not in order."""
    lines = []
    for result in results:
        lines.append(f"{result.status:<4}  {result.name}: {result.message}")
        if result.remedy:
            lines.append(f"      -> {result.remedy}")
    return "\n".join(lines)


def describe_config(config: Config) -> ConfigDescription:
    """A validated configuration's parameter counts, devices, batches and memory plan."""
    trainable = drafter_parameter_count(config.drafter, config.drafter.hidden_size)
    try:
        plan, reason = memory_plan(config), ""
    except TargetError as error:
        plan, reason = None, str(error)
    return ConfigDescription(
        text="\n".join(_description_lines(config, trainable, plan, reason=reason)),
        payload={
            "name": config.run.name,
            "config_sha256": section_hash(config),
            "trainable_parameters": trainable,
            "target_parameters": None if plan is None else plan.target.num_parameters,
            "devices_needed": config.cluster.devices_needed,
            "memory_plan": None if plan is None else plan_payload(plan),
        },
    )


def _description_lines(config: Config, trainable: int, plan: MemoryPlan | None, *, reason: str) -> list[str]:
    drafter, data, train = config.drafter, config.data, config.train
    lines = [f"configuration `{config.run.name}` is valid ({section_hash(config)[:HASH_CHARS]})", ""]
    if plan is not None:
        target = plan.target
        shape = f"{target.num_hidden_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}"
        lines.append(
            f"target   {config.target.path}: {_parameters(target.num_parameters)} frozen parameters, {shape} ({target.source})"
        )
    edges, taps = (", ".join(str(number) for number in numbers) for numbers in (data.bucket_edges_tokens, drafter.target_layer_ids))
    drafter_shape = f"{_many(drafter.num_hidden_layers, 'layer')}, hidden {drafter.hidden_size}, block size {drafter.block_size}"
    batches = f"{_many(train.accumulation_steps, 'micro-batch', 'es')} of at most {config.plan.tokens_per_batch} padded tokens"
    saves = f"a save every {config.checkpoint.interval_steps} steps"
    lines += [
        f"drafter  {_parameters(trainable)} trainable parameters ({trainable:,}): {drafter_shape}, taps {taps}",
        f"devices  {_devices(config)}",
        f"data     {data.source}, buckets up to {edges} tokens",
        f"step     {batches}, lr {train.lr:g} {train.schedule}, {saves}",
        "",
    ]
    if plan is None:
        return [*lines, f"no memory plan: {reason}"]
    verdict = {True: "every device fits", False: "SOME DEVICE DOES NOT FIT", None: "capacities are not all known"}[plan.fits]
    return [*lines, f"memory plan, upper estimate of steady training: {verdict}", render_plan(plan)]


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _many(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else plural}"


def _devices(config: Config) -> str:
    cluster = config.cluster
    targets = _many(cluster.targets_per_replica, "target")
    if cluster.device == "cpu":
        return f"CPU, shared by {targets} and the drafter, {_many(cluster.torch_threads, 'thread')} each"
    return f"{cluster.devices_needed} CUDA devices: {_many(cluster.replicas, 'replica')} x ({targets} + 1 drafter)"


def _guarded(name: str, check: Callable[[Config], CheckResult], config: Config) -> CheckResult:
    try:
        return check(config)
    except DflashError as error:
        return CheckResult(name, "fail", error.what, error.remedy)


def _devices_check(config: Config) -> CheckResult:
    check_devices(config)
    return CheckResult("devices", "ok", _devices(config), "")


def _target_check(config: Config) -> CheckResult:
    location = config.target.location
    if not Path(location).is_dir():
        if not HUB_NAME.match(location):
            raise TargetError(
                f"target folder {location} does not exist",
                remedy="fetch it first (python -m dflash data fetch-target smollm2), or correct target.path",
            )
        return CheckResult(
            "target", "warn", f"{location} is no folder here: it will be asked from the hub", "download it before the run"
        )
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    found = f"{info.model_type}, {_parameters(info.num_parameters)} parameters at {location}"
    if info.rope_theta is not None and info.rope_theta != config.drafter.rope_theta:
        return CheckResult(
            "target",
            "warn",
            f"drafter.rope_theta {config.drafter.rope_theta:g} differs from the target's {info.rope_theta:g}",
            f"set drafter.rope_theta={info.rope_theta:g}",
        )
    return CheckResult("target", "ok", found, "")


def _inputs_check(config: Config) -> CheckResult:
    data, evaluate = config.data, config.evaluate
    named = [("data", file) for file in data.files if data.source == "files"]
    named += [("evaluate", file) for file in evaluate.files if evaluate.source == "files"]
    for key, file in named:
        if "://" not in file and not Path(file).is_file():
            raise DataError(
                f"{key}.files names {file!r}, which does not exist",
                remedy=f"give your own JSONL of prompts or conversations: '{key}.files=[path/to/file.jsonl]'",
            )
    return CheckResult("inputs", "ok", f"{len(named)} file(s) named" if named else "written by the seeded generator", "")


def _memory_check(config: Config) -> CheckResult:
    plan = memory_plan(config)
    for place in plan.places:
        capacity = _capacity_bytes(place)
        if capacity is not None and place.total_bytes > capacity:
            raise DeviceError(
                f"{place.name} would have to hold {place.total_bytes / GB:.2f} GB, it has {capacity / GB:.2f} GB",
                remedy="lower plan.tokens_per_batch, train.anchors.max_per_batch or train.queues.feature_bytes",
            )
    largest = max(plan.places, key=lambda place: place.total_bytes)
    return CheckResult("memory", "ok", f"at most {largest.total_bytes / GB:.2f} GB ({largest.name})", "")


def _capacity_bytes(place: DevicePlan) -> int | None:
    """The smaller of what the configuration says and what this machine has; None if neither is known."""
    known = [] if place.capacity_bytes is None else [place.capacity_bytes]
    if place.on_host:
        known.append(psutil.virtual_memory().total)
    else:
        known += [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(known, default=None)


def _disk_check(config: Config) -> CheckResult:
    plan = memory_plan(config)
    folder = Path(config.run.root).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < plan.disk_bytes:
        raise StorageError(
            f"run.root {config.run.root} has {free / GB:.1f} GB free, checkpoints need {plan.disk_bytes / GB:.1f} GB",
            remedy="free some space, point run.root to a larger disk, or keep fewer checkpoints",
        )
    return CheckResult("disk", "ok", f"{free / GB:.1f} GB free, checkpoints need {plan.disk_bytes / GB:.2f} GB", "")


_CHECKS: dict[str, Callable[[Config], CheckResult]] = {
    "devices": _devices_check,
    "target": _target_check,
    "inputs": _inputs_check,
    "memory": _memory_check,
    "disk": _disk_check,
}
