"""Times of target and drafter on a few full micro-batches of random tokens: what the `balance` command calculates with.

Invariant: time depends on shapes alone, so neither data set nor trained weights are needed; every batch goes through the production
path (features, loss, optimizer step), once unmeasured to warm up, and the median of the others counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dflash.config import Config
from dflash.data.reader import Batch
from dflash.errors import DeviceError
from dflash.model.backends import choose_attention
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.target import load_target
from dflash.records import PlannedBatch
from dflash.train.features import FeatureMaker, make_maker
from dflash.train.footprint import BatchShape, batch_shapes
from dflash.train.group import Alone
from dflash.train.models import compute_dtype_of
from dflash.train.optimizer import build_optimizer
from dflash.train.step import Stepper

_ANY_TOKEN = 0
"""As mask token: which one it is costs no time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over micro-batches of several lengths, each as full as the plan makes them.

    Attributes:
        tokens: of a micro-batch; target_s: of one target, transfer included; drafter_s: with its share of the update.
    """

    tokens: float
    target_s: float
    drafter_s: float


def measure(config: Config, *, lengths: int, repeats: int) -> Measured:
    """Time target and drafter on the configured kind of device.

    Args:
        config: shapes, device, dtypes.
        lengths: how many padded lengths, spread over those that the plan makes.
        repeats: measured batches of each.

    Returns:
        Means over the lengths: a plan makes about as many tokens of each.

    Raises:
        TargetError, DrafterError: the models cannot be made.
        DeviceError: the configuration asks for GPUs and there is none.
    """
    torch.set_num_threads(config.cluster.torch_threads)
    maker, stepper = _machinery(config)
    found = [_measure_shape(config, shape, maker, stepper, repeats=repeats) for shape in _spread(batch_shapes(config), lengths)]
    return Measured(
        tokens=statistics.fmean(one.tokens for one in found),
        target_s=statistics.fmean(one.target_s for one in found),
        drafter_s=statistics.fmean(one.drafter_s for one in found),
    )


def random_batch(shape: BatchShape, *, vocab_size: int, seed: int) -> Batch:
    """A full micro-batch of random tokens, all supervised."""
    generator = np.random.default_rng(seed)
    rows = tuple(range(shape.sequences))
    planned = PlannedBatch(position=seed, epoch=0, bucket=0, padded_length_tokens=shape.length_tokens, rows=rows)
    ids = generator.integers(0, vocab_size, (shape.sequences, shape.length_tokens))
    return Batch(planned, ids, np.ones(ids.shape, np.bool_), np.full(shape.sequences, shape.length_tokens, np.int64))


def _machinery(config: Config) -> tuple[FeatureMaker, Stepper]:
    cuda = config.cluster.device == "cuda"
    if cuda and not torch.cuda.device_count():
        raise DeviceError(
            "cluster.device is cuda, and this machine has no CUDA device to measure on",
            remedy="measure on the machine that will train, or set cluster.device=cpu",
        )
    target_device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    # The drafter's own device where there is one, so that the transfer between devices is measured too.
    drafter_device = torch.device("cuda", min(1, torch.cuda.device_count() - 1)) if cuda else target_device
    target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=target_device)
    drafter = Drafter(config.drafter, target_hidden_size=target.info.hidden_size)
    drafter.init_weights(config.run.seed)
    drafter = drafter.to(drafter_device)
    dtype = compute_dtype_of(config, drafter_device)
    drafter.attention = choose_attention(config.drafter, wanted=config.train.attention, device=drafter_device, dtype=dtype).backend
    drafter.recompute_layers = config.train.recompute_layers
    stepper = Stepper(
        drafter,
        build_optimizer(drafter, config.train.optimizer, lr=config.train.lr),
        head=FrozenHead(target.head_weight.detach().to(drafter_device), target.logit_rule),
        loss=config.train.loss,
        clip_norm=config.train.clip_norm,
        autocast_dtype=None if dtype is torch.float32 else dtype,
        group=Alone(),
    )
    maker = make_maker(
        target=target, target_index=0, config=config, mask_token_id=_ANY_TOKEN, drafter_device=drafter_device, dtype=dtype
    )
    return maker, stepper


def _measure_shape(config: Config, shape: BatchShape, maker: FeatureMaker, stepper: Stepper, *, repeats: int) -> Measured:
    steps = config.train.accumulation_steps
    target_s, drafter_s, update_s = [], [], []
    for number in range(1 + repeats):
        batch = random_batch(shape, vocab_size=maker.target.info.vocab_size, seed=number)
        features, spent_s = _timed(lambda batch=batch: maker.make(batch))  # type: ignore[misc]
        target_s.append(spent_s)
        drafter_s.append(_timed(lambda made=features: stepper.accumulate(made))[1])  # type: ignore[misc]
        update_s.append(_timed(lambda: stepper.update(lr=0.0, norm_limit=math.inf))[1])
    middle = [statistics.median(times[1:]) for times in (target_s, drafter_s, update_s)]
    return Measured(tokens=shape.tokens, target_s=middle[0], drafter_s=middle[1] + middle[2] / steps)


def _timed(work: Callable[[], object]) -> tuple[object, float]:
    begin_s = time.monotonic()
    result = work()
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return result, time.monotonic() - begin_s


def _spread(shapes: tuple[BatchShape, ...], count: int) -> list[BatchShape]:
    """Some of the shapes, evenly from the first to the last."""
    if count >= len(shapes):
        return list(shapes)
    places = np.linspace(0, len(shapes) - 1, max(2, count)).round().astype(int)
    return [shapes[place] for place in places]
