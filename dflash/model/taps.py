"""Taps: hooks that copy the output of chosen decoder layers, and can end the forward behind the last of them.

Invariant: tap l is the output of decoder layer l, 0-based, before the final norm (Hugging Face `hidden_states[l+1]`).
The hooks stay on the model for its whole life and act only while a tape is open on the calling thread, so several threads
may share one model. Ending the forward early is an exception raised by the last tap's hook: the layers above and the head
are simply not run, for any architecture (bit-equal to the full forward with `use_cache=False`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import TargetError


class _LastTapReached(Exception):  # noqa: N818 (control flow, never seen outside)
    """Raised behind the last tapped layer to end the forward."""


class LayerTaps:
    """Hooks on the tapped layers of one model.

    Args:
        layers: all decoder layers.
        layer_ids: tapped ids, ascending.
    """

    def __init__(self, layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._open = threading.local()
        for index, layer_id in enumerate(layer_ids):
            layers[layer_id].register_forward_hook(self._hook(index, last=index == len(layer_ids) - 1))

    def capture(self, forward: Callable[[], Any], *, stop_after_last: bool) -> tuple[Tensor, Any]:
        """Run `forward` and return the taps [B, S, M*D] and its result (None when it was ended early).

        Raises:
            TargetError: a tapped layer did not run exactly once, in order.
        """
        tape: list[Tensor] = []
        self._open.tape, self._open.stop = tape, stop_after_last
        try:
            result = forward()
        except _LastTapReached:
            result = None
        finally:
            self._open.tape = None
        if len(tape) != len(self.layer_ids):
            raise TargetError(
                f"{len(tape)} of the tapped layers {list(self.layer_ids)} ran",
                remedy="tap layers that this architecture always runs",
            )
        return torch.cat(tape, dim=-1), result

    def _hook(self, index: int, *, last: bool) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tape = getattr(self._open, "tape", None)
            if tape is None:
                return
            if len(tape) != index:
                raise TargetError(
                    f"tapped layers {list(self.layer_ids)} run out of order or twice",
                    remedy="use a target whose layers run once each, in order",
                )
            tape.append(output[0] if isinstance(output, tuple) else output)
            if last and self._open.stop:
                raise _LastTapReached

        return record
