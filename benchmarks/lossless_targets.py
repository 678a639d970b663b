"""Tiny random targets of every cache family, for `lossless.py`: each is small, but its answers depend on all of its context."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from dflash.model.target import Target
from dflash.model.target_info import TargetInfo

VOCAB = 97
LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
HEAD = {**SHAPE, "head_dim": 8}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", HEAD),
    "llama": ("LlamaConfig", SHAPE),
    "mistral_sliding": ("MistralConfig", {**SHAPE, "sliding_window": 9}),
    "gemma3_sliding": ("Gemma3TextConfig", {**HEAD, "sliding_window": 7, "layer_types": ALTERNATING}),
    "gemma2_soft_capped": (
        "Gemma2Config",
        {**HEAD, "sliding_window": 7, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss_moe": (
        "GptOssConfig",
        {
            **HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEAD, **EXPERTS}),
    "lfm2_conv": ("Lfm2Config", {**SHAPE, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "qwen3_5_hybrid": ("Qwen3_5TextConfig", {**HEAD, **DELTA}),
    "qwen3_next_hybrid_moe": ("Qwen3NextConfig", {**HEAD, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "olmo_hybrid": ("OlmoHybridConfig", {**SHAPE, **DELTA}),
    "falcon_h1_hybrid": (
        "FalconH1Config",
        {
            **HEAD,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
    ),
}


def make_target(family: str) -> Target:
    """The same random target every time; its weights are large enough that its answers do not repeat themselves."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not key.endswith(("conv.conv.weight", "conv1d.weight")):
                parameter.mul_(10.0)
    info = TargetInfo(family, "0" * 64, family, SHAPE["hidden_size"], LAYERS, VOCAB, None, SHAPE["max_position_embeddings"], 0)
    return Target(model, info=info, target_layer_ids=(0, 2))
