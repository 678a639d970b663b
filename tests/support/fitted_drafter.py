"""A drafter that is fitted to a few answers within a second or two: some of its drafts are accepted, some are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash.config import DrafterConfig, LossConfig
from dflash.model.anchors import AnchorSet, block_labels, block_token_ids
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.loss import block_loss
from dflash.model.target import Target


def fitted_drafter(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, config: DrafterConfig, mask_token_id: int, steps: int
) -> Drafter:
    """Fit a drafter to (prompt, answer) pairs, all anchors of all answers at every step."""
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in texts])
    ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(texts):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : lengths[row]] = True
    candidates = mask[:, :-1] & mask[:, 1:]
    count = int(candidates.sum(1).min())
    anchors = AnchorSet(torch.stack([row.nonzero().squeeze(1)[:count] for row in candidates]), torch.ones(len(ids), count).bool())
    drafter = Drafter(config, target_hidden_size=target.info.hidden_size)
    drafter.init_weights(1)
    features = target.features(ids, lengths)
    labels = block_labels(ids, mask, lengths, anchors, block_size=config.block_size)
    embeds = target.embed(block_token_ids(ids, anchors, block_size=config.block_size, mask_token_id=mask_token_id))
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=5e-3, weight_decay=0.0)
    head = FrozenHead(target.head_weight, target.logit_rule)
    for _ in range(steps):
        sums = block_loss(drafter(features, embeds, *anchors), labels, anchors.keep, head, loss=LossConfig(gamma=4.0), target=None)
        (sums.objective_sum / sums.objective_weight).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()
