"""Tiny random models of several families, and the golden numbers: what the model room's tests run on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo

torch.set_num_threads(1)

VOCAB = 61
WIDTH = 32
GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**_COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {**_COMMON, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_COMMON, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **_COMMON,
            **_LINEAR,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "mistral": ("MistralConfig", {**_COMMON, "num_hidden_layers": 4, "sliding_window": 7}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_COMMON,
            **_LINEAR,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
}


def tiny_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """A random causal LM whose weights are large enough that its greedy answers vary."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    return model.eval()


def info_of(model: PreTrainedModel) -> TargetInfo:
    """The info of a model that lies in no folder."""
    text = model.config.get_text_config()
    return TargetInfo(
        location="(memory)",
        fingerprint="0" * 64,
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        rope_theta=10000.0,
        max_position_embeddings=text.max_position_embeddings,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def tiny_target(family: str, *, layer_ids: tuple[int, ...] = (0, 1), seed: int = 0) -> Target:
    model = tiny_model(family, seed=seed)
    return Target(model, info=info_of(model), target_layer_ids=layer_ids)


def drafter_config(**changes: Any) -> DrafterConfig:
    """A small two-layer drafter for the tiny targets."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 6,
        "target_layer_ids": (0, 1),
        "rope_theta": 10000.0,
        "initializer_range": 0.2,
    }
    return DrafterConfig(**{**shape, **changes})


def sliding_config(**changes: Any) -> DrafterConfig:
    return drafter_config(**{"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, **changes})


def tiny_drafter(config: DrafterConfig, *, seed: int = 1) -> Drafter:
    drafter = Drafter(config, target_hidden_size=WIDTH)
    drafter.init_weights(seed)
    with torch.no_grad():  # norms of one would hide a norm that is left out or applied twice
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


@dataclass(frozen=True)
class Golden:
    """Weights, inputs and expected values of one reference run."""

    expected: dict[str, Any]
    forward: dict[str, Tensor]
    drafter: Drafter
    target: Target

    @property
    def anchors(self) -> Tensor:
        return self.forward["anchors"].long()

    @property
    def input_ids(self) -> Tensor:
        return self.forward["input_ids"].long()


def load_golden(name: str) -> Golden:
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    draft = expected["draft_config"]
    config = DrafterConfig(
        **{
            key: draft[key]
            for key in (
                "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "block_size", "layer_types", "sliding_window", "rope_theta", "rms_norm_eps",
            )
        },
        target_layer_ids=tuple(draft["dflash_config"]["target_layer_ids"]),
    )  # fmt: skip
    drafter = Drafter(config, target_hidden_size=expected["target_config"]["hidden_size"])
    drafter.load_state_dict(load_file(folder / "draft.safetensors"))
    arguments = dict(expected["target_config"])
    arguments["rope_parameters"] = {"rope_type": "default", "rope_theta": arguments.pop("rope_theta")}
    model = AutoModelForCausalLM.from_config(transformers.Qwen3Config(**arguments))
    model.load_state_dict(load_file(folder / "target.safetensors"))
    target = Target(model, info=info_of(model), target_layer_ids=config.target_layer_ids)
    return Golden(expected, load_file(folder / "forward.safetensors"), drafter, target)


def count_calls(modules: nn.ModuleList) -> list[int]:
    """Count the calls of every module from now on."""
    calls = [0] * len(modules)

    def counter(index: int) -> Any:
        def count(*_: Any) -> None:
            calls[index] += 1

        return count

    for index, module in enumerate(modules):
        module.register_forward_pre_hook(counter(index))
    return calls
