"""The most probable token of each hidden state without the whole float32 product: a bfloat16 product says where it can be.

Dimensions: n hidden states, D width, V vocabulary.
Invariant: the answer is the argmax of the float32 product. The bfloat16 product is off by at most
`ROUNDING * |h| * |w| + 2**-8 * |logit|`; every vocabulary block whose upper bound reaches the best lower bound is multiplied again
in float32, and the rest cannot hold the maximum.
Hard decision: only where it pays, on a CPU with bfloat16 dot products: drafting is bound by reading the head (32,000 x 256 and 15
slots: 8.2 ms in float32, 2.7 in bfloat16). The price is a bfloat16 copy of the head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

UNIT = 2.0**-8
"""Unit roundoff of bfloat16."""
ROUNDING = 2.1 * UNIT
"""Both factors are rounded: 2u + u^2, and room for the accumulation in float32."""
BLOCK_TOKENS = 16
TYPICAL_SLOTS = 16
FEWEST_WEIGHTS = 4_000_000
"""Below this the plain product is as fast."""


def screening_pays(head: Tensor) -> bool:
    """Whether this machine and this head [V, D] gain from screening."""
    return (
        head.device.type == "cpu"
        and head.dtype == torch.float32
        and head.numel() >= FEWEST_WEIGHTS
        and head.shape[0] % BLOCK_TOKENS == 0
        and bool(torch.cpu._is_avx512_bf16_supported())  # noqa: SLF001 (the library has no public name for it)
    )


def rough_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplies [n, D] by a bfloat16 weight [V, D] -> [n, V], as fast as this library can.

    A weight that is packed once halves the time again (1.8 ms instead of 2.8). The library offers that to its own compiler
    only, so it is tried, compared on one row, and left alone where it is missing.
    """
    probe = weight[:1].contiguous()
    plain = weight.t().contiguous()
    try:
        operators: Any = torch.ops.mkldnn
        packed = operators._reorder_linear_weight(weight, TYPICAL_SLOTS)  # noqa: SLF001 (see above)

        def product(hidden: Tensor) -> Tensor:
            result: Tensor = operators._linear_pointwise(hidden, packed, None, "none", [], "")  # noqa: SLF001
            return result

        if torch.allclose(product(probe).float(), (probe @ plain).float(), rtol=2 * UNIT, atol=1e-3):
            return product
    except (RuntimeError, AttributeError) as error:
        logger.info("bfloat16 weights cannot be packed here: %s", str(error).splitlines()[0])
    return lambda hidden: hidden @ plain


class ScreenedHead:
    """A frozen head with its bfloat16 copy.

    Args:
        head: [V, D] in float32, V a multiple of `BLOCK_TOKENS`; neither copied nor changed.
    """

    def __init__(self, head: Tensor) -> None:
        head = head.detach()
        # Block c holds the tokens c, c + columns, c + 2 * columns ...: a maximum over the leading dimension is vectorized.
        self._blocks = head.view(BLOCK_TOKENS, -1, head.shape[1])
        self._vocab = head.shape[0]
        self._rough = rough_product(head.bfloat16())
        self._norms = head.norm(dim=1).view(BLOCK_TOKENS, -1).amax(0)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Ids [n] of the largest logits of hidden states [n, D], the first of equals."""
        count, columns = len(hidden), self._blocks.shape[1]
        rough = self._rough(hidden.bfloat16()).float().view(count, BLOCK_TOKENS, columns).amax(1)
        slack = (ROUNDING * hidden.norm(dim=1, keepdim=True)) * self._norms + UNIT * rough.abs()
        possible = rough + slack >= (rough - slack).amax(1, keepdim=True)
        rows, blocks = possible.nonzero(as_tuple=True)
        exact = (self._blocks[:, blocks] * hidden[rows]).sum(-1)
        values, places = exact.max(dim=0)
        best = values.new_full((count,), float("-inf")).scatter_reduce_(0, rows, values, "amax")
        tokens = torch.where(values == best[rows], places * columns + blocks, self._vocab)
        return tokens.new_full((count,), self._vocab).scatter_reduce_(0, rows, tokens, "amin")
