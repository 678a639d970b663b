"""The quick pre-flight: what a configuration needs, and whether this machine has it, in a second and before anything is written.

Invariant: every check reads only; a failure is the same error, with the same remedy, that the run itself would end with
later. No weights are loaded: what needs them is examined afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from dflash.config import Config
from dflash.config.model import GGUF_SUFFIX
from dflash.errors import DataError, DeviceError, DflashError, PreflightError, TargetError
from dflash.model.target_info import check_drafter_fits, read_target_info, resolve_folder
from dflash.records import CheckResult
from dflash.train.doctor.data_checks import longest_sequence_tokens
from dflash.train.doctor.describe import devices_text, parameters_text
from dflash.train.doctor.machine import disk_check, memory_check
from dflash.train.doctor.target_checks import judge_rope
from dflash.train.warm_start import check_warm_start

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def check_devices(config: Config) -> None:
    """Refuse a configuration that asks for more GPUs than this machine has.

    Raises:
        DeviceError: too few CUDA devices.
    """
    needed = config.cluster.devices_per_node
    found = torch.cuda.device_count()
    if needed > found:
        cluster = config.cluster
        raise DeviceError(
            f"configuration asks for {needed} CUDA devices a machine ({cluster.replicas_per_node} x "
            f"({cluster.targets_per_replica} + 1), replicas x (targets + 1)), this machine has {found}",
            remedy="run it on a machine with enough GPUs, lower cluster.targets_per_replica, let a replica's roles share one GPU "
            "(cluster.share_device=true), or set cluster.device=cpu",
        )


def run_checks(config: Config) -> tuple[CheckResult, ...]:
    """Every quick check against this machine; failures are results, not exceptions."""
    return tuple(guarded(name, lambda check=check: check(config)) for name, check in PREFLIGHT.items())  # type: ignore[misc]


def require_ready(config: Config) -> None:
    """Run every quick check and raise the first failure.

    Raises:
        DflashError: of the kind that the failure belongs to.
    """
    for name, check in PREFLIGHT.items():
        result = check(config)
        if result.status == "fail":
            raise PreflightError(f"{name}: {result.message}", remedy=result.remedy)


def guarded(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    """The check's result, or its error as one."""
    try:
        return check()
    except DflashError as error:
        return CheckResult(name, "fail", error.what, error.remedy)
    except OSError as error:
        return CheckResult(name, "fail", f"{type(error).__name__}: {error}", "check the permissions and the kind of this path")


def weights_are_here(config: Config) -> bool:
    """Whether the target's folder lies on this machine."""
    return Path(config.target.location).is_dir()


def _devices_check(config: Config) -> CheckResult:
    check_devices(config)
    return CheckResult("devices", "ok", devices_text(config), "")


def _target_check(config: Config) -> CheckResult:
    if config.target.gguf_file is not None:
        resolve_folder(config.target)  # converted once; everything else then finds an ordinary folder
    location = config.target.location
    if not weights_are_here(config):
        if not HUB_NAME.match(location) or location.endswith(GGUF_SUFFIX):
            raise TargetError(
                f"target folder {location} does not exist",
                remedy="fetch it first (python -m dflash data fetch-target smollm2), or correct target.path",
            )
        return CheckResult(
            "target", "warn", f"{location} is no folder here: it will be asked from the hub", "download it before the run"
        )
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    return CheckResult("target", "ok", f"{info.model_type}, {parameters_text(info.num_parameters)} parameters at {location}", "")


def _rope_check(config: Config) -> CheckResult:
    if not weights_are_here(config):
        return CheckResult("rope", "skip", "the target's config is not on this machine", "")
    info = read_target_info(config.target)
    longest = longest_sequence_tokens(config)
    return judge_rope(
        config.drafter, rope_theta=info.rope_theta, target_positions=info.max_position_embeddings, longest_tokens=longest
    )


def _inputs_check(config: Config) -> CheckResult:
    data, evaluate = config.data, config.evaluate
    named = [("data.files", file) for file in data.files if data.source == "files"]
    named += [("evaluate.files", file) for file in evaluate.files if evaluate.source == "files"]
    named += [("evaluate.sets", each.file) for each in evaluate.sets if each.file is not None]
    for key, file in named:
        if "://" not in file and not _exists(file):
            example = "{name: mine, file: path/to/file.jsonl}" if key == "evaluate.sets" else "path/to/file.jsonl"
            raise DataError(
                f"{key} names {file!r}, which does not exist",
                remedy=f"give your own JSONL of prompts or conversations: '{key}=[{example}]'",
            )
    found = f"{len(named)} file(s) named" if named else "written by the seeded generator"
    if config.train.init_from is not None:
        check_warm_start(Path(config.train.init_from), config.drafter)
        found += f"; the drafter starts from {config.train.init_from}"
    return CheckResult("inputs", "ok", found, "")


def _exists(pattern: str) -> bool:
    """Whether a file or a glob names at least one file here."""
    path = Path(pattern)
    if not any(mark in pattern for mark in "*?["):
        return path.is_file()
    return next(Path(path.anchor).glob(str(path.relative_to(path.anchor))), None) is not None


PREFLIGHT: dict[str, Callable[[Config], CheckResult]] = {
    "devices": _devices_check,
    "target": _target_check,
    "rope": _rope_check,
    "inputs": _inputs_check,
    "memory": memory_check,
    "disk": disk_check,
}
