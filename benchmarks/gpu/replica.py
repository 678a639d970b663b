"""A whole replica on one device: target and drafter side by side, what they overlap, what they hold."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.setting import Figures, Setting, require
from benchmarks.gpu.shapes import middle_drafter, new_stepper, randomize
from dflash.config import Config, parse_config
from dflash.data.reader import Batch
from dflash.train.features import FeatureBatch, FeatureMaker, make_maker, target_threads
from dflash.train.footprint import BatchShape
from dflash.train.measure import random_batch
from dflash.train.memory import plan_memory, target_shape
from dflash.train.models import Models, load_models
from dflash.train.replica import FeatureSupply
from dflash.train.step import Stepper
from dflash.train.transfer import Courier, Mark

MASK_TOKEN_ID = 5
LR = 1e-4
LOSS_TOLERANCE = 2e-2
LEAST_OVERLAP = 0.1
"""Of the shorter side's busy time, on a GPU that both could fill alone."""
SIZES = {
    True: {"layers": 6, "vocabulary": 300, "tokens": 32, "rows": 2, "anchors": 6, "batches": 3},
    False: {"layers": 16, "vocabulary": 32_000, "tokens": 2048, "rows": 4, "anchors": 96, "batches": 12},
}
CONFIG = """
run: {{name: gpu-check, root: {root}}}
target: {{path: {target}, mask_token_id: {mask}}}
data: {{source: synthetic, num_conversations: 1, max_length_tokens: {tokens}, bucket_edges_tokens: [{tokens}]}}
plan: {{tokens_per_batch: {batch_tokens}, max_sequences: {rows}, pad_multiple_tokens: {tokens}}}
drafter: {{hidden_size: {width}, max_position_embeddings: 4096}}
train: {{anchors: {{per_supervised_token: 1.0, max_per_sequence: {anchors}, max_per_batch: {blocks}}}}}
cluster: {{device: {device}, share_device: {share}}}
"""
Span = tuple[Any, Any]


class _Replica:
    """A random target, a drafter on the same device, and the batches that they train on."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.sizes = setting, SIZES[setting.tiny]
        os.environ.setdefault("LOCAL_RANK", "0")
        _make_target(setting)
        self.config = configuration(folder=setting.folder, device=setting.device.type, tiny=setting.tiny)
        self.shape = BatchShape(
            self.sizes["rows"], self.sizes["tokens"], self.sizes["anchors"], self.sizes["rows"] * self.sizes["anchors"]
        )
        self.models: Models = load_models(self.config)
        randomize(self.models.drafter, setting.generator(0))
        self.first = [p.detach().clone() for p in self.models.drafter.parameters()]
        self.clock = _Clock(setting)
        maker = make_maker(
            target=self.models.targets[0], target_index=0, config=self.config, mask_token_id=MASK_TOKEN_ID,
            drafter_device=self.models.device, dtype=self.models.compute_dtype,
        )  # fmt: skip
        self.maker: FeatureMaker = replace(maker, courier=_Watched(maker.courier, self.clock))
        self.drafted: list[Span] = []

    @property
    def made(self) -> list[Span]:
        """Spans in which the target computed."""
        assert isinstance(self.maker.courier, _Watched)
        return self.maker.courier.spans

    def sequential(self) -> list[float]:
        """Losses of target and drafter taking turns."""
        stepper = self._stepper()
        return [self._step(stepper, self.maker.make(batch)) for batch in self._batches()]

    def pipelined(self) -> list[float]:
        """Losses of the same batches through the pipeline."""
        stepper = self._stepper()
        supply: FeatureSupply[Batch, FeatureBatch] = FeatureSupply(
            self._batches(), makers=[self.maker.make], threads=target_threads(self.setting.device), queues=self.config.train.queues
        )
        supply.start()
        try:
            return [self._step(stepper, supply.next()[0]) for _ in range(self.sizes["batches"])]
        finally:
            supply.shut_down()

    def forget(self) -> None:
        """Start the measurement anew."""
        self.made.clear()
        self.drafted.clear()
        self.setting.wait()
        self.clock.restart()

    def _stepper(self) -> Stepper:
        with torch.no_grad():
            for parameter, first in zip(self.models.drafter.parameters(), self.first, strict=True):
                parameter.copy_(first)
        return new_stepper(self.setting, self.config, self.models.drafter, self.models.head())

    def _step(self, stepper: Stepper, batch: FeatureBatch) -> float:
        begin = self.clock.now()
        stepper.accumulate(batch)
        ce = stepper.update(lr=LR, norm_limit=math.inf).ce
        self.drafted.append((begin, self.clock.now()))
        return ce

    def _batches(self) -> Generator[Batch, None, None]:
        for number in range(self.sizes["batches"]):
            yield random_batch(self.shape, vocab_size=self.sizes["vocabulary"], seed=number)


class _Clock:
    """Points in time on the calling thread's current stream; on a CPU the clock's."""

    def __init__(self, setting: Setting) -> None:
        self._cuda = setting.cuda
        self._zero: Any = None
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._zero = self.now()

    def now(self) -> Any:
        """A point that can be read once the device has passed it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: list[Span]) -> list[tuple[float, float]]:
        """Spans as seconds since the start, in order."""
        if not self._cuda:
            return sorted((begin - self._zero, end - self._zero) for begin, end in spans)
        torch.cuda.synchronize()
        return sorted((self._zero.elapsed_time(begin) / 1e3, self._zero.elapsed_time(end) / 1e3) for begin, end in spans)


class _Watched:
    """A courier that notes when its target computed."""

    def __init__(self, inner: Courier, clock: _Clock) -> None:
        self._inner, self._clock = inner, clock
        self.spans: list[Span] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The inner courier's stream, with a point on it before and behind the block."""
        with self._inner.computing():
            begin = self._clock.now()
            yield
            self.spans.append((begin, self._clock.now()))

    def mark(self) -> Mark:
        """The inner courier's."""
        return self._inner.mark()

    def carry(self, tensor: Tensor, *, after: Mark) -> Tensor:
        """The inner courier's."""
        return self._inner.carry(tensor, after=after)


def replica_overlap(setting: Setting) -> Figures:
    """Target and drafter share the device: the same losses as in turns, and how much of the work really runs side by side."""
    replica = _Replica(setting)
    replica.sequential()  # compiles and warms up
    replica.forget()
    begin_s = time.perf_counter()
    alone = replica.sequential()
    setting.wait()
    sequential_s = time.perf_counter() - begin_s
    replica.forget()
    begin_s = time.perf_counter()
    together = replica.pipelined()
    setting.wait()
    pipelined_s = time.perf_counter() - begin_s
    made, drafted = replica.clock.seconds(replica.made), replica.clock.seconds(replica.drafted)
    busy = [sum(end - begin for begin, end in spans) for spans in (made, drafted)]
    shared_frac = overlapped(made, drafted) / min(busy)
    off = max(abs(ours - truth) / abs(truth) for ours, truth in zip(together, alone, strict=True))
    require(off <= LOSS_TOLERANCE, f"losses of the pipeline differ from those in turns by {off:.2g}: {together} against {alone}")
    if setting.cuda:
        require(shared_frac >= LEAST_OVERLAP, f"only {shared_frac:.0%} of the shorter side's time overlaps: the streams take turns")
    return {
        "attention": replica.models.drafter.attention.name,
        "sequential_s": sequential_s,
        "pipelined_s": pipelined_s,
        "ratio": pipelined_s / sequential_s,
        "target_busy_s": busy[0],
        "drafter_busy_s": busy[1],
        "overlap_frac": shared_frac,
        "losses_off": off,
        "equal_losses": sum(ours == truth for ours, truth in zip(together, alone, strict=True)),
        "batches": len(alone),
    }


def replica_memory(setting: Setting) -> Figures:
    """Peak memory of a running replica against the plan of its configuration."""
    setting.need_cuda("torch counts no memory on a CPU; tests hold the plan there against what autograd saves")
    replica = _Replica(setting)
    peak = setting.peak_bytes(replica.pipelined) - sum(tensor.nbytes for tensor in replica.first)
    plan = plan_memory(replica.config, target_shape(replica.config))
    planned = sum(item.size_bytes for item in plan.places[0].items if "CUDA context" not in item.name)
    require(peak <= planned, f"peak {peak / 1e9:.2f} GB is over the {planned / 1e9:.2f} GB of the plan")
    return {"peak_gb": peak / 1e9, "planned_gb": planned / 1e9, "peak_of_planned": peak / planned}


def overlapped(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Seconds in which both have a span; the spans of each are disjoint."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def configuration(*, folder: Path, device: str, tiny: bool) -> Config:
    """What the replica trains by; its target is expected in `folder`."""
    drafter, sizes = middle_drafter(tiny=tiny), SIZES[tiny]
    text = CONFIG.format(
        root=json.dumps(str(folder)), target=json.dumps(str(folder / "target")), mask=MASK_TOKEN_ID, tokens=sizes["tokens"],
        batch_tokens=sizes["rows"] * sizes["tokens"], rows=sizes["rows"], width=drafter.hidden_size, anchors=sizes["anchors"],
        blocks=sizes["rows"] * sizes["anchors"], device=device, share=json.dumps(device == "cuda"),
    )  # fmt: skip
    return parse_config(text, origin="replica").model_copy(update={"drafter": drafter})


def target_config(*, tiny: bool) -> Qwen3Config:
    """A target of the drafter's width."""
    drafter, sizes = middle_drafter(tiny=tiny), SIZES[tiny]
    return Qwen3Config(
        vocab_size=sizes["vocabulary"],
        hidden_size=drafter.hidden_size,
        intermediate_size=3 * drafter.hidden_size,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=drafter.num_attention_heads,
        num_key_value_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        max_position_embeddings=2 * sizes["tokens"],
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )


def _make_target(setting: Setting) -> None:
    torch.manual_seed(0)
    with setting.device:
        model = Qwen3ForCausalLM(target_config(tiny=setting.tiny)).to(setting.dtype)
    model.save_pretrained(setting.folder / "target", safe_serialization=True)
