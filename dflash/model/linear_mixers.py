"""Rolling recurrent states back: clone before a verification, then rerun only the mixers on what was accepted.

Dimensions: B rows, n tokens of the verification, D width.
A recurrent state (gated-delta, state space) has absorbed the rejected tokens and cannot be cropped. The state is copied
before the verification and restored after it, and each layer's *mixer* (the module that updates the state) is run again on
the first accepted inputs, which a hook has kept: about a fifth of a whole forward (22 % on a 27 B hybrid), where feeding the
accepted tokens again costs all of it. Rows with different acceptances are run in groups of equal length.
Invariant: a mixer is found by watching which module updates which layer's state, never by a name, and the replay is proven
on a few tokens when the target is loaded; where the proof fails there are no mixers and the accepted tokens are fed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.model.cache_layers import recurs

States = dict[int, Tensor | None]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Snapshot:
    """Copies of the recurrent layers' states; the buffers are used again at the next verification."""

    states: list[tuple[States, States]]
    flags: list[dict[int, bool]]

    @classmethod
    def of(cls, layers: Sequence[Any], reuse: Snapshot | None) -> Snapshot:
        """Copy the states of recurrent cache layers, into an older snapshot's buffers where they fit."""
        old = reuse.states if reuse is not None else [({}, {})] * len(layers)
        states = [
            (_copied(layer.conv_states, conv), _copied(layer.recurrent_states, recurrent))
            for layer, (conv, recurrent) in zip(layers, old, strict=True)
        ]
        return cls(states, [dict(layer.has_previous_state) for layer in layers])

    def restore(self, layers: Sequence[Any]) -> None:
        """Copy the states back."""
        for layer, (conv, recurrent), flags in zip(layers, self.states, self.flags, strict=True):
            for live, saved in ((layer.conv_states, conv), (layer.recurrent_states, recurrent)):
                for index, value in saved.items():
                    if value is not None:
                        live[index].copy_(value)
            layer.has_previous_state.update(flags)


class LinearMixers:
    """Hooks that keep the mixers' inputs of one forward, and the replay.

    Args:
        mixers: module that updates the state of each recurrent layer, by layer index.
    """

    def __init__(self, mixers: dict[int, nn.Module]) -> None:
        self._mixers = mixers
        self._open = threading.local()
        for index, mixer in mixers.items():
            mixer.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[dict[int, Inputs]]:
        """Keep the inputs that the mixers see on this thread while it is open, by layer index."""
        tape: dict[int, Inputs] = {}
        self._open.tape = tape
        try:
            yield tape
        finally:
            self._open.tape = None

    def replay(self, tape: dict[int, Inputs], layers: dict[int, Any], *, fed: int, kept: Sequence[int]) -> None:
        """Run the mixers again on each row's first tokens, from restored states.

        Args:
            tape: inputs of the forward that is rolled back.
            layers: recurrent cache layers by index, already restored.
            fed: tokens of that forward.
            kept: accepted tokens of each row, 0..fed.
        """
        groups: dict[int, list[int]] = {}
        for row, tokens in enumerate(kept):
            groups.setdefault(tokens, []).append(row)
        groups.pop(0, None)
        whole = len(groups) == 1 and len(next(iter(groups.values()))) == len(kept)
        for tokens, rows in groups.items():
            for index, (arguments, named) in tape.items():
                cut = _cutter(fed, tokens, len(kept), None if whole else rows)
                inputs = tuple(cut(value) for value in arguments), {name: cut(value) for name, value in named.items()}
                with _only_rows(layers[index], None if whole else rows):
                    self._mixers[index](*inputs[0], **inputs[1])

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, arguments: Any, named: Any) -> None:
            tape = getattr(self._open, "tape", None)
            if tape is not None:
                tape[index] = (arguments, named)

        return record


def find_mixers(decoder_layers: Sequence[nn.Module], kv: Any, forward: Callable[[], Any]) -> dict[int, nn.Module] | None:
    """Which module updates the recurrent state of each layer, seen in one cached forward.

    Args:
        decoder_layers: the target's layers.
        kv: an empty cache that `forward` fills.
        forward: one cached forward.

    Returns:
        Modules by layer index; None if a recurrent layer was not updated exactly once by a module of its own.
    """
    stack: list[nn.Module] = []
    found: dict[int, list[nn.Module]] = {}
    handles = []
    for layer in decoder_layers:
        for module in layer.modules():
            handles.append(module.register_forward_pre_hook(lambda module, _inputs: stack.append(module)))
            handles.append(module.register_forward_hook(lambda _module, _inputs, _output: stack.pop() and None, always_call=True))
    for index, cached in enumerate(kv.layers):
        if hasattr(cached, "update_recurrent_state"):
            cached.update_recurrent_state = _watched(cached.update_recurrent_state, stack, found.setdefault(index, []))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    recurrent = {index: found[index] for index, cached in enumerate(kv.layers) if recurs(cached)}
    modules = [module for seen in recurrent.values() for module in seen]
    if any(len(seen) != 1 for seen in recurrent.values()) or len({id(module) for module in modules}) != len(recurrent):
        return None
    return {index: seen[0] for index, seen in recurrent.items()}


def _watched(update: Callable[..., Any], stack: list[nn.Module], seen: list[nn.Module]) -> Callable[..., Any]:
    def watched(*arguments: Any, **named: Any) -> Any:
        if stack:
            seen.append(stack[-1])
        return update(*arguments, **named)

    return watched


def _cutter(fed: int, tokens: int, batch: int, rows: list[int] | None) -> Callable[[Any], Any]:
    """Cuts tensors [B, n, ...] (or [1, n, ...]) to the first tokens of the given rows; passes everything else."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] not in (1, batch) or value.shape[1] != fed:
            return value
        taken = value if rows is None or value.shape[0] == 1 != batch else value[rows]
        return taken[:, :tokens]

    return cut


@contextmanager
def _only_rows(layer: Any, rows: list[int] | None) -> Iterator[None]:
    """Let a cache layer hold only some rows' linear states, and put the new states back into all rows afterwards."""
    if rows is None:
        yield
        return
    whole = (dict(layer.conv_states), dict(layer.recurrent_states))
    for live in (layer.conv_states, layer.recurrent_states):
        live.update({index: None if state is None else state[rows] for index, state in live.items()})
    yield
    for live, full in zip((layer.conv_states, layer.recurrent_states), whole, strict=True):
        for index, state in full.items():
            if state is not None:
                state[rows] = live[index]
        live.update(full)


def _copied(states: States, buffers: States) -> States:
    copies: States = {}
    for index, state in states.items():
        buffer = buffers.get(index)
        if state is None:
            copies[index] = None
        elif buffer is not None and buffer.shape == state.shape and buffer.dtype == state.dtype:
            copies[index] = buffer.copy_(state)
        else:
            copies[index] = state.clone()
    return copies


def states_differ(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Largest relative difference between the linear states of two lists of cache layers."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        for found, wanted in ((one.conv_states, other.conv_states), (one.recurrent_states, other.recurrent_states)):
            for index, right in wanted.items():
                left = found[index]
                if right is not None and left is not None:
                    scale = right.float().norm().clamp_min(1e-30)
                    worst = max(worst, float((left.float() - right.float()).norm() / scale))
    return worst if torch.isfinite(torch.tensor(worst)) else float("inf")
