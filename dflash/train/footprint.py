"""Bytes of a training step's tensors as pure arithmetic: what one micro-batch costs on each side.

Dimensions: B sequences, S padded tokens, N anchors a sequence, K block size, D width, M taps, V vocabulary.
Invariant: every figure is an upper estimate from the configuration alone; a test holds the drafter's activations between the
bytes that autograd really saves and twice those.
The price of the published 1.73 B drafter at K 16: 242 KB of saved activations a block slot and layer in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash.config import Config, DrafterConfig

FLOAT32_BYTES = 4
LABEL_BYTES = 9
"""An int64 label and its flag."""
BLOCKS_PER_CHUNK = 8
"""Blocks that the drafter's attention takes together; each chunk keeps its own copy of the keys that it sees."""
TILE_COLUMNS = {"cpu": 2048, "cuda": 32_768}
"""Columns of the vocabulary that the head takes together."""
ACCEPTANCE_BUFFERS = 3
STAGING_BYTES = 32 * 2**20
"""One of the two buffers of a way between GPUs over host memory: large enough for full bandwidth, small beside a batch."""
TARGET_ACTIVATION_WIDTHS = 16
"""Widths of D alive a token while one frozen decoder layer runs: residual, norm, and a SwiGLU of up to 4 D three times."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A full micro-batch.

    Attributes:
        anchors: most anchors of one sequence (N).
        blocks: most kept blocks of the batch.
    """

    sequences: int
    length_tokens: int
    anchors: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Padded tokens."""
        return self.sequences * self.length_tokens


def batch_shapes(config: Config) -> tuple[BatchShape, ...]:
    """The fullest micro-batch of every padded length that the plan may make, shortest first.

    Short samples make more sequences, long ones more context, and the caps bend both: so every length is looked at.
    """
    plan, caps = config.plan, config.train.anchors
    step, longest = plan.pad_multiple_tokens, config.data.longest_sample_tokens
    shapes = []
    for multiple in range(step, longest + step, step):
        padded = min(multiple, plan.tokens_per_batch)
        sequences = min(plan.max_sequences, plan.tokens_per_batch // padded)
        anchors = min(caps.max_per_sequence, math.ceil(caps.per_supervised_token * padded))
        blocks = min(sequences * anchors, caps.max_per_batch)
        shapes.append(BatchShape(sequences, padded, min(anchors, blocks), blocks))
    return tuple(shapes)


def element_bytes(dtype: str, *, device: str) -> int:
    """Bytes of one number of a configured dtype; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]


def feature_bytes(config: Config, shape: BatchShape, *, target_hidden_size: int, number_bytes: int) -> int:
    """One micro-batch as the drafter takes it: taps [B, S, M*D], block embeddings [B, N, K, D], labels and their flags.

    The acceptance objective takes the target's final states [B, S, D] besides.
    """
    drafter = config.drafter
    slots = shape.sequences * shape.anchors * drafter.block_size
    states = len(drafter.target_layer_ids) + (config.train.loss.objective == "acceptance")
    numbers = shape.tokens * states * target_hidden_size + slots * drafter.hidden_size
    return numbers * number_bytes + slots * LABEL_BYTES


def target_activation_bytes(shape: BatchShape, *, target_hidden_size: int, number_bytes: int) -> int:
    """Transient tensors of the frozen target's forward (no gradient, no cache, no head)."""
    return shape.tokens * TARGET_ACTIVATION_WIDTHS * target_hidden_size * number_bytes


def drafter_activation_bytes(drafter: DrafterConfig, shape: BatchShape, *, number_bytes: int) -> int:
    """What the drafter's forward keeps for its backward, and one layer's gradients on top."""
    layers = [_layer_numbers(drafter, shape, kind == "sliding_attention") for kind in drafter.resolved_layer_types]
    context = 3 * shape.tokens * drafter.hidden_size
    slots = shape.sequences * shape.anchors * drafter.block_size
    ends = 4 * slots * drafter.hidden_size
    masks = sum(
        _mask_numbers(drafter, shape, sliding) for sliding in {kind == "sliding_attention" for kind in drafter.resolved_layer_types}
    )
    return (sum(layers) + max(layers) + context + ends + masks) * number_bytes


def recomputed_activation_bytes(drafter: DrafterConfig, shape: BatchShape, *, number_bytes: int) -> int:
    """The same with `train.recompute_layers`: every layer's input, and one layer's activations and gradients at a time."""
    layers = [_layer_numbers(drafter, shape, kind == "sliding_attention") for kind in drafter.resolved_layer_types]
    inputs = len(layers) * shape.blocks * drafter.block_size * drafter.hidden_size * number_bytes
    whole = drafter_activation_bytes(drafter, shape, number_bytes=number_bytes)
    return min(whole, whole - (sum(layers) - max(layers)) * number_bytes + inputs)


def head_chunk_bytes(config: Config, shape: BatchShape, *, vocab_size: int, number_bytes: int) -> int:
    """The head's tile of logits (with its float32 copy and exponentials where compute is not float32) and the slots' gradient.

    The acceptance objective holds three float32 buffers of a third as many whole rows, and a comparison of them, instead.
    """
    supervised = shape.blocks * (config.drafter.block_size - 1)
    rows = min(config.train.loss.head_chunk_rows, supervised)
    cast = 0 if number_bytes == FLOAT32_BYTES else number_bytes
    if config.train.loss.objective == "acceptance":
        numbers, each = -(-rows // ACCEPTANCE_BUFFERS) * vocab_size, ACCEPTANCE_BUFFERS * FLOAT32_BYTES + cast + 1
    else:
        columns = min(TILE_COLUMNS[config.cluster.device], vocab_size)
        numbers, each = rows * columns, FLOAT32_BYTES + 2 * cast
    return numbers * each + supervised * config.drafter.hidden_size * number_bytes


def _layer_numbers(drafter: DrafterConfig, shape: BatchShape, sliding: bool) -> int:
    """Numbers that one layer keeps: norms and SwiGLU of the kept slots, queries and mixes of all, keys of every chunk."""
    query, key = drafter.num_attention_heads * drafter.head_dim, drafter.num_key_value_heads * drafter.head_dim
    kept = shape.blocks * drafter.block_size
    slots = shape.sequences * shape.anchors * drafter.block_size
    per_kept = 4 * drafter.hidden_size + query + key + 2 * drafter.intermediate_size
    chunk_keys = 2 * key * (shape.sequences * _seen_tokens(drafter, shape, sliding) + slots)
    return kept * per_kept + slots * 3 * query + shape.tokens * 3 * key + chunk_keys


def _mask_numbers(drafter: DrafterConfig, shape: BatchShape, sliding: bool) -> int:
    """Additive masks of all chunks of one visibility."""
    rows = min(BLOCKS_PER_CHUNK, shape.anchors) * drafter.block_size
    groups = drafter.num_attention_heads // drafter.num_key_value_heads
    return shape.sequences * groups * rows * (_seen_tokens(drafter, shape, sliding) + shape.anchors * drafter.block_size)


def _seen_tokens(drafter: DrafterConfig, shape: BatchShape, sliding: bool) -> int:
    """Context tokens summed over the chunks of one sequence: all of it each, or a window and a share each."""
    chunks = -(-shape.anchors // BLOCKS_PER_CHUNK)
    everything = chunks * shape.length_tokens
    if not sliding or drafter.sliding_window is None:
        return everything
    return min(everything, chunks * drafter.sliding_window + shape.length_tokens)
