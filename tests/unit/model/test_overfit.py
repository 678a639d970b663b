"""Everything together: a drafter that is trained on one text must then draft that text."""

from __future__ import annotations

import pytest
import torch
from model_fixtures import drafter_config, sliding_config, tiny_drafter, tiny_target

from dflash.config import AnchorConfig, DrafterConfig, LossConfig
from dflash.model.acceptance import TargetStates
from dflash.model.anchors import block_labels, block_token_ids, sample_anchors
from dflash.model.generate import generate_batch
from dflash.model.head import FrozenHead
from dflash.model.loss import block_loss

MASK = 60
ANCHORS = AnchorConfig(per_supervised_token=0.5, max_per_sequence=12, max_per_batch=24)


@pytest.mark.parametrize(
    ("config", "objective"),
    [
        pytest.param(drafter_config(), "decay", id="full-decay"),
        pytest.param(drafter_config(), "dpace", id="full-dpace"),
        pytest.param(drafter_config(), "acceptance", id="full-acceptance"),
        pytest.param(sliding_config(), "decay", id="sliding-decay"),
        pytest.param(sliding_config(), "dpace", id="sliding-dpace", marks=pytest.mark.full),  # each is tried with another above
    ],
)
def test_overfitting_one_answer_makes_the_drafts_right(config: DrafterConfig, objective: str) -> None:
    """Labels, positions, visibility, embedding, head and decoding all have to agree for this to work."""
    target = tiny_target("qwen3")
    prompt = [3, 44, 17, 9]
    # The acceptance objective learns the target's distribution, so the text to draft is its likeliest, and near ties remain.
    temperature, steps, wanted = (0.0, 300, 0.8) if objective == "acceptance" else (1.0, 120, 0.9)
    arguments = {"keys": ["only"], "max_new_tokens": 36, "temperature": temperature, "seed": 0, "stop_ids": ()}
    (answer,) = generate_batch(target, [prompt], **arguments)
    ids = torch.tensor([prompt + answer])
    lengths = torch.tensor([ids.shape[1]])
    mask = torch.arange(ids.shape[1]).unsqueeze(0) >= len(prompt)
    features, final = target.features_with_final(ids, lengths)
    head = FrozenHead(target.head_weight, target.logit_rule)
    drafter = tiny_drafter(config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    loss = LossConfig(objective=objective, gamma=4.0, alpha=0.5)
    means = []
    for step in range(steps):
        anchors = sample_anchors(mask, lengths, anchors=ANCHORS, seed=0, epoch=0, batch_id=step)
        labels = block_labels(ids, mask, lengths, anchors, block_size=config.block_size)
        tokens = block_token_ids(ids, anchors, block_size=config.block_size, mask_token_id=MASK)
        hidden = drafter(features, target.embed(tokens), anchors.positions, anchors.keep)
        states = TargetStates(final, anchors.positions)
        sums = block_loss(hidden, labels, anchors.keep, head, loss=loss, target=states)
        optimizer.zero_grad()
        (sums.objective_sum / sums.objective_weight).backward()
        optimizer.step()
        means.append(float(sums.objective_sum.detach() / sums.objective_weight))
    assert means[-1] < 0.1 < means[0]
    cache, held, accepted, drafted = drafter.new_cache(), 0, 0, 0
    for start in range(len(prompt), ids.shape[1] - config.block_size):
        block = torch.full((1, config.block_size), MASK)
        block[0, 0] = ids[0, start]
        hidden = drafter.draft(target.embed(block), features[:, held:start], cache, start)
        held = start
        drafts = target.logits(hidden).argmax(-1)[0, 1:]
        right = (drafts == ids[0, start + 1 : start + config.block_size]).to(torch.uint8).cumprod(0)
        accepted, drafted = accepted + int(right.sum()), drafted + len(drafts)
    assert accepted / drafted > wanted
