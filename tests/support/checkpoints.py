"""Small checkpoints for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash.checkpoint import CheckpointContent, RunIdentity, save_checkpoint
from dflash.records import CheckpointManifest, CheckpointState, LedgerEntry, TrainerState

IDENTITY = RunIdentity(data_fingerprint="d" * 64, target_fingerprint="t" * 64, mask_token_id=3)


def state_at(step: int, *, segment: int = 0) -> TrainerState:
    return TrainerState(
        step=step,
        plan_position=2 * step,
        segment=segment,
        plan_sha256="p" * 64,
        config_sha256="c" * 64,
        seed=1,
        total_steps=100,
        skipped_positions=(),
        overlay=None,
        nonfinite_in_row=0,
    )


def tensors_at(step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Drafter and optimizer tensors that differ from step to step."""
    weights = {"fc.weight": torch.full((3, 2), float(step)), "norm.weight": torch.arange(5, dtype=torch.float32) + step}
    moments = {f"{name}.exp_avg": tensor * 0.5 for name, tensor in weights.items()}
    return weights, moments | {"fc.weight.step": torch.tensor(float(step))}


def content_at(step: int, *, segment: int = 0) -> CheckpointContent:
    weights, moments = tensors_at(step)
    return CheckpointContent(state=state_at(step, segment=segment), identity=IDENTITY, drafter=weights, optimizer=moments)


def save_at(directory: Path, step: int, *, segment: int = 0) -> CheckpointManifest:
    return save_checkpoint(
        directory, content_at(step, segment=segment), created_at="2026-01-01T00:00:00+00:00", on_operation=ignore
    )


def entry(step: int, state: CheckpointState, *, segment: int = 0) -> LedgerEntry:
    return LedgerEntry(step=step, segment=segment, state=state, at="2026-01-01T00:00:00+00:00", reason="test")


def ignore(_operation: str) -> None:
    """Watch nothing."""
