"""Run, target, drafter and device sections of the configuration."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section

LayerType = Literal["full_attention", "sliding_attention"]


class RunConfig(Section):
    """Where a run lives and what it is seeded with."""

    name: str = Field("demo", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="Name of the run and of its folder.")
    root: str = Field("runs", description="Folder that holds all runs and the shared data sets.")
    seed: int = Field(20260, ge=0, description="Seed of every keyed random decision.")


class ExpectedTarget(Section):
    """The target's shape as the user expects it: checked at load, used for plans where the weights are not at hand."""

    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    num_hidden_layers: int = Field(ge=1, description="Number of decoder layers.")
    vocab_size: int = Field(ge=2, description="Padded vocabulary size (rows of the head).")
    num_parameters: int = Field(ge=1, description="Parameters of the whole target.")
    kv_bytes_per_token: int = Field(0, ge=0, description="Key/value cache bytes a token (decoding only).")
    state_bytes_per_sequence: int = Field(0, ge=0, description="Recurrent state bytes a sequence (hybrid targets).")


class TargetConfig(Section):
    """The frozen target model."""

    path: str = Field("demo", description="`demo` (shipped with the package), a Hugging Face folder, or a hub name.")
    revision: str | None = Field(None, description="Hub revision; pin it for reproducible runs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto`: float32 on a CPU (bfloat16 is about 100x slower there), bfloat16 on a GPU."
    )
    mask_token: str | None = Field(None, description="Text of an existing token that the corpus never uses.")
    mask_token_id: int | None = Field(None, ge=0, description="Id of that token (instead of `mask_token`).")
    trust_remote_code: bool = Field(False, description="Run code shipped with a hub model.")
    local_files_only: bool = Field(False, description="Never ask the hub.")
    expected: ExpectedTarget | None = Field(None, description="Shape to check at load and to plan memory with.")

    @property
    def location(self) -> str:
        """Folder or hub name to load from; `demo` is the target shipped inside the package."""
        return str(files("dflash") / "demo" / "target") if self.path == "demo" else self.path

    @model_validator(mode="after")
    def _mask_is_named_once(self) -> Self:
        if (self.mask_token is None) == (self.mask_token_id is None):
            raise ValueError("give exactly one of mask_token and mask_token_id: the mask never falls back to pad or eos")
        return self


class DrafterConfig(Section):
    """Shape of the drafter (a Qwen3-style block-diffusion decoder at the target's hidden size)."""

    num_hidden_layers: int = Field(1, ge=1, description="Number of drafter layers.")
    hidden_size: int = Field(128, ge=1, description="Width; must equal the target's (its embedding and head are shared).")
    intermediate_size: int = Field(384, ge=1, description="Width of the SwiGLU.")
    num_attention_heads: int = Field(4, ge=1, description="Query heads.")
    num_key_value_heads: int = Field(2, ge=1, description="Key/value heads.")
    head_dim: int = Field(32, ge=2, description="Width of one head.")
    block_size: int = Field(8, ge=2, le=64, description="Block size K: one anchor and K-1 drafted tokens.")
    target_layer_ids: tuple[int, ...] = Field(
        (0, 1, 2),
        min_length=1,
        description="Tapped target layers, 0-based outputs of decoder layers; stored, never re-derived.",
    )
    layer_types: tuple[LayerType, ...] | None = Field(None, description="One entry a layer; all full attention if absent.")
    sliding_window: int | None = Field(None, ge=1, description="Window W of the sliding layers, in tokens.")
    sliding_causal: bool = Field(True, description="Sliding layers are causal inside the block (as served by vLLM and SGLang).")
    rope_theta: float = Field(1_000_000.0, gt=0, description="RoPE base; plain RoPE over the whole head.")
    rms_norm_eps: float = Field(1e-6, gt=0, description="Epsilon of every RMSNorm.")
    max_position_embeddings: int = Field(1024, ge=1, description="Longest position the drafter is exported for.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")

    @property
    def resolved_layer_types(self) -> tuple[LayerType, ...]:
        """One attention type a layer."""
        full: LayerType = "full_attention"
        return self.layer_types or (full,) * self.num_hidden_layers

    @model_validator(mode="after")
    def _shape_is_consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs")
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"target_layer_ids {list(ids)} must be non-negative, strictly increasing and free of duplicates")
        types = self.resolved_layer_types
        if len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers")
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types names sliding_attention but sliding_window is not set")
        return self


class ClusterConfig(Section):
    """Devices: `replicas x (targets_per_replica + 1)` on GPUs; on a CPU all roles share it."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="Kind of device that target and drafter run on.")
    replicas: int = Field(1, ge=1, le=1, description="Data-parallel replicas (one process each); one for now.")
    targets_per_replica: int = Field(1, ge=1, description="Target workers a replica; each has its own GPU on `cuda`.")
    device_memory_bytes: int | None = Field(None, ge=1, description="Memory of one device, for the memory plan.")
    torch_threads: int = Field(1, ge=1, description="Torch threads of the process (tiny models: one is fastest).")

    @property
    def devices_needed(self) -> int:
        """GPUs that the configuration asks for; 0 on a CPU."""
        return self.replicas * (self.targets_per_replica + 1) if self.device == "cuda" else 0


TemplateFlags = dict[str, Any]
