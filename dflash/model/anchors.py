"""Anchors: where the trained blocks of a batch begin, and what their slots must predict.

Invariant: the draw depends on (seed, epoch, batch id) alone, never on a stateful generator, so a resume or another number
of targets draws the same anchors. Slot k of the block anchored at a predicts token a+k, slot 0 is given, and a block stops
being supervised at its first unsupervised token. Blocks may overhang the end of a sequence: a rule that the whole block must
fit would never train the last K-1 tokens of an answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.config import AnchorConfig


class AnchorSet(NamedTuple):
    """Anchors of a batch.

    Attributes:
        positions: [B, N] int64, ascending in each row; padded slots repeat the row's last anchor (0 where it has none).
        keep: [B, N] bool, false in padded slots.
    """

    positions: Tensor
    keep: Tensor


class BlockLabels(NamedTuple):
    """What every slot must predict.

    Attributes:
        labels: [B, N, K] int64 token ids, 0 where not valid.
        valid: [B, N, K] bool, supervised slots; never slot 0.
    """

    labels: Tensor
    valid: Tensor


def sample_anchors(loss_mask: Tensor, lengths: Tensor, *, anchors: AnchorConfig, seed: int, epoch: int, batch_id: int) -> AnchorSet:
    """Draw anchors uniformly without replacement from the positions whose own and next token are supervised.

    Args:
        loss_mask: [B, S] bool on any device, supervised tokens.
        lengths: [B] tokens of each sequence.
        anchors: how many blocks a sequence and a batch train.
        seed: key of the draw, with the two below.
        epoch: 0-based.
        batch_id: position of the batch in the plan.

    Returns:
        Anchors on the mask's device, N = the largest count of a row (at least 1).
    """
    mask = loss_mask.cpu().numpy().astype(bool) & (np.arange(loss_mask.shape[1]) < lengths.cpu().numpy()[:, None])
    candidates = [np.flatnonzero(row[:-1] & row[1:]) for row in mask]
    counts = _counts(mask.sum(1), [len(row) for row in candidates], anchors)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, batch_id])))
    positions = np.zeros((len(mask), max(1, *counts)), dtype=np.int64)
    keep = np.zeros(positions.shape, dtype=bool)
    for row, (options, count) in enumerate(zip(candidates, counts, strict=True)):
        if count:
            chosen = np.sort(generator.choice(options, size=count, replace=False))
            positions[row], positions[row, :count], keep[row, :count] = chosen[-1], chosen, True
    device = loss_mask.device
    return AnchorSet(torch.from_numpy(positions).to(device), torch.from_numpy(keep).to(device))


def block_labels(input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, anchor_set: AnchorSet, *, block_size: int) -> BlockLabels:
    """Labels and supervision of every slot: keep * (a+k < length) * cumprod of the loss mask over a+1..a+k.

    Args:
        input_ids: [B, S].
        loss_mask: [B, S] bool.
        lengths: [B].
        anchor_set: [B, N].
        block_size: K.

    Returns:
        Labels and flags, each [B, N, K].
    """
    positions = anchor_set.positions.unsqueeze(-1) + torch.arange(block_size, device=input_ids.device)
    inside = positions < lengths[:, None, None]
    index = positions.clamp(max=input_ids.shape[1] - 1).flatten(1)
    labels = input_ids.gather(1, index).view_as(positions)
    supervised = loss_mask.gather(1, index).view_as(positions) & inside
    supervised[..., 0] = anchor_set.keep  # slot 0 opens the running product and is dropped from it below
    valid = supervised.to(torch.uint8).cumprod(-1).bool()
    valid[..., 0] = False
    return BlockLabels(labels.masked_fill(~valid, 0), valid)


def covered_tokens(labels: BlockLabels, anchor_set: AnchorSet, *, tokens: int) -> int:
    """How many of the batch's tokens some block is trained to predict, each counted once.

    Args:
        labels: [B, N, K].
        anchor_set: [B, N].
        tokens: S.

    Returns:
        Covered tokens; over the supervised tokens of the batch it is the coverage.
    """
    positions = anchor_set.positions.unsqueeze(-1) + torch.arange(labels.valid.shape[-1], device=labels.valid.device)
    positions = torch.where(labels.valid, positions, tokens).flatten(1)  # what is not trained falls into one column too many
    seen = torch.zeros((len(positions), tokens + 1), dtype=torch.bool, device=positions.device).scatter_(1, positions, value=True)
    return int(seen[:, :tokens].sum())


def block_token_ids(input_ids: Tensor, anchor_set: AnchorSet, *, block_size: int, mask_token_id: int) -> Tensor:
    """Input tokens of every block, [B, N, K]: the anchor's token, then masks."""
    shape = (*anchor_set.positions.shape, block_size)
    tokens = torch.full(shape, mask_token_id, dtype=input_ids.dtype, device=input_ids.device)
    tokens[..., 0] = input_ids.gather(1, anchor_set.positions)
    return tokens


def _counts(supervised: np.ndarray, available: list[int], anchors: AnchorConfig) -> list[int]:
    """Anchors of each sequence: in proportion to its supervised tokens, capped by sequence and by batch."""
    wanted = [
        min(math.ceil(anchors.per_supervised_token * int(tokens)), anchors.max_per_sequence, options)
        for tokens, options in zip(supervised, available, strict=True)
    ]
    total = sum(wanted)
    if total <= anchors.max_per_batch:
        return wanted
    # Largest remainders, so that the batch cap is met exactly and shares stay proportional.
    shares = [count * anchors.max_per_batch / total for count in wanted]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda row: (counts[row] - shares[row], row))
    for row in order[: anchors.max_per_batch - sum(counts)]:
        counts[row] += 1
    return counts
