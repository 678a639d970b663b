"""Run, target, drafter and device sections of the configuration."""

from __future__ import annotations

import hashlib
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dflash.config.base import Section

LayerType = Literal["full_attention", "sliding_attention"]
GGUF_SUFFIX = ".gguf"


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


class TargetConfig(Section):
    """The frozen target model."""

    path: str = Field(
        "demo", description="`demo` (shipped with the package), a Hugging Face folder, a hub name, or a Llama `*.gguf` file."
    )
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
        """Folder or hub name to load from; `demo` is the target shipped inside the package.

        A GGUF file's is the folder that it is converted into on first use, named by the file's place, size and time.
        """
        if self.path == "demo":
            return str(files("dflash") / "demo" / "target")
        file = self.gguf_file
        if file is None:
            return self.path
        stat = file.stat()
        digest = hashlib.sha256(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return str(cache / "dflash" / "gguf" / f"{file.stem}-{digest[:16]}")

    @property
    def gguf_file(self) -> Path | None:
        """The GGUF file that `path` names, if it names an existing one."""
        file = Path(self.path)
        return file if file.suffix == GGUF_SUFFIX and file.is_file() else None

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
    """Devices: `replicas x (targets_per_replica + 1)` on GPUs; on a CPU, or with `share_device`, all roles share one."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="Kind of device that target and drafter run on.")
    replicas: int = Field(1, ge=1, description="Data-parallel replicas, one process each; part of a run's identity.")
    nodes: int = Field(1, ge=1, description="Machines that share the replicas equally (see docs/scale-out.md).")
    rendezvous: str | None = Field(
        None, pattern=r"^[^:\s]+:\d{1,5}$", description="`host:port` of the first machine, where several meet; unused on one."
    )
    network_interface: str | None = Field(
        None, description="Network interface of the ranks' traffic between machines; chosen by the libraries if absent."
    )
    collective_timeout_s: float = Field(
        600.0, gt=0, description="A rank that the others wait for longer is taken for dead; must exceed the first save."
    )
    targets_per_replica: int = Field(1, ge=1, description="Target workers a replica; each has its own GPU on `cuda`.")
    share_device: bool = Field(
        False, description="On `cuda`: target and drafter of a replica share one GPU (a single GPU, or a small target)."
    )
    shard: bool = Field(
        False,
        description="Spread the drafter's weights, gradients and moments over the replicas (FSDP2), for one that fits no device; "
        "a run may go on with or without.",
    )
    device_memory_bytes: int | None = Field(None, ge=1, description="Memory of one device, for the memory plan.")
    torch_threads: int = Field(1, ge=1, description="Torch threads of the process (tiny models: one is fastest).")

    @property
    def devices_per_replica(self) -> int:
        """GPUs of one replica; 0 on a CPU."""
        if self.device == "cpu":
            return 0
        return 1 if self.share_device else self.targets_per_replica + 1

    @property
    def devices_needed(self) -> int:
        """GPUs that the configuration asks for; 0 on a CPU."""
        return self.replicas * self.devices_per_replica

    @property
    def devices_per_node(self) -> int:
        """GPUs that each machine must have; 0 on a CPU."""
        return self.devices_needed // self.nodes

    @property
    def replicas_per_node(self) -> int:
        """Ranks of one machine."""
        return self.replicas // self.nodes

    @model_validator(mode="after")
    def _nodes_share_replicas(self) -> Self:
        if self.replicas % self.nodes:
            raise ValueError(f"replicas {self.replicas} is no multiple of nodes {self.nodes}: every machine has equally many")
        if self.shard and self.replicas == 1:
            raise ValueError("shard spreads the drafter over the replicas, and there is only one")
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError(f"{self.nodes} nodes need rendezvous: host:port of the first of them")
        return self


TemplateFlags = dict[str, Any]
