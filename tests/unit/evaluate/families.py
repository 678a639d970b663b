"""Tiny random targets of every cache family, and proposers whose acceptance is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash.config import DrafterConfig
from dflash.evaluate.proposal import Committed
from dflash.evaluate.proposers import DrafterProposer, OracleProposer
from dflash.model.drafter import Drafter
from dflash.model.sampling import GREEDY, Sampling
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo

VOCAB = 61
MASK_ID = 60
WIDTH = 32
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
HYBRID = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
STATE_SPACE = {
    "head_dim": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
    "gemma3_sliding": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=7, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "gemma2_capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=8, sliding_window=7, final_logit_softcapping=8.0, query_pre_attn_scalar=8)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SHAPE,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ),
    "lfm2_conv": lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "conv", "full_attention", "conv"])),
    "qwen3_5_hybrid": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **HYBRID)),
    "qwen3_next_hybrid": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SHAPE,
            **HYBRID,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        )
    ),
    "falcon_h1_hybrid": lambda: FalconH1ForCausalLM(FalconH1Config(**SHAPE, **STATE_SPACE)),
}
RECURRENT = ("qwen3_5_hybrid", "qwen3_next_hybrid", "falcon_h1_hybrid")


def make_target(family: str, *, seed: int = 0) -> Target:
    """A random target whose greedy answers are not constant; the same one every time."""
    torch.manual_seed(seed)
    model = BUILDERS[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith(("conv.conv.weight", "conv1d.weight")):
                parameter.mul_(10.0)
    info = TargetInfo(
        location=family,
        fingerprint="0" * 64,
        model_type=family,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        vocab_size=VOCAB,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return Target(model, info=info, target_layer_ids=(0, 2))


def make_drafter(*, seed: int = 1, block_size: int = 6) -> Drafter:
    """A random drafter for those targets."""
    config = DrafterConfig(
        num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=block_size, target_layer_ids=(0, 2), rope_theta=10_000.0, max_position_embeddings=512,
    )  # fmt: skip
    drafter = Drafter(config, target_hidden_size=WIDTH)
    drafter.init_weights(seed)
    return drafter.eval()


def scripted(
    target: Target, prompt: Sequence[int], answer: Sequence[int], *, max_drafts: int, right_frac: float, seed: int
) -> OracleProposer:
    """Proposes one prompt's known answer, spoiled at random places: every number of accepted drafts occurs."""
    return OracleProposer(target, {"": answer}, {"": len(prompt)}, max_drafts=max_drafts, right_frac=right_frac, seed=seed)


def drafting(target: Target, drafter: Drafter, *, block_size: int, drawing: Sampling = GREEDY) -> DrafterProposer:
    """A drafter's proposer with the toys' mask token."""
    return DrafterProposer(target, drafter, block_size=block_size, mask_token_id=MASK_ID, drawing=drawing)


def committed(texts: Sequence[Sequence[int]], features: Tensor | None = None, kept: Sequence[int] = ()) -> Committed:
    """What a proposer sees of these texts; all features are kept if `kept` is not given."""
    anchors = torch.tensor([text[-1:] for text in texts])
    whole = [0 if features is None else features.shape[1]] * len(texts)
    return Committed(texts, anchors, features, list(kept) or whole)


def prompts(count: int, *, seed: int = 3, longest: int = 30) -> list[list[int]]:
    """Random prompts of 2 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist() for length in lengths]
