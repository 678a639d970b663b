"""The frozen target: taps for training, cached forwards for decoding, embedding and head shared with the drafter.

Dimensions: B batch, S tokens, n new tokens, M tapped layers, D width, V vocabulary.
Invariant: every tensor that leaves this module is a normal tensor without gradient (never an inference-mode one), so it may
enter a trainable layer. Layers, embedding and head are found through the library's accessors, so nesting and tying do not
matter; the embedding is always called, never indexed, because some families scale inside it.
Hard decision: training features come from the base model with hooks and end behind the last tap: no head, no layers above, no
cache. `output_hidden_states` would keep every layer. Batches are padded on the right, which no causal family can notice.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from dflash.config import TargetConfig
from dflash.errors import TargetError
from dflash.model.logit_rule import LogitRule, find_logit_rule
from dflash.model.taps import LayerTaps
from dflash.model.target_cache import CacheRecipe, TargetCache
from dflash.model.target_info import TargetInfo, read_target_info
from dflash.model.target_probe import check_tap_convention, probe_ids, proven_mixers

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    logger.info("loading the target %s as %s on %s", config.path, str(dtype).removeprefix("torch."), device)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            info.location,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of any kind: whatever building a model from a foreign configuration comes upon
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


class Prefilled(NamedTuple):
    """Rows behind their prompts: logits [B, V] of the last token, taps [B, longest, M*D] (zeros behind shorter prompts), cache."""

    logits: Tensor
    taps: Tensor | None
    cache: TargetCache


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
        self._decoder = _decoder_of(model, info)
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        _check_ids(target_layer_ids, len(self._decoder.layers))
        _check_head(self._head, info)
        self._taps = LayerTaps(self._decoder.layers, target_layer_ids)
        self._recurrent = False
        self._logit_rule: LogitRule | None = None
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
        return _zeroed_padding(taps, lengths)

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

    @torch.no_grad()
    def features_with_final(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Taps as `features` gives them, and the last layer's state behind the final norm, for losses on the target's distribution.

        Returns:
            [B, S, M*D] and [B, S, D], both zeros behind each row's length; `logit_rule.apply(logits(final))` are the model's own
            logits.
        """
        taps, output = self._taps.capture(lambda: self._decoder(input_ids=input_ids, use_cache=False), stop_after_last=False)
        final: Tensor = output.last_hidden_state
        return _zeroed_padding(taps, lengths), _zeroed_padding(final, lengths)

    @property
    def logit_rule(self) -> LogitRule:
        """What the model does to its head's output; proven on the probe.

        Raises:
            TargetError: this architecture's rule is not known.
        """
        if self._logit_rule is None:
            raise TargetError(
                f"the logits of {self.info.location} are not a scaled or soft-capped product of its head",
                remedy="use a loss and a decoding mode that do not need the target's distribution, or report this architecture",
            )
        return self._logit_rule

    @property
    def has_recurrent_state(self) -> bool:
        """Whether some layer carries a state that no crop can roll back."""
        return self._recurrent

    @property
    def replays_mixers(self) -> bool:
        """Whether a rollback reruns only the mixers (proven on load) instead of feeding the accepted tokens again."""
        return self._recipe.mixers is not None

    def new_cache(self) -> TargetCache:
        """An empty decoding cache of this target's layer types."""
        return TargetCache(self._recipe)

    @torch.no_grad()
    def forward_cached(self, input_ids: Tensor, cache: TargetCache) -> tuple[Tensor, Tensor]:
        """Feed new tokens and return what the target says about each of them.

        Args:
            input_ids: [B, n] tokens behind the cached ones.
            cache: extended by n.

        Returns:
            Logits [B, n, V] and taps [B, n, M*D].
        """
        taps, output = self._taps.capture(lambda: self._run(input_ids, cache, last_logits_only=False), stop_after_last=False)
        return output.logits, taps

    @torch.no_grad()
    def forward_cached_last(self, input_ids: Tensor, cache: TargetCache) -> tuple[Tensor, Tensor]:
        """Like `forward_cached`, with the head on the last position only: logits [B, V] and taps [B, n, M*D]."""
        taps, output = self._taps.capture(lambda: self._run(input_ids, cache, last_logits_only=True), stop_after_last=False)
        return output.logits[:, -1], taps

    @torch.no_grad()
    def logits_cached(self, input_ids: Tensor, cache: TargetCache) -> Tensor:
        """Like `forward_cached` without taps: logits [B, n, V], for decoding that no drafter listens to."""
        logits: Tensor = self._run(input_ids, cache, last_logits_only=False).logits
        return logits

    def prefill(self, prompts: Sequence[Sequence[int]], *, with_taps: bool) -> Prefilled:
        """Feed prompts of any lengths, none padded: prompts of equal length together, the caches stacked afterwards.

        Args:
            prompts: token ids, at least one each.
            with_taps: whether taps are wanted.

        Raises:
            TargetError: an empty prompt, or several on a target whose rows cannot be stacked.
        """
        if not all(prompts):
            raise TargetError(
                f"prompt {[bool(prompt) for prompt in prompts].index(False)} is empty",
                remedy="give every prompt at least one token",
            )
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        parts: list[tuple[Tensor, Tensor | None, TargetCache]] = []
        for _, group in itertools.groupby(order, key=lambda row: len(prompts[row])):
            ids = torch.tensor([list(prompts[row]) for row in group], device=self.device)
            cache = self.new_cache()
            logits, taps = self.forward_cached_last(ids, cache) if with_taps else (self._last_logits(ids, cache), None)
            parts.append((logits, taps, cache))
        if len(parts) == 1:
            return Prefilled(parts[0][0], parts[0][1], parts[0][2])
        back = [order.index(row) for row in range(len(order))]
        whole = TargetCache.stacked([cache for _, _, cache in parts])
        whole.select_rows(back)
        logits = torch.cat([logits for logits, _, _ in parts])[back]
        longest = len(prompts[order[-1]])
        padded = [functional.pad(taps, (0, 0, 0, longest - taps.shape[1])) for _, taps, _ in parts if taps is not None]
        return Prefilled(logits, torch.cat(padded)[back] if padded else None, whole)

    @torch.no_grad()
    def _last_logits(self, input_ids: Tensor, cache: TargetCache) -> Tensor:
        logits: Tensor = self._run(input_ids, cache, last_logits_only=True).logits
        return logits[:, -1]

    @torch.no_grad()
    def keep(self, cache: TargetCache, kept: Sequence[int]) -> None:
        """Undo all but the first kept[r] tokens of row r in the cache's latest forward, on every family of layers.

        Raises:
            TargetError: more tokens than that forward fed, or a family that cannot be rolled back.
        """
        cache.keep(kept)

    def crop(self, cache: TargetCache, remove_tokens: int) -> None:
        """Undo the last `remove_tokens` tokens of the cache's latest forward in every row."""
        self.keep(cache, [cache.fed_tokens - remove_tokens] * len(cache.pads))

    def _run(self, input_ids: Tensor, cache: TargetCache, *, last_logits_only: bool) -> Any:
        tokens, device = input_ids.shape[1], input_ids.device
        with cache.feeding(input_ids):
            return self.model(
                input_ids=input_ids,
                position_ids=cache.positions(tokens, device),
                attention_mask=cache.mask(tokens, device),
                cache=cache.kv,
                use_cache=True,
                logits_to_keep=1 if last_logits_only else 0,
            )

    @torch.no_grad()
    def _probe(self) -> None:
        """Measure what is assumed about the architecture: taps, logits, and how its recurrent states are rolled back."""
        ids = probe_ids(self.info.vocab_size, self.device)
        states = self._decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        lengths = torch.tensor([ids.shape[1]])
        taps, final = self.features_with_final(ids, lengths)
        check_tap_convention(
            taps.chunk(len(self.target_layer_ids), dim=-1), states, self.target_layer_ids, location=self.info.location
        )
        logits = self.model(input_ids=ids, use_cache=False).logits
        self._logit_rule = find_logit_rule(self.model.config.get_text_config(), head_output=self._head(final), logits=logits)
        self._recurrent, mixers = proven_mixers(self.model, self._decoder.layers, ids=ids)
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        self._recipe = CacheRecipe(
            lambda: DynamicCache(config=self.model.config),
            self.logits_cached,
            mixers,
            rows_can_shift="chunked_attention" not in kinds,
        )


def _decoder_of(model: PreTrainedModel, info: TargetInfo) -> Any:
    """The module that holds the decoder layers, under whatever nesting."""
    roots = (model.get_decoder(), model.base_model)
    nested = [getattr(root, name, None) for root in roots for name in ("language_model", "model")]
    for candidate in (*roots, *nested):
        if isinstance(getattr(candidate, "layers", None), torch.nn.ModuleList):
            return candidate
    raise TargetError(
        f"the decoder layers of {info.location} ({type(model).__name__}) are not found",
        remedy="use a causal LM of the installed transformers whose decoder has a list of layers",
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


def _zeroed_padding(states: Tensor, lengths: Tensor) -> Tensor:
    for row, length in enumerate(lengths.tolist()):
        states[row, length:] = 0
    return states
