"""Whether speculative decoding returns plain decoding's tokens, on tiny random targets of every cache family.

Float32, CPU. For every family: the state test on one row and on a ragged batch, each with its negative controls; prompts of 2 to 40
tokens decoded plainly and with oracle drafters of three qualities, in ragged batches and one by one, greedy and sampled.
Figures a family: prompts decoded; answers that differ and are no near-ties; answers that differ and are; answers that differ when
sampled (by the same keyed numbers); the largest state difference; the smallest difference of a broken rollback. The last figure is
the share of answers that differ on three of the families in bfloat16, where equality is not promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.lossless_targets import FAMILIES, VOCAB, make_target
from benchmarks.report import benchmark_parser, publish
from dflash.evaluate.decode import DecodeLimits, speculative_decode_batch
from dflash.evaluate.lossless import explain_difference
from dflash.evaluate.proposers import OracleProposer
from dflash.evaluate.state_proof import STATE_TOLERANCE, prove_state
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY, Sampling
from dflash.model.target import Target

NAME = "lossless"
BLOCK = 8
TOKENS = 40
ROWS = 16
QUALITIES = (0.5, 0.8, 0.95)
SAMPLED = Sampling(temperature=0.9, seed=3)
NEAR_TIE_FACTOR = 4.0

Prompts = list[list[int]]


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    count, alone, names = (16, 2, ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"]) if arguments.quick else (64, 12, list(FAMILIES))
    figures: dict[str, Any] = {"block_size": BLOCK, "tokens": TOKENS, "oracle_right_fracs": list(QUALITIES)}
    totals = [0, 0, 0]
    for name in names:
        target = make_target(name)
        decoded, wrong, tied, sampled = decode_all(target, make_prompts(count), alone=alone)
        figures[f"{name}_decoded_wrong_tied_sampled"] = [decoded, wrong, tied, sampled]
        figures[f"{name}_state_and_weakest_control"] = list(states(target))
        totals = [totals[0] + decoded, totals[1] + wrong, totals[2] + tied]
    figures |= {"decoded": totals[0], "differing": totals[1], "near_ties": totals[2]}
    figures["bfloat16_differing_frac"] = differing_in_bfloat16(make_prompts(count // 2))
    publish(NAME, figures, arguments)
    return 1 if totals[1] else 0


def make_prompts(count: int) -> Prompts:
    """Random prompts of 2 to 40 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 41, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def states(target: Target) -> tuple[float, float]:
    """Largest state difference of the true rollback, and smallest of a broken one."""
    proofs = [prove_state(target, make_prompts(rows), block_size=BLOCK, seed=seed) for rows, seed in ((1, 0), (1, 1), (6, 0))]
    weakest = min(value for proof in proofs for value in proof.controls.values())
    assert weakest > STATE_TOLERANCE, "a broken rollback was not noticed"
    return max(proof.relative for proof in proofs), weakest


def decode_all(target: Target, prompts: Prompts, *, alone: int) -> tuple[int, int, int, int]:
    """Decoded answers, wrong ones, near-ties, and sampled ones that differ."""
    decoded = wrong = tied = differing = 0
    for sampling in (GREEDY, SAMPLED):
        plain = answers(target, prompts, sampling)
        for number, spoken in runs(target, prompts, plain, sampling, alone=alone):
            decoded += 1
            if spoken == plain[number]:
                continue
            if not sampling.greedy:
                differing += 1
                continue
            judged = explain_difference(
                target, prompts[number], answers=(plain[number], spoken), limits=DecodeLimits(TOKENS, frozenset()),
                sampling=sampling, key="", block_size=BLOCK, near_tie_factor=NEAR_TIE_FACTOR,
            )  # fmt: skip
            wrong, tied = wrong + (not judged.excused), tied + judged.excused
    return decoded, wrong, tied, differing


def differing_in_bfloat16(prompts: Prompts) -> float:
    """Share of greedy answers that differ in half precision, where equality is not promised."""
    spoken = differing = 0
    for name in ("qwen3", "gemma3_sliding", "qwen3_5_hybrid"):
        target = make_target(name)
        target.model.to(torch.bfloat16)
        plain = answers(target, prompts, GREEDY)
        for number, answer in runs(target, prompts, plain, GREEDY, alone=0):
            spoken, differing = spoken + 1, differing + (answer != plain[number])
    return differing / spoken


def answers(target: Target, prompts: Prompts, sampling: Sampling) -> Prompts:
    """Plain decoding."""
    return [
        answer
        for first in range(0, len(prompts), ROWS)
        for answer in generate_batch(
            target, prompts[first : first + ROWS], keys=keys(first, len(prompts)), max_new_tokens=TOKENS,
            temperature=sampling.temperature, seed=sampling.seed, stop_ids=(),
        )
    ]  # fmt: skip


def keys(first: int, count: int) -> list[str]:
    """Names of up to `ROWS` prompts."""
    return [f"prompt {number}" for number in range(first, min(first + ROWS, count))]


def runs(target: Target, prompts: Prompts, plain: Prompts, sampling: Sampling, *, alone: int) -> Iterator[tuple[int, list[int]]]:
    """Every speculative answer with its prompt's number: ragged batches at every quality, then some prompts by themselves."""
    limits = DecodeLimits(TOKENS, frozenset())
    for right_frac in QUALITIES if sampling.greedy else QUALITIES[1:2]:
        oracle = OracleProposer(
            target, {f"prompt {number}": answer for number, answer in enumerate(plain)},
            {f"prompt {number}": len(prompt) for number, prompt in enumerate(prompts)},
            max_drafts=BLOCK - 1, right_frac=right_frac, seed=7,
        )  # fmt: skip
        groups = [range(first, min(first + ROWS, len(prompts))) for first in range(0, len(prompts), ROWS)]
        if right_frac == QUALITIES[1]:
            groups += [range(number, number + 1) for number in range(alone)]
        for group in groups:
            traces = speculative_decode_batch(
                target, oracle, [prompts[number] for number in group], keys=[f"prompt {number}" for number in group],
                limits=limits, sampling=sampling, rollback=target.keep,
            )  # fmt: skip
            yield from ((number, list(trace.tokens)) for number, trace in zip(group, traces, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
