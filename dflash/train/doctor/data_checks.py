"""Checks of the run's data set against the configuration: who wrote it, how it was rendered, and for which target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash.config import Config
from dflash.records import CheckResult, DataManifest

SHOWN_CHARS, SHA256_CHARS = 12, 64


@dataclass(frozen=True, slots=True)
class Expected:
    """What a data set must say, from the configuration and the target that is here."""

    tokenizer_sha256: str
    template_sha256: str
    template_flags: Mapping[str, Any]
    target_fingerprint: str
    vocab_size: int
    mask_token_id: int


def judge_manifest(manifest: DataManifest, expected: Expected) -> CheckResult:
    """Compare a data set's provenance with what training and evaluation will use; every difference is named."""
    differences = [
        f"{key}: data set {_shown(getattr(manifest, key))}, here {_shown(getattr(expected, key))}"
        for key in ("tokenizer_sha256", "template_sha256", "template_flags", "vocab_size", "mask_token_id")
        if getattr(manifest, key) != getattr(expected, key)
    ]
    if manifest.on_policy and manifest.target_fingerprint != expected.target_fingerprint:
        differences.append(
            f"target_fingerprint: answers by {_shown(manifest.target_fingerprint)}, here {_shown(expected.target_fingerprint)}"
        )
    if differences:
        return CheckResult(
            "data set", "fail", "; ".join(differences), "prepare the data again with this target, tokenizer and template flags"
        )
    if not manifest.on_policy:
        return CheckResult(
            "data set",
            "warn",
            f"{manifest.samples} samples whose answers were not written by this target",
            "let the target write them (data.answers.regenerate), or make sure that its own engine did",
        )
    return CheckResult(
        "data set", "ok", f"{manifest.samples} samples, tokenizer, template, flags, target and mask token are this target's", ""
    )


def longest_sequence_tokens(config: Config) -> int:
    """Longest sequence that is trained, the overhang of its last block included."""
    return config.data.longest_sample_tokens + config.drafter.block_size


def _shown(value: object) -> str:
    text = str(value)
    return text[:SHOWN_CHARS] if len(text) == SHA256_CHARS else text
