"""Whether a drafter that stops where it is no longer sure decodes faster than one with a fixed number of drafts.

A block is drafted in one forward, so drafting less saves only tokens that the target verifies. The adaptive way ends a block in
front of the first slot whose own probability is below a threshold; a threshold and a fixed block size are chosen on the first half
of a run's held-out prompts and compared on the other half, in pairs, all ways alternating from prompt to prompt.
`verified_per_token` is what the target was fed for each token of the answers. The library has no such mode unless `gain` says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import benchmark_parser, publish
from dflash.checkpoint import load_drafter
from dflash.config import EvaluateConfig
from dflash.errors import DflashError
from dflash.evaluate.candidates import Candidate
from dflash.evaluate.paired import Resamples
from dflash.evaluate.prompts import drawn_together
from dflash.evaluate.proposal import Committed, Proposal
from dflash.evaluate.proposers import DrafterProposer
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.model.drafter import Drafter
from dflash.model.sampling import GREEDY
from dflash.stages.evaluate import EvaluationBench, open_bench
from dflash.stages.export import newest_checkpoint
from dflash.stages.run import Run, reopen_run

NAME = "adaptive_draft"
THRESHOLDS = (0.1, 0.25, 0.5, 0.75)
QUICK_PROMPTS = 8


class ConfidentProposer(DrafterProposer):
    """Ends each row's drafts in front of the first one whose own probability is below a threshold."""

    threshold = 0.0

    def propose(self, committed: Committed) -> Proposal:
        """Draft a whole block, offer its confident beginning."""
        assert committed.features is not None
        block = torch.cat((committed.anchors, self._masks.expand(len(committed.texts), -1)), dim=1)
        embeds = self._target.embed(block).to(self._dtype)
        hidden = self._hidden(embeds, committed.features.to(self._dtype), committed)
        chances = torch.softmax(self._target.logits(hidden[:, 1:].to(self._target.head_weight.dtype)).float(), dim=-1)
        sure, tokens = chances.max(dim=-1)
        counts = (sure >= self.threshold).long().cumprod(dim=1).sum(dim=1).tolist()
        return Proposal(tokens[:, : max(counts)], counts, None)


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--run", type=Path, required=True, help="a trained run's folder, e.g. runs/demo-001")
    arguments = parser.parse_args()
    try:
        figures = measure(reopen_run(arguments.run), arguments)
    except DflashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    publish(NAME, figures, arguments)
    return 0


def measure(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Choose on one half of the prompts, compare on the other."""
    bench = open_bench(run)
    prompts = bench.prompts[:QUICK_PROMPTS] if arguments.quick else bench.prompts
    settings = run.config.evaluate
    fixed, adaptive = _candidates(run, bench)
    found = evaluate_candidates(
        bench.target, [*fixed, *adaptive], prompts, evaluate=settings, stop_ids=bench.stop_ids, progress=lambda *_: None
    )  # fmt: skip
    half = len(prompts) // 2
    best_fixed = max(found[: len(fixed)], key=lambda each: _speed(each, range(half)))
    best_adaptive = max(found[len(fixed) :], key=lambda each: _speed(each, range(half)))
    rest = range(half, len(prompts))
    gain, interval = _paired(best_adaptive, best_fixed, rest, settings)
    figures: dict[str, Any] = {
        "gain": gain,
        "gain_ci": interval,
        "chosen_fixed": best_fixed.result.drafter,
        "chosen_adaptive": best_adaptive.result.drafter,
        "prompts_chosen_on": half,
        "prompts_compared_on": len(rest),
        "lossless": all(each.result.lossless for each in found),
    }
    for each in found:
        fed = each.table.drafted.sum() + len(each.table)
        figures |= {
            f"{each.result.drafter}_tau": each.result.acceptance_length,
            f"{each.result.drafter}_verified_per_token": float(fed / each.table.counted.sum()),
            f"{each.result.drafter}_speedup": each.result.speedup,
        }
    return figures


def _candidates(run: Run, bench: EvaluationBench) -> tuple[list[Candidate], list[Candidate]]:
    manifest, weights = load_drafter(newest_checkpoint(run.paths))
    drafter = Drafter(run.config.drafter, target_hidden_size=bench.target.info.hidden_size)
    drafter.load_state_dict(weights)
    drafter.to(bench.target.device).eval()
    trained = run.config.drafter.block_size
    common: dict[str, Any] = {"mask_token_id": manifest.mask_token_id, "drawing": GREEDY}
    fixed = [
        Candidate(f"block_{size}", manifest.step, DrafterProposer(bench.target, drafter, block_size=size, **common))
        for size in range(2, trained + 1)
    ]
    adaptive = []
    for threshold in THRESHOLDS:
        proposer = ConfidentProposer(bench.target, drafter, block_size=trained, **common)
        proposer.threshold = threshold
        adaptive.append(Candidate(f"sure_{threshold:g}", manifest.step, proposer))
    return fixed, adaptive


def _speed(evaluation: Evaluation, prompts: Sequence[int]) -> float:
    traces = [evaluation.contests[prompt].speculative[evaluation.position] for prompt in prompts]
    return sum(len(trace.tokens) - 1 for trace in traces) / sum(trace.decode_s for trace in traces)


def _paired(ours: Evaluation, other: Evaluation, prompts: Sequence[int], settings: EvaluateConfig) -> tuple[float, list[float]]:
    groups = drawn_together([each.prompt for each in ours.contests])
    over = Resamples([groups[prompt] for prompt in prompts], evaluate=settings)
    one, two = (over.speed([each.contests[prompt].speculative[each.position] for prompt in prompts]) for each in (ours, other))
    return (one / two).pooled, list(over.interval(one / two) or ())


if __name__ == "__main__":
    raise SystemExit(main())
