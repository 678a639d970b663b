"""Our training step for `train_step.py`: its own anchors, labels, drafter, loss and optimizer; `end_to_end.py` uses the drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.step_setting import CLIP_NORM, GAMMA, LR, MASK_ID, Inputs, Setting
from dflash.config import AnchorConfig, DrafterConfig, LossConfig, OptimizerConfig
from dflash.model.anchors import AnchorSet, block_labels, block_token_ids, sample_anchors
from dflash.model.backends import choose_attention
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.logit_rule import LogitRule
from dflash.model.loss import LossSums, block_loss
from dflash.train.optimizer import build_optimizer


def our_drafter(setting: Setting, weights: dict[str, Tensor]) -> Drafter:
    """Our drafter of a setting's shape with the given weights, and the attention that we choose on a CPU."""
    config = DrafterConfig(
        num_hidden_layers=setting.layers,
        hidden_size=setting.width,
        intermediate_size=setting.intermediate,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.key_heads,
        head_dim=setting.head_dim,
        block_size=setting.block_size,
        target_layer_ids=setting.taps,
        rope_theta=setting.rope_theta,
        rms_norm_eps=setting.eps,
    )
    drafter = Drafter(config, target_hidden_size=setting.width)
    drafter.load_state_dict(weights)
    drafter.attention = choose_attention(config, wanted="auto", device=torch.device("cpu"), dtype=torch.float32).backend
    return drafter


class OurStep:
    """One step: draw, embed, forward, loss, backward, clip, update."""

    def __init__(self, setting: Setting, inputs: Inputs) -> None:
        self._setting, self._inputs = setting, inputs
        self.model = our_drafter(setting, inputs.weights)
        self._optimizer = build_optimizer(self.model, OptimizerConfig(), lr=LR)
        self._loss = LossConfig(objective="decay", gamma=GAMMA)
        self._rule = AnchorConfig(per_supervised_token=1.0, max_per_sequence=setting.anchors, max_per_batch=10**6)
        self._mask = torch.ones_like(inputs.ids, dtype=torch.bool)
        self._lengths = torch.full((setting.batch,), setting.tokens)
        self._head = FrozenHead(inputs.head, LogitRule(scale=1.0, soft_cap=None))
        self._count = 0

    def step(self) -> None:
        """A whole training step on freshly drawn anchors."""
        self._count += 1
        drawn = sample_anchors(self._mask, self._lengths, anchors=self._rule, seed=0, epoch=0, batch_id=self._count)
        sums = self._backward(drawn)
        weight = float(sums.objective_weight)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / weight
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP_NORM / norm) / weight)
        self._optimizer.step()

    def release(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Mean loss and its gradient at the stated anchors."""
        positions = self._inputs.anchors
        sums = self._backward(AnchorSet(positions, torch.ones_like(positions, dtype=torch.bool)))
        weight = float(sums.objective_weight)
        found = {name: parameter.grad / weight for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        return float(sums.objective_sum.detach()) / weight, found

    def _backward(self, drawn: AnchorSet) -> LossSums:
        ids, block_size = self._inputs.ids, self._setting.block_size
        labels = block_labels(ids, self._mask, self._lengths, drawn, block_size=block_size)
        tokens = block_token_ids(ids, drawn, block_size=block_size, mask_token_id=MASK_ID)
        embeds = torch.nn.functional.embedding(tokens, self._inputs.embedding)
        hidden = self.model(self._inputs.features, embeds, drawn.positions, drawn.keep)
        sums = block_loss(hidden, labels, drawn.keep, self._head, loss=self._loss, target=None)
        sums.objective_sum.backward()
        return sums
