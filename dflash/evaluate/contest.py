"""Decoding every prompt plainly and with every candidate, in alternation, in one run.

Invariant: whatever is compared decodes the same prompts, as many of them together, within the same few seconds, and the order
rotates from turn to turn, so that a machine that slows down, or a cache that one contestant warms for the next, favours nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash.evaluate.candidates import Candidate
from dflash.evaluate.decode import (
    DecodeLimits,
    PlainTrace,
    SpeculativeTrace,
    plain_decode_batch,
    speculative_decode_batch,
)
from dflash.evaluate.prompts import EvalPrompt
from dflash.model.sampling import Sampling
from dflash.model.target import Target

Progress = Callable[[str, int, int], None]
"""Called with (label, done, total)."""

WARM_UP_TOKENS = 8

TURN_BATCHES = 4
"""A contestant's turn is so many batches' worth of prompts: answers differ in length, and where one has ended the next prompt
joins, so that rows stay filled (of 8 rows of the demo's prompts 3 are at work without that). A single row needs no such turn."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What one prompt gave: the plain answer, and each candidate's in the candidates' order."""

    prompt: EvalPrompt
    plain: PlainTrace
    speculative: tuple[SpeculativeTrace, ...]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How every contestant decodes.

    Attributes:
        limits: where answers end.
        sampling: greedy, or samples keyed by the prompts' ids: the same ones for every contestant and batch size.
        batch_size: prompts decoded at once.
    """

    limits: DecodeLimits
    sampling: Sampling
    batch_size: int


def run_contests(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[EvalPrompt],
    *,
    settings: DecodeSettings,
    progress: Progress,
) -> list[Contest]:
    """Decode every prompt plainly and with every candidate.

    Args:
        target: frozen target.
        candidates: at least one.
        prompts: at least one, with ids of their own.
        settings: alike for all contestants.
        progress: called after each turn of all contestants.

    Returns:
        One contest a prompt, in their order.

    Raises:
        TargetError: several prompts at once on a target whose rows cannot be rolled back on their own.
    """
    turn = 1 if settings.batch_size == 1 else TURN_BATCHES * settings.batch_size
    turns = [prompts[first : first + turn] for first in range(0, len(prompts), turn)]
    # The first forwards of a process allocate and choose kernels; nobody's clock should pay for that.
    warm_up = replace(settings, limits=DecodeLimits(max_new_tokens=WARM_UP_TOKENS, stop_ids=frozenset()))
    _contests(target, candidates, prompts[: settings.batch_size], warm_up, first=0)
    label = "+".join(candidate.label for candidate in candidates)
    contests: list[Contest] = []
    for index, group in enumerate(turns):
        contests += _contests(target, candidates, group, settings, first=index)
        progress(f"decoding ({label})", len(contests), len(prompts))
    return contests


def _contests(
    target: Target, candidates: Sequence[Candidate], group: Sequence[EvalPrompt], settings: DecodeSettings, *, first: int
) -> list[Contest]:
    """A turn of every contestant; `first` is the one that begins."""
    prompts, keys = [prompt.prompt_ids for prompt in group], [prompt.id for prompt in group]
    plain: list[PlainTrace] = []
    traces: dict[int, list[SpeculativeTrace]] = {}
    contestants = len(candidates) + 1
    for turn in range(contestants):
        number = (first + turn) % contestants
        if number == len(candidates):
            plain = plain_decode_batch(
                target, prompts, keys=keys, limits=settings.limits, sampling=settings.sampling, rows=settings.batch_size
            )
        else:
            traces[number] = speculative_decode_batch(
                target,
                candidates[number].proposer,
                prompts,
                keys=keys,
                limits=settings.limits,
                sampling=settings.sampling,
                rollback=target.keep,
                rows=settings.batch_size,
            )
    by_prompt = zip(*(traces[number] for number in range(len(candidates))), strict=True)
    return [Contest(prompt, own, tuple(rows)) for prompt, own, rows in zip(group, plain, by_prompt, strict=True)]
