"""Decoding every prompt plainly and with every candidate, in alternation, in one run.

Invariant: whatever is compared decodes the same prompt within the same few seconds, and the order rotates from prompt to
prompt, so that a machine that slows down, or a cache that one contestant warms for the next, favours nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash.evaluate.candidates import Candidate
from dflash.evaluate.decode import DecodeLimits, PlainTrace, SpeculativeTrace, plain_decode, speculative_decode
from dflash.evaluate.prompts import EvalPrompt
from dflash.model.target import Target

Progress = Callable[[str, int, int], None]
"""Called with (label, done, total)."""

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Contest:
    """What one prompt gave: the plain answer, and each candidate's in the candidates' order."""

    prompt: EvalPrompt
    plain: PlainTrace
    speculative: tuple[SpeculativeTrace, ...]


def run_contests(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[EvalPrompt],
    *,
    limits: DecodeLimits,
    progress: Progress,
) -> list[Contest]:
    """Decode every prompt plainly and with every candidate.

    Args:
        target: frozen target.
        candidates: at least one.
        prompts: at least one.
        limits: where answers end.
        progress: called after each prompt.
    """
    # The first forwards of a process allocate and choose kernels; nobody's clock should pay for that.
    warm_up = DecodeLimits(max_new_tokens=WARM_UP_TOKENS, stop_ids=frozenset())
    _contest(target, candidates, prompts[0], warm_up, first=0)
    label = "+".join(candidate.label for candidate in candidates)
    contests = []
    for index, prompt in enumerate(prompts):
        contests.append(_contest(target, candidates, prompt, limits, first=index))
        progress(f"decoding ({label})", index + 1, len(prompts))
    return contests


def _contest(target: Target, candidates: Sequence[Candidate], prompt: EvalPrompt, limits: DecodeLimits, *, first: int) -> Contest:
    plain: list[PlainTrace] = []
    traces: dict[int, SpeculativeTrace] = {}
    contestants = len(candidates) + 1
    for turn in range(contestants):
        number = (first + turn) % contestants
        if number == len(candidates):
            plain.append(plain_decode(target, prompt.prompt_ids, limits=limits))
        else:
            traces[number] = speculative_decode(
                target, candidates[number].proposer, prompt.prompt_ids, limits=limits, rollback=target.keep
            )
    return Contest(prompt, plain[0], tuple(traces[number] for number in range(len(candidates))))
