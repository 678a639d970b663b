"""The audit that a folder passes before it is published: what it holds, what it says, and that it drafts.

Invariant: an allow-list. A file that is not one of the few that a published drafter consists of is refused, so nothing in the
folder can be executed when it is loaded: no scripts, no pickles, no links, no keys that make a loader fetch code.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.errors import DrafterError
from dflash.model.export import import_drafter
from dflash.model.export_audit import audit_folder
from dflash.model.export_files import CONFIG_NAME, DTYPES, INDEX_NAME, WEIGHTS_NAME, read_json
from dflash.model.target_info import TargetInfo
from dflash.records import CheckResult

CARD_NAME = "README.md"
_ALLOWED = re.compile(
    rf"{re.escape(CONFIG_NAME)}|{re.escape(WEIGHTS_NAME)}|{re.escape(INDEX_NAME)}|{re.escape(CARD_NAME)}"
    r"|model-\d{5}-of-\d{5}\.safetensors"
)
_CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")
_MUST_BE_OK = ("config keys", "model type", "dtype", "block size", "window", "causal")
"""Warnings of the general audit that a folder of our own has no excuse for."""

_PATH = re.compile(r"(?<![\w./:\\~>-])(?:file:)?(?:~?/|[A-Za-z]:\\)[\w.@+-]+[/\\][\w.@+/\\-]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH)", re.IGNORECASE)
_LEAST_SECRET_LENGTH = 8


def check_folder(
    folder: Path, *, weights: Mapping[str, Tensor], target: TargetInfo, tables: Mapping[str, Tensor] | None
) -> tuple[CheckResult, ...]:
    """Everything that can be checked without decoding.

    Args:
        folder: to be published.
        weights: the checkpoint's, by our own names; they must be in the folder bit for bit, in the dtype of its file.
        target: that the drafter belongs to.
        tables: the target's embedding and head, where the layout stores copies.
    """
    results = [_files(folder), _no_code(folder)]
    if results[0].status == "fail":
        return tuple(results)
    for result in audit_folder(folder, target=target, tables=tables):
        severe = result.status == "warn" and result.name in _MUST_BE_OK
        results.append(CheckResult(result.name, "fail", result.message, result.remedy) if severe else result)
    if all(result.status != "fail" for result in results):
        results.append(_weights(folder, weights, tables))
    return tuple(results)


def require_passed(results: tuple[CheckResult, ...], folder: str) -> None:
    """Refuse a folder that failed.

    Raises:
        DrafterError: names every failed check.
    """
    failed = [f"{result.name}: {result.message}" for result in results if result.status == "fail"]
    if failed:
        raise DrafterError(f"{folder} fails its audit: {'; '.join(failed)}", remedy="publish again from an intact checkpoint")


def require_private(folder: Path, environment: Mapping[str, str], places: tuple[Path, ...]) -> None:
    """Refuse a folder whose texts tell a local path or a secret of this environment.

    Args:
        folder: to be published.
        environment: values of variables whose names speak of secrets must not occur.
        places: folders of this machine that must not occur either, wherever in a line.

    Raises:
        DrafterError: names the file and what kind of thing it is, never the secret.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in (".md", ".json"):
            text = file.read_text(encoding="utf-8")
            for found in _private(text + text.replace("\\", ""), environment, places):  # once without Markdown's backslashes
                raise DrafterError(
                    f"{file.name} would tell {found}", remedy="name target and files without it (publish.base_model, data.sources)"
                )


def _private(text: str, environment: Mapping[str, str], places: tuple[Path, ...]) -> Iterator[str]:
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET_LENGTH and value in text:
            yield f"the value of the environment variable {name}"
    for place in places:
        if len(place.parts) > 2 and str(place) in text:
            yield f"the local path {place}"
    found = _PATH.search(text)
    if found is not None:
        yield f"the local path {found.group()}"


def is_published_file(path: Path) -> bool:
    """Whether a published drafter may consist of it: by its name, and because it is a file and no link."""
    return _ALLOWED.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _files(folder: Path) -> CheckResult:
    entries = sorted(folder.iterdir())
    executable = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
    strange = [path.name for path in entries if not is_published_file(path) or path.stat().st_mode & executable]
    if strange:
        return CheckResult("files", "fail", f"no part of a published drafter: {', '.join(strange[:8])}", "remove them")
    return CheckResult("files", "ok", "configuration, safetensors and card only; nothing that could be executed", "")


def _no_code(folder: Path) -> CheckResult:
    found = sorted(_keys(read_json(folder / CONFIG_NAME)) & set(_CODE_KEYS))
    if found:
        return CheckResult("code", "fail", f"{CONFIG_NAME} has {', '.join(found)}: loaders would run code for it", "remove the key")
    return CheckResult("code", "ok", "no key makes a loader fetch or run code", "")


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in _keys(item)}
    return {key for item in value for key in _keys(item)} if isinstance(value, list) else set()


def _weights(folder: Path, weights: Mapping[str, Tensor], tables: Mapping[str, Tensor] | None) -> CheckResult:
    imported = import_drafter(folder, tables=tables)
    stored, dtype = imported.drafter.state_dict(), DTYPES[imported.dtype]
    wrong = [name for name in weights if name not in stored or not torch.equal(stored[name], weights[name].to(dtype))]
    wrong += [name for name in stored if name not in weights]
    if wrong:
        return CheckResult("weights", "fail", f"not the checkpoint's: {', '.join(wrong[:8])}", "export the checkpoint again")
    return CheckResult("weights", "ok", f"{len(stored)} tensors, bit for bit the checkpoint's as {imported.dtype}", "")
