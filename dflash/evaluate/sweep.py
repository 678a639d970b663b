"""A sweep: how fast one drafter decodes with every block size, temperature and batch size that is asked for.

Invariant: a cell is an evaluation like any other, with its proof of losslessness; what shares a temperature and a batch size, plain
decoding included, is one alternating run. Between those groups speeds are compared as they were measured, minutes apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError
from dflash.evaluate.candidates import Candidate
from dflash.evaluate.contest import Progress
from dflash.evaluate.paired import Resamples, Share
from dflash.evaluate.prompts import EvalPrompt, drawn_together
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.model.target import Target
from dflash.records import SweepCell


def swept_block_sizes(evaluate: EvaluateConfig, *, trained: int) -> tuple[int, ...]:
    """Block sizes of a sweep, 2 to the trained one where none are named.

    Raises:
        EvaluationError: one that the drafter was not trained for.
    """
    named = evaluate.sweep.block_sizes
    sizes = tuple(range(2, trained + 1)) if named is None else named
    if max(sizes) > trained:
        raise EvaluationError(
            f"evaluate.sweep.block_sizes names {max(sizes)}, the drafter was trained with {trained}",
            remedy=f"name block sizes 2..{trained}, or leave the key out",
        )
    return sizes


def run_sweep(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[EvalPrompt],
    *,
    evaluate: EvaluateConfig,
    stop_ids: Collection[int],
    progress: Progress,
) -> tuple[SweepCell, ...]:
    """Measure every candidate, one a block size, at every temperature and batch size.

    Args:
        target: frozen target.
        candidates: the same drafter with its block sizes, in rising order.
        prompts: held-out prompts; the first `evaluate.sweep.num_prompts` are used.
        evaluate: its section `sweep`, and the bootstrap.
        stop_ids: tokens that end an answer.
        progress: called with (label, done, total).

    Returns:
        One cell for plain decoding and one a candidate, for each temperature and batch size.

    Raises:
        EvaluationError: fewer prompts than the largest batch needs, or nothing was verified.
        TargetError: several prompts at once on a target whose rows cannot be rolled back on their own.
    """
    sweep = evaluate.sweep
    asked = prompts[: sweep.num_prompts]
    if len(asked) < max(sweep.batch_sizes):
        raise EvaluationError(
            f"{len(asked)} prompts never fill a batch of {max(sweep.batch_sizes)}",
            remedy="raise evaluate.num_prompts, or take the batch size out of evaluate.sweep.batch_sizes",
        )
    cells: list[SweepCell] = []
    for temperature in sweep.temperatures:
        for batch_size in sweep.batch_sizes:
            changed = {"temperature": temperature, "batch_size": batch_size, "max_new_tokens": sweep.max_new_tokens}
            settings = evaluate.model_copy(update=changed)
            found = evaluate_candidates(
                target,
                candidates,
                asked,
                evaluate=settings,
                stop_ids=stop_ids,
                progress=_named(progress, f"temperature {temperature:g}, batch size {batch_size}"),
            )
            cells += sweep_cells(found, evaluate=settings)
    return tuple(cells)


def sweep_cells(evaluations: Sequence[Evaluation], *, evaluate: EvaluateConfig) -> list[SweepCell]:
    """The cells of one alternating run, plain decoding first.

    Args:
        evaluations: of all candidates of the run.
        evaluate: temperature, batch size and bootstrap that they were made with.
    """
    contests = evaluations[0].contests
    over = Resamples(drawn_together([contest.prompt for contest in contests]), evaluate=evaluate)
    plain = over.speed([contest.plain for contest in contests])
    speeds = [over.speed([contest.speculative[each.position] for contest in contests]) for each in evaluations]
    fastest = max([plain, *speeds], key=lambda speed: speed.pooled)

    def cell(block_size: int, speed: Share, tau: Share, differing: int, *, lossless: bool) -> SweepCell:
        return SweepCell(
            block_size=block_size,
            temperature=evaluate.temperature,
            batch_size=evaluate.batch_size,
            acceptance_length=tau.pooled,
            acceptance_ci=over.interval(tau),
            tokens_per_s=speed.pooled,
            tokens_per_s_ci=over.interval(speed),
            speedup=(speed / plain).pooled,
            speedup_ci=over.interval(speed / plain),
            vs_best_ci=over.interval(speed / fastest),
            lossless=lossless,
            differing_prompts=differing,
        )

    return [
        cell(1, plain, over.plain_acceptance(), 0, lossless=True),
        *(
            cell(
                each.result.block_size,
                speed,
                over.acceptance(each),
                each.result.differing_prompts or 0,
                lossless=bool(each.result.lossless),
            )
            for each, speed in zip(evaluations, speeds, strict=True)
        ),
    ]


def best_cell(cells: Sequence[SweepCell]) -> SweepCell:
    """Of the lossless cells the one with the most tokens/s; plain decoding always is one of them."""
    return max((cell for cell in cells if cell.lossless), key=lambda cell: cell.tokens_per_s)


def _named(progress: Progress, label: str) -> Progress:
    """The candidates' labels are all block sizes: say the group instead."""
    return lambda _label, done, total: progress(f"sweep, {label}", done, total)
