"""The drafter's step on the device: the published shape, recomputed layers, compiled parts, the optimizer."""

from __future__ import annotations

import gc
import math

import torch

from benchmarks.gpu.setting import Figures, Setting, matmul_flops, relative, require
from benchmarks.gpu.shapes import (
    differing,
    fullest,
    gradients,
    middle_drafter,
    new_drafter,
    new_stepper,
    published,
    random_features,
    random_head,
    useful_flops,
)
from dflash.config import Config, OptimizerConfig, parse_config
from dflash.train.footprint import BatchShape, element_bytes, feature_bytes
from dflash.train.memory import memory_plan
from dflash.train.optimizer import build_optimizer

LR = 1e-4
NOT_IN_A_STEP = ("feature window", "features of waiting", "CUDA context", "allocator slack")
"""Items of the plan that a step on one fixed batch does not have."""
PLAN_SLACK = 1.05
"""The plan's own allowance for the allocator."""
MIDDLE = """
target:
  path: nowhere
  mask_token_id: 5
  expected: {{hidden_size: {width}, num_hidden_layers: 12, vocab_size: {vocabulary}, num_parameters: 1}}
data: {{num_conversations: 1, max_length_tokens: {tokens}, bucket_edges_tokens: [{tokens}]}}
plan: {{tokens_per_batch: {tokens}}}
drafter: {{hidden_size: {width}, max_position_embeddings: 4096}}
"""


def published_step(setting: Setting) -> Figures:
    """The published drafter on 4096 tokens, 512 anchors, V 248,320: time, FLOP/s, memory; as chosen, in chunks, recomputed."""
    peak_flops, figures = matmul_flops(setting), {}
    ways = {"auto": ("auto", False), "recomputed": ("auto", True), "chunked": ("chunked", False)}
    for name, (attention, recompute) in ways.items():
        figures |= {f"{name}_{key}": value for key, value in _measured_step(setting, attention, recompute, peak_flops).items()}
        gc.collect()
    require(figures["recomputed_peak_gb"] <= figures["auto_peak_gb"], "recomputing the layers did not save memory")
    return figures


def _measured_step(setting: Setting, attention: str, recompute: bool, peak_flops: float) -> Figures:
    config = published(tiny=setting.tiny)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute_layers": recompute, "attention": attention})}
    )
    expected, shape = config.target.expected, fullest(config)
    assert expected is not None
    drafter = new_drafter(setting, config.drafter, target_hidden_size=expected.hidden_size, attention=attention)
    drafter.recompute_layers = recompute
    head = random_head(setting, vocabulary=expected.vocab_size, width=expected.hidden_size)
    stepper = new_stepper(setting, config, drafter, head)
    batch = random_features(setting, config, shape, seed=1)
    losses = []

    def whole() -> None:
        stepper.accumulate(batch)
        losses.append(stepper.update(lr=LR, norm_limit=math.inf).ce)

    peak = setting.peak_bytes(whole)
    step_s = setting.seconds(whole, repeats=3)

    def forward_backward() -> None:
        stepper.accumulate(batch)

    micro_s = setting.seconds(forward_backward, repeats=3)
    stepper.update(lr=0.0, norm_limit=math.inf)
    require(all(math.isfinite(loss) for loss in losses), f"losses are not finite: {losses}")
    require(losses[-1] < losses[0], f"the loss of one repeated batch does not fall: {losses}")
    planned = planned_step_bytes(config, shape)
    figures = {
        "backend": drafter.attention.name,
        "step_s": step_s,
        "micro_batch_s": micro_s,
        "tokens_per_s": shape.tokens / step_s,
        "achieved_tflops": useful_flops(config, batch) / micro_s / 1e12,
        "of_matmul": useful_flops(config, batch) / micro_s / peak_flops,
        "peak_gb": peak / 1e9,
        "planned_gb": planned / 1e9,
    }
    if setting.cuda:
        require(peak <= PLAN_SLACK * planned, f"peak {peak / 1e9:.2f} GB is over the {planned / 1e9:.2f} GB that the plan counts")
    return figures


def planned_step_bytes(config: Config, shape: BatchShape) -> int:
    """What the memory plan counts for the drafter's device, but for what only a running pipeline holds; one batch of features."""
    place = memory_plan(config).places[1 if config.cluster.device == "cuda" else 0]
    fixed = sum(item.size_bytes for item in place.items if not item.name.startswith(NOT_IN_A_STEP))
    expected = config.target.expected
    assert expected is not None
    number_bytes = element_bytes(config.train.compute_dtype, device=config.cluster.device)
    return fixed + feature_bytes(config, shape, target_hidden_size=expected.hidden_size, number_bytes=number_bytes)


def middle(*, tiny: bool) -> tuple[Config, BatchShape]:
    """A configuration around the middle drafter, and a batch of it."""
    drafter = middle_drafter(tiny=tiny)
    width, tokens, vocabulary = drafter.hidden_size, 60 if tiny else 2048, 300 if tiny else 32_000
    text = MIDDLE.format(width=width, tokens=tokens, vocabulary=vocabulary)
    config = parse_config(text, origin="middle").model_copy(update={"drafter": drafter})
    anchors = 12 if tiny else 128
    train = config.train.model_copy(
        update={"anchors": config.train.anchors.model_copy(update={"max_per_sequence": anchors, "max_per_batch": 2 * anchors})}
    )
    return config.model_copy(update={"train": train}), BatchShape(2, tokens, anchors, 2 * anchors)


def recompute(setting: Setting) -> Figures:
    """Recomputed layers give the same gradients under autocast, for less memory."""
    config, shape = middle(tiny=setting.tiny)
    expected = config.target.expected
    assert expected is not None
    drafter = new_drafter(setting, config.drafter, target_hidden_size=expected.hidden_size)
    head = random_head(setting, vocabulary=expected.vocab_size, width=expected.hidden_size)
    batch = random_features(setting, config, shape, seed=2)
    found, peaks = {}, {}
    for flag in (False, True, False):
        drafter.recompute_layers = flag
        drafter.zero_grad(set_to_none=True)
        held = setting.held_bytes()
        made = []
        peaks[flag] = setting.peak_bytes(
            lambda made=made: made.extend(gradients(drafter, head, batch, config, dtype=torch.bfloat16))
        )
        peaks[flag] -= held
        found[flag] = [tensor.cpu() for tensor in made]
        del made
    off = max(relative(ours, truth) for ours, truth in zip(found[True], found[False], strict=True))
    require(off <= 1e-2, f"gradients of recomputed layers are off by {off:.2g}")
    require(
        peaks[True] < peaks[False] or not setting.cuda,
        f"recomputing holds {peaks[True] / 1e6:.0f} MB, not {peaks[False] / 1e6:.0f}",
    )
    return {
        "off": off,
        "differing_tensors": differing(found[True], found[False]),
        "peak_mb": peaks[False] / 1e6,
        "recomputed_peak_mb": peaks[True] / 1e6,
    }


def compiled(setting: Setting) -> Figures:
    """`train.compile`: the compiled parts agree, are compiled a few times whatever the batches' sizes, and save time."""
    config, shape = middle(tiny=setting.tiny)
    expected = config.target.expected
    assert expected is not None
    plain, fused = (new_drafter(setting, config.drafter, target_hidden_size=expected.hidden_size) for _ in range(2))
    head = random_head(setting, vocabulary=expected.vocab_size, width=expected.hidden_size)
    torch._dynamo.reset()  # noqa: SLF001
    torch._dynamo.utils.counters.clear()  # noqa: SLF001
    fused.compile_dense(backend="inductor" if setting.cuda else "eager")
    shares = (1.0, 0.5) if setting.tiny else (1.0, 0.5, 0.75, 0.9, 0.6)
    worst, graphs = 0.0, []
    for number, share in enumerate(shares):
        part = BatchShape(2, int(share * shape.length_tokens), int(share * shape.anchors), int(share * shape.blocks))
        batch = random_features(setting, config, part, seed=number)
        pair = [gradients(drafter, head, batch, config, dtype=torch.bfloat16) for drafter in (fused, plain)]
        worst = max(worst, *(relative(ours, truth) for ours, truth in zip(*pair, strict=True)))
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))  # noqa: SLF001
    require(worst <= 5e-2, f"compiled parts are off by {worst:.2g}")
    require(len(graphs) < 4 or graphs[-1] == graphs[2], f"every batch compiles anew: {graphs} graphs")
    batch = random_features(setting, config, shape, seed=9)
    times = [
        setting.seconds(lambda drafter=drafter: gradients(drafter, head, batch, config, dtype=torch.bfloat16), repeats=3)
        for drafter in (plain, fused)
    ]
    return {"off": worst, "graphs": graphs, "plain_ms": 1e3 * times[0], "compiled_ms": 1e3 * times[1], "ratio": times[1] / times[0]}


def fused_adamw(setting: Setting) -> Figures:
    """Fused AdamW against the formula in float64, and the bandwidth that it reaches."""
    size, module = (64, 5) if setting.tiny else (4096, 16384), torch.nn.Module()
    with setting.device:
        module.matrix = torch.nn.Parameter(setting.normal(*size, seed=0, scale=0.1))
        module.vector = torch.nn.Parameter(torch.ones(size[1], device=setting.device))
    config = OptimizerConfig(beta1=0.9, beta2=0.95, weight_decay=0.1)
    optimizer = build_optimizer(module, config, lr=LR)
    truth = {name: [p.detach().double(), 0.0, 0.0] for name, p in module.named_parameters()}
    for step in range(1, 4):
        for number, (name, parameter) in enumerate(module.named_parameters()):
            parameter.grad = setting.normal(*parameter.shape, seed=10 * step + number)
            weight, first, second = truth[name]
            slope, decay = parameter.grad.double(), config.weight_decay if parameter.ndim > 1 else 0.0
            first, second = config.beta1 * first + (1 - config.beta1) * slope, config.beta2 * second + (1 - config.beta2) * slope**2
            scaled = (first / (1 - config.beta1**step)) / ((second / (1 - config.beta2**step)).sqrt() + config.eps)
            truth[name] = [weight - LR * decay * weight - LR * scaled, first, second]
        optimizer.step()
    off = max(relative(p, truth[name][0]) for name, p in module.named_parameters())
    require(off <= 1e-6, f"fused AdamW is off by {off:.2g}")
    spent_s = setting.seconds(optimizer.step, repeats=5)
    numbers = sum(p.numel() for p in module.parameters())
    return {"off": off, "ms_per_billion_weights": 1e3 * spent_s * 1e9 / numbers, "gb_per_s": 28 * numbers / spent_s / 1e9}
