"""The peers' training steps for `train_step.py`, on their own public classes; runs in the environment of `make bench-peers`.

Each peer is given the same weights, inputs, optimizer and clipping. SpecForge's only setting that matters here is
`objective_chunk_blocks` (its default 128, 0 = everything at once, 8 = its leanest documented use); speculators trains one
packed sequence, so the batch's rows follow each other as documents, and its labels are the target's argmax, so the target's
last state is made to say the text itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step_setting import CLIP_NORM, GAMMA, LR, MASK_ID, Inputs, Setting, decay_weights, draw_anchors


def peer(system: str, setting: Setting, inputs: Inputs) -> _PeerStep:
    """A peer by name: `specforge`, `specforge_0`, `specforge_8` or `speculators`."""
    if system == "speculators":
        return SpeculatorsStep(setting, inputs)
    chunk = {"specforge": 128, "specforge_0": 0, "specforge_8": 8}[system]
    return SpecForgeStep(setting, inputs, chunk_blocks=chunk)


class _PeerStep:
    """Optimizer, clipping and gradients, alike for both."""

    model: nn.Module
    loss_scale: float = 1.0

    def step(self) -> None:
        """A whole training step on freshly drawn anchors."""
        self.loss(None).backward()
        nn.utils.clip_grad_norm_(self._parameters(), CLIP_NORM)
        self.optimizer.step()

    def release(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Mean loss and its gradient at the stated anchors, in this project's scale."""
        loss = self.loss(self.inputs.anchors)
        loss.backward()
        found = {
            name: parameter.grad * self.loss_scale
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        return float(loss.detach()) * self.loss_scale, found

    def loss(self, anchors: Tensor | None) -> Tensor:
        """The peer's loss, on these anchors or on its own draw."""
        raise NotImplementedError

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _start(self, setting: Setting, inputs: Inputs) -> None:
        self.setting, self.inputs = setting, inputs
        self.optimizer = torch.optim.AdamW(self._parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _layer_config(setting: Setting, **more: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=setting.vocab,
        hidden_size=setting.width,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.key_heads,
        head_dim=setting.head_dim,
        max_position_embeddings=setting.tokens + setting.block_size,
        rms_norm_eps=setting.eps,
        rope_parameters={"rope_type": "default", "rope_theta": setting.rope_theta},
        attention_bias=False,
        **more,
    )


def _frozen(module: nn.Module, weight: Tensor) -> nn.Module:
    with torch.no_grad():
        module.weight.copy_(weight)
    return module.requires_grad_(requires_grad=False)


class SpecForgeStep(_PeerStep):
    """SpecForge's `OnlineDFlashModel` with SDPA (flex attention has no backward on a CPU)."""

    def __init__(self, setting: Setting, inputs: Inputs, *, chunk_blocks: int) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        dflash_config = {"target_layer_ids": list(setting.taps), "mask_token_id": MASK_ID}
        config = _layer_config(setting, num_target_layers=setting.target_layers, block_size=setting.block_size)
        config.dflash_config = dflash_config
        config._attn_implementation = "sdpa"  # noqa: SLF001
        self.model = DFlashDraftModel(config)
        self.model.load_state_dict(inputs.weights)
        self._online = OnlineDFlashModel(
            draft_model=self.model,
            target_lm_head=_frozen(nn.Linear(setting.width, setting.vocab, bias=False), inputs.head),
            target_embed_tokens=_frozen(nn.Embedding(setting.vocab, setting.width), inputs.embedding),
            mask_token_id=MASK_ID,
            block_size=setting.block_size,
            attention_backend="sdpa",
            num_anchors=setting.anchors,
            loss_decay_gamma=GAMMA,
            objective_chunk_blocks=chunk_blocks,
        )
        self._draw = self._online._sample_anchor_positions  # noqa: SLF001
        self._mask = torch.ones_like(inputs.ids, dtype=torch.float32)
        self._start(setting, inputs)

    def loss(self, anchors: Tensor | None) -> Tensor:
        """Its forward; stated anchors replace its own draw."""
        fixed = None if anchors is None else (anchors, torch.ones_like(anchors, dtype=torch.bool))
        self._online._sample_anchor_positions = self._draw if fixed is None else lambda *_: fixed  # noqa: SLF001
        loss, _, _ = self._online(input_ids=self.inputs.ids, hidden_states=self.inputs.features, loss_mask=self._mask)
        return loss


class SpeculatorsStep(_PeerStep):
    """speculators' DFlash model with eager cross-entropy and SDPA, on the packed batch."""

    def __init__(self, setting: Setting, inputs: Inputs) -> None:
        from speculators import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.models.dflash.config import DFlashSpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        layers = _layer_config(setting)
        layers._attn_implementation = "sdpa"  # noqa: SLF001
        drafted = setting.block_size - 1
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=setting.vocab,
            block_size=setting.block_size,
            aux_hidden_state_layer_ids=list(setting.taps),
            mask_token_id=MASK_ID,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafted)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
        )
        self.model = core.DFlashDraftModel(config)
        frozen = {"embed_tokens": inputs.embedding, "lm_head": inputs.head, "verifier_lm_head": inputs.head}
        for name, weight in frozen.items():
            _frozen(getattr(self.model, name), weight)
        self.model.verifier_norm.requires_grad_(requires_grad=False)
        self.model.load_state_dict(inputs.weights, strict=False)
        self._core, self._draw = core, core.select_anchors
        self._loss_config = resolve_loss_config("ce", "eager")
        self._start(setting, inputs)
        rows = setting.batch * setting.tokens
        self._ids = inputs.ids.reshape(1, rows)
        self._features = inputs.features.reshape(1, rows, -1)
        # The target's state at j must name token j+1: its head row for that token, which the norm leaves pointing there.
        self._last = inputs.head[self._ids.roll(-1, dims=1)]
        self._documents = torch.arange(setting.batch).repeat_interleave(setting.tokens).unsqueeze(0)
        self._positions = torch.arange(setting.tokens).repeat(setting.batch).unsqueeze(0)
        # It divides by the supervised slots, this project by the sum of the weights.
        self.loss_scale = drafted / float(decay_weights(setting).sum())

    def loss(self, anchors: Tensor | None) -> Tensor:
        """Its forward; stated anchors replace its own draw."""
        rows = torch.arange(self.setting.batch).unsqueeze(1) * self.setting.tokens
        if anchors is None:
            anchors = draw_anchors(self.setting, torch.default_generator)
        packed = (anchors + rows).reshape(-1)
        self._core.select_anchors = lambda *_: (packed, torch.ones_like(packed, dtype=torch.bool))
        _, loss, _ = self.model(
            hidden_states=self._features,
            input_ids=self._ids,
            loss_mask=torch.ones_like(self._ids),
            verifier_last_hidden_states=self._last,
            document_ids=self._documents,
            position_ids=self._positions,
            loss_config=self._loss_config,
            gamma=GAMMA,
            max_anchors=len(packed),
        )
        return loss
