"""The examination: every check that this machine allows, in order, each with its own result.

Invariant: a check that cannot be made here says why and is `skip`, never `ok`; an error of ours inside a check is its failure
and not the end of the others. Nothing is left behind: the loaded target is let go before the function returns.
Hard decision: two parts. `start` needs no data set and is the first step of a flow, before hours of answers are written;
`data` needs the run's data set and plan and comes right before training.
The price on the demo: 0.5 s for `start` and 0.4 s for `data`; elsewhere loading the target twice and the overfit's time limit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch

from dflash.config import Config
from dflash.data.tokenizer import load_tokenizer, resolve_mask_token_id, template_sha256, token_ids, tokenizer_sha256
from dflash.errors import DflashError
from dflash.model.backends import choose_attention
from dflash.model.target import Target, load_target
from dflash.model.target_info import TargetInfo, read_target_info
from dflash.records import CheckResult, RunPaths
from dflash.train.doctor.alignment import alignment_checks, feature_maker, first_batch
from dflash.train.doctor.backends import attention_check
from dflash.train.doctor.data_checks import Expected, judge_manifest
from dflash.train.doctor.leak import leak_check
from dflash.train.doctor.machine import clock_check, sockets_check, storage_check
from dflash.train.doctor.preflight import guarded, run_checks, weights_are_here
from dflash.train.doctor.report import DoctorReport
from dflash.train.doctor.spot import spot_batch
from dflash.train.doctor.target_checks import judge_mask_token, taps_check, vocabulary_check
from dflash.train.inputs import Inputs, open_inputs

Part = Literal["start", "data"]

_NEED_TARGET: dict[Part, tuple[str, ...]] = {
    "start": ("taps", "mask token", "vocabulary"),
    "data": ("data set", "labels", "overfit"),
}
SPECIAL_ROLES = ("pad", "eos", "unk", "bos")
LARGE_CPU_PARAMETERS = 4_000_000_000
"""Targets above this are not loaded on a CPU for an examination."""


def examine(config: Config, *, parts: tuple[Part, ...], paths: RunPaths | None, overfit_limit_s: float) -> DoctorReport:
    """Run every check of the chosen parts.

    Args:
        config: resolved configuration.
        parts: `start` looks at machine, target and drafter; `data` at the run's data set.
        paths: a prepared run; None where there is none, and the data set is not looked at.
        overfit_limit_s: how long one batch may be learnt.

    Returns:
        All results.
    """
    begin_s = time.monotonic()
    results: list[CheckResult] = []
    if "start" in parts:
        results += run_checks(config)
        for name, check in (("storage", storage_check), ("clock", clock_check), ("ports", sockets_check)):
            results.append(guarded(name, lambda check=check: check(config)))  # type: ignore[misc]
        results += _drafter_checks(config)
    failed = any(result.status == "fail" for result in results)
    reason = _cannot_load(config, failed=failed)
    if reason:
        results += _skipped(parts, reason)
    else:
        results += _with_target(config, parts, paths, overfit_limit_s)
    return DoctorReport(tuple(results), time.monotonic() - begin_s)


def _drafter_checks(config: Config) -> Iterator[CheckResult]:
    """Backend and leak test, on random weights of the drafter."""
    device = _drafter_device(config)
    width = config.target.expected.hidden_size if config.target.expected is not None else config.drafter.hidden_size
    try:
        choice = choose_attention(
            config.drafter, wanted=config.train.attention, device=device, dtype=_compute_dtype(config, device)
        )
    except DflashError as error:
        yield CheckResult("attention", "fail", error.what, error.remedy)
        return
    seed = config.run.seed
    yield _own_errors("attention", lambda: attention_check(config.drafter, choice=choice, device=device, seed=seed))
    yield _own_errors(
        "leak test",
        lambda: leak_check(config.drafter, target_hidden_size=width, attention=choice.backend, device=device, seed=seed),
    )


def _drafter_device(config: Config) -> torch.device:
    """Where the first replica's drafter trains; the CPU where the configured GPUs are not here."""
    if config.cluster.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", min(config.cluster.devices_per_replica, torch.cuda.device_count()) - 1)


def _compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return named.get(config.train.compute_dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)


def _with_target(config: Config, parts: tuple[Part, ...], paths: RunPaths | None, overfit_limit_s: float) -> Iterator[CheckResult]:
    device = torch.device(config.cluster.device)
    try:
        target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=device)
    except DflashError as error:
        yield CheckResult("taps", "fail", error.what, error.remedy)
        return
    except torch.OutOfMemoryError:
        remedy = "end what else runs on this device, or choose a smaller target or another dtype"
        yield CheckResult("taps", "fail", f"the target does not fit on {device}", remedy)
        return
    if "start" in parts:
        yield from _target_checks(config, target)
    if "data" in parts:
        yield from _data_part(config, target, paths, overfit_limit_s)
    del target
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _skipped(parts: tuple[Part, ...], reason: str) -> Iterator[CheckResult]:
    """What needs the loaded target, and why it is not looked at."""
    for part, names in _NEED_TARGET.items():
        if part in parts:
            yield from (CheckResult(name, "skip", reason, "") for name in names)


def _cannot_load(config: Config, *, failed: bool) -> str:
    """Why the target is not loaded here; empty if it is."""
    if not weights_are_here(config):
        return f"the weights of {config.target.path} are not on this machine"
    if failed:
        return "not looked at: mend what failed above first"
    if config.cluster.device == "cuda":
        return "" if torch.cuda.is_available() else "there is no GPU here"
    parameters = read_target_info(config.target).num_parameters
    return f"{parameters / 1e9:.0f} B parameters are too many to load on a CPU" if parameters > LARGE_CPU_PARAMETERS else ""


def _target_checks(config: Config, target: Target) -> Iterator[CheckResult]:
    yield _own_errors("taps", lambda: taps_check(target, layer_ids=config.drafter.target_layer_ids, seed=config.run.seed))
    yield _own_errors("mask token", lambda: _mask_check(config, target, uses_in_data=None))
    yield _own_errors("vocabulary", lambda: _vocabulary(config, target))


def _mask_check(config: Config, target: Target, *, uses_in_data: int | None) -> CheckResult:
    tokenizer = load_tokenizer(config.target)
    mask_id = resolve_mask_token_id(config.target, tokenizer, vocab_size=target.info.vocab_size)
    special = {role: token_ids(getattr(tokenizer, f"{role}_token_id")) for role in SPECIAL_ROLES}
    row = target.embed(torch.tensor([mask_id], device=target.device))[0]
    return judge_mask_token(mask_id, special=special, row=row, uses_in_data=uses_in_data)


def _vocabulary(config: Config, target: Target) -> CheckResult:
    return vocabulary_check(target, tokenizer_size=len(load_tokenizer(config.target)), manifest_vocab_size=None)


def _data_part(config: Config, target: Target, paths: RunPaths | None, overfit_limit_s: float) -> Iterator[CheckResult]:
    if paths is None or not paths.data_pointer.is_file():
        remedy = "prepare one, or name a run's folder (--run RUN); labels are checked on prompts answered on the spot"
        yield CheckResult("data set", "skip", "no run of this configuration has a data set yet", remedy)
        yield from _own_results("labels", lambda: _spot_checks(config, target, overfit_limit_s))
        return
    try:
        inputs = open_inputs(config, paths)
    except DflashError as error:
        yield CheckResult("data set", "fail", error.what, error.remedy)
        return
    with inputs.store:
        yield _own_errors("data set", lambda: judge_manifest(inputs.store.manifest, _expected(config, target.info)))
        yield from _own_results("labels", lambda: _batch_checks(config, target, inputs, overfit_limit_s))


def _spot_checks(config: Config, target: Target, overfit_limit_s: float) -> tuple[CheckResult, ...]:
    tokenizer = load_tokenizer(config.target)
    mask_id = resolve_mask_token_id(config.target, tokenizer, vocab_size=target.info.vocab_size)
    batch = spot_batch(config, target)
    maker = feature_maker(config, target, mask_token_id=mask_id, drafter_device=_drafter_device(config))
    return alignment_checks(maker, batch, time_limit_s=overfit_limit_s)


def _batch_checks(config: Config, target: Target, inputs: Inputs, overfit_limit_s: float) -> tuple[CheckResult, ...]:
    batch = first_batch(inputs)
    manifest = inputs.store.manifest
    real = np.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]
    uses = manifest.mask_token_uses + int(((batch.input_ids == manifest.mask_token_id) & real).sum())
    mask = _mask_check(config, target, uses_in_data=uses)
    maker = feature_maker(config, target, mask_token_id=manifest.mask_token_id, drafter_device=_drafter_device(config))
    return (mask, *alignment_checks(maker, batch, time_limit_s=overfit_limit_s))


def _expected(config: Config, info: TargetInfo) -> Expected:
    tokenizer = load_tokenizer(config.target)
    return Expected(
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        template_sha256=template_sha256(tokenizer),
        template_flags=config.data.template_flags,
        target_fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        mask_token_id=resolve_mask_token_id(config.target, tokenizer, vocab_size=info.vocab_size),
    )


def _own_errors(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    return _own_results(name, lambda: (check(),))[0]


def _own_results(name: str, check: Callable[[], tuple[CheckResult, ...]]) -> tuple[CheckResult, ...]:
    """The results, or what went wrong in the check, as a failure: one broken library must not hide the other findings."""
    try:
        return check()
    except DflashError as error:
        return (CheckResult(name, "fail", error.what, error.remedy),)
    except torch.OutOfMemoryError:
        message = "does not fit beside the loaded target on this device"
        return (CheckResult(name, "skip", message, "nothing: the memory plan above tells whether the training fits"),)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, OSError) as error:
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return (CheckResult(name, "fail", message, "the check itself could not run; the training would meet the same error"),)
