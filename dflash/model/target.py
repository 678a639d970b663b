"""The frozen target: taps for training, cached forwards for decoding, embedding and head shared with the drafter.

Dimensions: B batch, S tokens, n new tokens, M tapped layers, D width, V vocabulary.
Invariant: every tensor that leaves this module is a normal tensor without gradient (never an inference-mode one), so it may
enter a trainable layer. Layers, embedding and head are found through the library's accessors, so nesting and tying do not
matter; the embedding is always called, never indexed, because some families scale inside it.
Hard decision: training features come from the base model with hooks and end behind the last tap: no head, no layers above, no
cache. `output_hidden_states` would keep every layer. Batches are padded on the right, which no causal family can notice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from dflash.config import TargetConfig
from dflash.errors import TargetError
from dflash.model.taps import LayerTaps
from dflash.model.target_cache import CachedStep, TargetCache
from dflash.model.target_info import TargetInfo, read_target_info

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE_TOKENS = 12
PROBE_TOLERANCE = 1e-3


def load_target(config: TargetConfig, *, target_layer_ids: Sequence[int], device: torch.device) -> Target:
    """Load a frozen causal LM from its folder (safetensors only) and prove its tap convention.

    Args:
        config: target section.
        target_layer_ids: tapped layers, 0-based outputs of decoder layers.
        device: where it runs; decides what `dtype: auto` means.

    Returns:
        The target, in eval mode.

    Raises:
        TargetError: it is missing, malformed, not supported, or its layers are not where the convention says.
    """
    info = read_target_info(config)
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    dtype = DTYPES[automatic if config.dtype == "auto" else config.dtype]
    disable_progress_bar()  # its bar would run through the progress lines of whoever loads; a load is logged as one line
    logger.info("loading the target %s as %s on %s", info.location, str(dtype).removeprefix("torch."), device)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            info.location,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"target {info.location} cannot be loaded: {error}",
            remedy="check that its folder is complete and that it fits in memory",
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:
        raise TargetError(
            f"target {info.location} lacks {len(absent)} tensors, e.g. {absent[0]}: the library would fill them at random",
            remedy="download or save the target again",
        )
    return Target(model.to(device), info=info, target_layer_ids=target_layer_ids)


class Target:
    """A frozen causal LM seen through its taps.

    Args:
        model: Hugging Face causal LM, already on its device; it is frozen and set to eval mode.
        info: identity and shape.
        target_layer_ids: tapped layers, strictly increasing, below the last layer.

    Raises:
        TargetError: a layer id does not exist, the head cannot be shared, or the numeric probe fails.
    """

    def __init__(self, model: PreTrainedModel, *, info: TargetInfo, target_layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.info = info
        self._decoder = model.get_decoder()
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        _check_ids(target_layer_ids, len(self._decoder.layers))
        _check_head(self._head, info)
        self._taps = LayerTaps(self._decoder.layers, target_layer_ids)
        self._probe()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        weight: Tensor = self._embedding.weight
        return weight.device

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Tapped layers."""
        return self._taps.layer_ids

    @property
    def head_weight(self) -> Tensor:
        """[V, D], frozen; shared with the embedding where the target ties them."""
        weight: Tensor = self._head.weight
        return weight

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Taps of right-padded sequences.

        Args:
            input_ids: [B, S].
            lengths: [B], real tokens of each row.

        Returns:
            [B, S, M*D], zeros behind each row's length.
        """
        taps, _ = self._taps.capture(lambda: self._decoder(input_ids=input_ids, use_cache=False), stop_after_last=True)
        for row, length in enumerate(lengths.tolist()):
            taps[row, length:] = 0
        return taps

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [...] as the target itself does -> [..., D]."""
        embedded: Tensor = self._embedding(ids)
        return embedded

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to hidden states [..., D] -> [..., V]."""
        logits: Tensor = self._head(hidden)
        return logits

    def new_cache(self) -> TargetCache:
        """An empty decoding cache of this target's layer types."""
        return TargetCache(DynamicCache(config=self.model.config))

    def forward_cached(
        self, input_ids: Tensor, cache: TargetCache, position_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed new tokens and return what the target says about each of them.

        Args:
            input_ids: [B, n] tokens behind the cached ones.
            cache: extended by n.
            position_ids: [B, n] absolute positions.
            attention_mask: [B, cached + n], only for rows of different lengths.

        Returns:
            Logits [B, n, V] and taps [B, n, M*D].
        """
        return self._forward_step(CachedStep(input_ids, position_ids, attention_mask), cache, last_logits_only=False)

    def forward_cached_last(self, input_ids: Tensor, cache: TargetCache, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Like `forward_cached`, with the head on the last position only: logits [B, V] and taps [B, n, M*D]."""
        logits, taps = self._forward_step(CachedStep(input_ids, position_ids, None), cache, last_logits_only=True)
        return logits[:, -1], taps

    def crop(self, cache: TargetCache, remove_tokens: int) -> None:
        """Undo the last `remove_tokens` tokens of the cache's latest forward, on every family of layers.

        Raises:
            TargetError: more tokens than that forward fed, or a family that cannot be rolled back.
        """
        cache.crop(remove_tokens, replay=lambda step: self._forward_step(step, cache, last_logits_only=True))

    @torch.no_grad()
    def logits_cached(self, input_ids: Tensor, cache: TargetCache, position_ids: Tensor) -> Tensor:
        """Like `forward_cached` without taps: logits [B, n, V], for decoding that no drafter listens to."""
        step = CachedStep(input_ids, position_ids, None)
        cache.begin(step)
        logits: Tensor = self._run(step, cache, last_logits_only=False).logits
        cache.commit()
        return logits

    @torch.no_grad()
    def _forward_step(self, step: CachedStep, cache: TargetCache, *, last_logits_only: bool) -> tuple[Tensor, Tensor]:
        cache.begin(step)
        taps, output = self._taps.capture(lambda: self._run(step, cache, last_logits_only=last_logits_only), stop_after_last=False)
        cache.commit()
        return output.logits, taps

    def _run(self, step: CachedStep, cache: TargetCache, *, last_logits_only: bool) -> Any:
        return self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            attention_mask=step.attention_mask,
            cache=cache.kv,
            use_cache=True,
            logits_to_keep=1 if last_logits_only else 0,
        )

    @torch.no_grad()
    def _probe(self) -> None:
        """Prove on a few tokens that tap l is `hidden_states[l+1]` and not its neighbour."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.info.vocab_size, (1, PROBE_TOKENS), generator=generator).to(self.device)
        states = self._decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        taps = self.features(ids, torch.tensor([PROBE_TOKENS])).chunk(len(self.target_layer_ids), dim=-1)
        for layer_id, tap in zip(self.target_layer_ids, taps, strict=True):
            distances = [_relative_distance(tap, states[index]) for index in (layer_id, layer_id + 1)]
            if not distances[1] <= min(PROBE_TOLERANCE, distances[0]):
                raise TargetError(
                    f"tap {layer_id} is not hidden_states[{layer_id + 1}] of {self.info.location} (off by {distances[1]:.2g})",
                    remedy="this architecture does not follow the tap convention: use another target, or report it",
                )


def _check_ids(layer_ids: Sequence[int], layers: int) -> None:
    ids = list(layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers - 1:
        raise TargetError(
            f"target_layer_ids {ids} do not fit a target with {layers} layers",
            remedy=f"name layers 0..{layers - 2} in increasing order, each once (the last layer cannot be tapped)",
        )


def _check_head(head: torch.nn.Module | None, info: TargetInfo) -> None:
    weight = getattr(head, "weight", None)
    if weight is None or getattr(head, "bias", None) is not None:
        raise TargetError(
            f"target {info.location} has no output head without bias", remedy="use a causal LM with a plain linear head"
        )
    wanted, found = (info.vocab_size, info.hidden_size), tuple(weight.shape)
    if found != wanted:
        raise TargetError(
            f"target {info.location} has a head of shape {found}, its config says {wanted}",
            remedy="save the target with a config that matches its weights",
        )


def _relative_distance(first: Tensor, second: Tensor) -> float:
    scale = second.float().norm().clamp_min(1e-30)
    return float((first.float() - second.float()).norm() / scale)
