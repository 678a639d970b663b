"""What a model does to its head's output: a scale (Cohere, Granite, Falcon-H1), a soft cap (Gemma), or nothing.

Invariant: a rule is taken from the config's names but believed only after it reproduces the model's own logits on a probe. Argmax
does not notice scales or caps; every loss and every sampling on the target's or the drafter's distribution does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_multiplier", "output_multiplier")
CAP_NAMES = ("final_logit_softcapping",)
TOLERANCE_FRAC = 2e-2
"""Largest difference from the model's own logits, as a share of the largest: bfloat16 rounds by 4e-3."""


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap * tanh(scale * head / cap), or scale * head without a cap.

    Attributes:
        scale: factor on the head's output.
        soft_cap: bound of the logits, None for none.
    """

    scale: float
    soft_cap: float | None

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits from its head's output, any shape."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.soft_cap is None else torch.tanh(scaled / self.soft_cap) * self.soft_cap


def find_logit_rule(text_config: Any, *, head_output: Tensor, logits: Tensor) -> LogitRule | None:
    """The rule that turns a head's output into the model's logits, or None if none of the known ones does.

    Args:
        text_config: the text model's config.
        head_output: [B, n, V], the bare product with the head.
        logits: [B, n, V], what the model returns for the same positions.
    """
    numbers = [float(value) for name in SCALE_NAMES if (value := getattr(text_config, name, None))]
    caps = [float(value) for name in CAP_NAMES if (value := getattr(text_config, name, None))]
    scales = [1.0, *numbers, *(1.0 / number for number in numbers)]
    wanted = logits.float()
    limit = TOLERANCE_FRAC * max(float(wanted.abs().max()), 1e-30)
    best: tuple[float, LogitRule | None] = (limit, None)
    for scale, cap in itertools.product(scales, [None, *caps]):
        rule = LogitRule(scale, cap)
        distance = float((rule.apply(head_output.float()) - wanted).abs().max())
        if distance < best[0] or (distance == 0.0 == best[0] and best[1] is None):
            best = (distance, rule)
    return best[1]
