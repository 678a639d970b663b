"""Numeric probes of a target on a few tokens when it is loaded: what is assumed about an architecture is measured once.

Invariant: a probe changes nothing about the model; it refuses (taps), or it gives up a shortcut with a logged reason (mixers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dflash.errors import TargetError
from dflash.model.cache_layers import crop_uniformly, recurs
from dflash.model.linear_mixers import LinearMixers, Snapshot, find_mixers, states_differ

logger = logging.getLogger(__name__)

PROBE_TOKENS = 12
PROBE_TOLERANCE = 1e-3
REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""A missing restore gives about 1.8, a correct replay in float32 about 1e-4."""
PREFILLED, FED, KEPT = 6, 5, 2


def probe_ids(vocab_size: int, device: torch.device) -> Tensor:
    """The same random tokens [1, PROBE_TOKENS] every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, PROBE_TOKENS), generator=generator).to(device)


def check_tap_convention(taps: Sequence[Tensor], states: Sequence[Tensor], layer_ids: Sequence[int], *, location: str) -> None:
    """Prove that tap l is `hidden_states[l+1]` and not its neighbour.

    Raises:
        TargetError: it is not.
    """
    for layer_id, tap in zip(layer_ids, taps, strict=True):
        distances = [relative_distance(tap, states[index]) for index in (layer_id, layer_id + 1)]
        if not distances[1] <= min(PROBE_TOLERANCE, distances[0]):
            raise TargetError(
                f"tap {layer_id} is not hidden_states[{layer_id + 1}] of {location} (off by {distances[1]:.2g})",
                remedy="this architecture does not follow the tap convention: use another target, or report it",
            )


@torch.no_grad()
def proven_mixers(model: PreTrainedModel, decoder_layers: Sequence[nn.Module], *, ids: Tensor) -> tuple[bool, LinearMixers | None]:
    """Whether a target has recurrent states, and its mixers if rerunning them is proven to restore these.

    Args:
        model: causal LM.
        decoder_layers: its layers.
        ids: probe tokens [1, PROBE_TOKENS].
    """
    make_kv: Callable[[], DynamicCache] = lambda: DynamicCache(config=model.config)  # noqa: E731
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in make_kv().layers):
        return False, None
    kv = make_kv()
    found = find_mixers(decoder_layers, kv, lambda: _feed(model, ids, kv, first=0, last=PREFILLED))
    if found == {}:
        return False, None
    if found is None:
        logger.warning("%s: a recurrent state is not updated by one module: accepted tokens are fed again", type(model).__name__)
        return True, None
    mixers = LinearMixers(found)
    distance = _replay_distance(model, mixers, make_kv, ids)
    if not distance <= REPLAY_TOLERANCE.get(model.dtype, PROBE_TOLERANCE):
        logger.warning("%s: rerunning the mixers is off by %.2g: accepted tokens are fed again", type(model).__name__, distance)
        return True, None
    return True, mixers


def _replay_distance(model: PreTrainedModel, mixers: LinearMixers, make_kv: Callable[[], DynamicCache], ids: Tensor) -> float:
    """Relative difference between rolled-back states and those of the kept tokens alone."""
    kv, fresh = make_kv(), make_kv()
    _feed(model, ids, kv, first=0, last=PREFILLED)
    layers = {index: layer for index, layer in enumerate(kv.layers) if recurs(layer)}
    snapshot = Snapshot.of(list(layers.values()), None)
    with mixers.recording() as tape:
        _feed(model, ids, kv, first=PREFILLED, last=PREFILLED + FED)
    if tape.keys() != layers.keys():
        return float("inf")
    snapshot.restore(list(layers.values()))
    for layer in kv.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin) and hasattr(layer, "keys"):
            crop_uniformly(layer, FED - KEPT)
    mixers.replay(tape, layers, fed=FED, kept=[KEPT])
    _feed(model, ids, fresh, first=0, last=PREFILLED)
    _feed(model, ids, fresh, first=PREFILLED, last=PREFILLED + KEPT)
    return states_differ(list(layers.values()), [layer for layer in fresh.layers if recurs(layer)])


def _feed(model: PreTrainedModel, ids: Tensor, kv: Any, *, first: int, last: int) -> Any:
    positions = torch.arange(first, last, device=ids.device)[None]
    return model(input_ids=ids[:, first:last], position_ids=positions, cache=kv, use_cache=True, logits_to_keep=1)


def relative_distance(first: Tensor, second: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    scale = second.float().norm().clamp_min(1e-30)
    return float((first.float() - second.float()).norm() / scale)
