"""A configuration in words: parameter counts, devices, batches and the memory plan, from the configuration alone.

Invariant: nothing but the configuration and, where it is there, the target's folder is read, so that a plan for eight GPUs can
be read on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.config import Config, section_hash
from dflash.errors import TargetError
from dflash.model.parameters import drafter_parameter_count
from dflash.train.memory import MemoryPlan, memory_plan, plan_payload, render_plan

HASH_CHARS = 12


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """A configuration in words, and the same as JSON-able values."""

    text: str
    payload: dict[str, Any]


def describe_config(config: Config) -> ConfigDescription:
    """A validated configuration's parameter counts, devices, batches and memory plan."""
    trainable = drafter_parameter_count(config.drafter, config.drafter.hidden_size)
    try:
        plan, reason = memory_plan(config), ""
    except TargetError as error:
        plan, reason = None, str(error)
    return ConfigDescription(
        text="\n".join(_description_lines(config, trainable, plan, reason=reason)),
        payload={
            "name": config.run.name,
            "config_sha256": section_hash(config),
            "trainable_parameters": trainable,
            "target_parameters": None if plan is None else plan.target.num_parameters,
            "devices_needed": config.cluster.devices_needed,
            "memory_plan": None if plan is None else plan_payload(plan),
        },
    )


def _description_lines(config: Config, trainable: int, plan: MemoryPlan | None, *, reason: str) -> list[str]:
    drafter, data, train = config.drafter, config.data, config.train
    lines = [f"configuration `{config.run.name}` is valid ({section_hash(config)[:HASH_CHARS]})", ""]
    if plan is not None:
        target = plan.target
        shape = f"{target.num_hidden_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}"
        lines.append(
            f"target   {config.target.path}: {parameters_text(target.num_parameters)} frozen parameters, {shape} ({target.source})"
        )
    taps = ", ".join(map(str, drafter.target_layer_ids))
    edges = data.bucket_edges_tokens
    buckets = f"{data.num_buckets} ({edges})" if isinstance(edges, str) else f"up to {', '.join(map(str, edges))} tokens"
    drafter_shape = f"{_many(drafter.num_hidden_layers, 'layer')}, hidden {drafter.hidden_size}, block size {drafter.block_size}"
    batches = f"{_many(train.accumulation_steps, 'micro-batch', 'es')} of at most {config.plan.tokens_per_batch} padded tokens"
    saves = f"a save every {config.checkpoint.interval_steps} steps"
    lines += [
        f"drafter  {parameters_text(trainable)} trainable parameters ({trainable:,}): {drafter_shape}, taps {taps}",
        f"devices  {devices_text(config)}",
        f"data     {data.source}, buckets {buckets}",
        f"step     {batches}, lr {train.lr:g} {train.schedule}, {saves}",
        "",
    ]
    if plan is None:
        return [*lines, f"no memory plan: {reason}"]
    verdict = {True: "every device fits", False: "SOME DEVICE DOES NOT FIT", None: "capacities are not all known"}[plan.fits]
    return [*lines, f"memory plan, upper estimate of steady training: {verdict}", render_plan(plan)]


def parameters_text(count: int) -> str:
    """A count of parameters for people."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _many(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else plural}"


def devices_text(config: Config) -> str:
    """The devices that a configuration uses, in words."""
    cluster = config.cluster
    targets = _many(cluster.targets_per_replica, "target")
    if cluster.device == "cpu":
        return f"CPU, shared by {targets} and the drafter, {_many(cluster.torch_threads, 'thread')} each"
    if cluster.share_device:
        return f"{_many(cluster.devices_needed, 'CUDA device')}, each shared by {targets} and the drafter of a replica"
    return f"{cluster.devices_needed} CUDA devices: {_many(cluster.replicas, 'replica')} x ({targets} + 1 drafter)"
