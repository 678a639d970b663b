"""Acceptance probes: the acceptance length of one drafter on a few prompts, as cheaply as it can be had.

Invariant: the figures are those of the evaluation (tokens that reach the answer per verification), and two probes of the same
prompts are compared in pairs: most of what differs between two samples of prompts is the prompts.
Nothing is decoded plainly here: whether decoding is lossless is proven by every evaluation, and hangs on the target, not on the
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence

import numpy as np

from dflash.config import Config, EvaluateConfig, ProbeConfig
from dflash.errors import EvaluationError, TargetError
from dflash.evaluate.bootstrap import interval_over, ratio_interval, resample_counts, resampled_ratios
from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace, speculative_decode_batch
from dflash.evaluate.metrics import survival_rates, verification_table
from dflash.evaluate.prompts import EvalPrompt, require_room
from dflash.evaluate.proposal import Proposer
from dflash.model.sampling import GREEDY
from dflash.model.target import Target
from dflash.records import ProbeFigures


def probe_drafter(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[EvalPrompt],
    *,
    probe: ProbeConfig,
    evaluate: EvaluateConfig,
    stop_ids: Collection[int],
) -> ProbeFigures:
    """Decode the prompts and measure.

    Args:
        target: frozen target.
        proposer: the drafter's.
        prompts: at least one.
        probe: longest answer and batch size.
        evaluate: bootstrap.
        stop_ids: tokens that end an answer.

    Raises:
        EvaluationError: a prompt is too long for the target, or nothing was verified.
    """
    require_room(
        prompts,
        positions=target.info.max_position_embeddings,
        new_tokens=probe.max_new_tokens,
        block_size=proposer.max_drafts + 1,
        key="probe.max_new_tokens",
    )
    limits = DecodeLimits(probe.max_new_tokens, frozenset(stop_ids))
    began_s = time.monotonic()
    traces: list[SpeculativeTrace] = []
    for first in range(0, len(prompts), probe.batch_size):
        traces += _decoded(target, proposer, prompts[first : first + probe.batch_size], limits=limits)
    decode_s = time.monotonic() - began_s
    counted = [sum(step.counted for step in trace.verifications) for trace in traces]
    verifications = [len(trace.verifications) for trace in traces]
    if not sum(verifications):
        raise EvaluationError(
            "every answer ended with its first token: nothing was verified",
            remedy="raise probe.max_new_tokens, or check the chat template",
        )
    counts = resample_counts(len(prompts), samples=evaluate.bootstrap_samples, seed=evaluate.seed)
    rows = ((i, s.context_tokens, s.drafted, s.accepted, s.counted) for i, trace in enumerate(traces) for s in trace.verifications)
    return ProbeFigures(
        acceptance_length=sum(counted) / sum(verifications),
        acceptance_ci=ratio_interval(counted, verifications, counts=counts, confidence=evaluate.confidence),
        counted=tuple(counted),
        verifications=tuple(verifications),
        survival_per_position=survival_rates(verification_table(rows), positions=proposer.max_drafts),
        decode_s=decode_s,
    )


def paired_gain(new: ProbeFigures, old: ProbeFigures, *, evaluate: EvaluateConfig) -> tuple[float, float] | None:
    """Interval of the difference of two acceptance lengths on the same prompts, by bootstrap over the prompts.

    Returns:
        Lower and upper end; None if fewer than two prompts were verified by both.

    Raises:
        EvaluationError: not the same number of prompts.
    """
    if len(new.counted) != len(old.counted):
        raise EvaluationError(
            f"probes of {len(new.counted)} and of {len(old.counted)} prompts cannot be compared in pairs",
            remedy="probe both checkpoints with the same settings",
        )
    counts = resample_counts(len(new.counted), samples=evaluate.bootstrap_samples, seed=evaluate.seed)
    lengths = [resampled_ratios(each.counted, each.verifications, counts=counts) for each in (new, old)]
    both = int(np.count_nonzero(np.multiply(new.verifications, old.verifications)))
    return interval_over(np.subtract(*lengths), prompts=both, confidence=evaluate.confidence)


def shown_better(new: ProbeFigures, old: ProbeFigures, *, evaluate: EvaluateConfig) -> bool:
    """Whether the whole interval of the difference lies above zero; never where there is none."""
    gain = paired_gain(new, old, evaluate=evaluate)
    return gain is not None and gain[0] > 0


def probe_identity(config: Config, prompts: Sequence[EvalPrompt]) -> str:
    """SHA-256 (hex) of everything but the checkpoint that a probe's acceptance hangs on."""
    settings = {
        "prompts": [list(prompt.prompt_ids) for prompt in prompts],
        "max_new_tokens": config.probe.max_new_tokens,
        "block_size": config.evaluate.block_size or config.drafter.block_size,
        "target": [config.target.path, config.target.revision],
        "device": config.probe.device.partition(":")[0],
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _decoded(
    target: Target, proposer: Proposer, prompts: Sequence[EvalPrompt], *, limits: DecodeLimits
) -> list[SpeculativeTrace]:  # fmt: skip
    """Together where the target's rows can be rolled back on their own, else one after the other."""
    try:
        return _together(target, proposer, prompts, limits)
    except TargetError:
        if len(prompts) == 1:
            raise
        return [trace for prompt in prompts for trace in _together(target, proposer, [prompt], limits)]


def _together(target: Target, proposer: Proposer, prompts: Sequence[EvalPrompt], limits: DecodeLimits) -> list[SpeculativeTrace]:
    return speculative_decode_batch(
        target,
        proposer,
        [prompt.prompt_ids for prompt in prompts],
        keys=[prompt.id for prompt in prompts],
        limits=limits,
        sampling=GREEDY,
        rollback=target.keep,
    )
