"""The table of a drafter and its baselines, all of one alternating run on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.config import EvaluateConfig
from dflash.evaluate.paired import Resamples, Share
from dflash.evaluate.prompts import drawn_together
from dflash.evaluate.run import Evaluation
from dflash.evaluate.text import aligned, clean_text
from dflash.records import RivalRow, RivalTable

PLAIN = "plain"
HEADS = ("", "tau", "interval", "tokens/s", "speed-up", "gain of ours")


def rival_table(judged: Evaluation, baselines: Sequence[Evaluation], *, evaluate: EvaluateConfig, machine: str) -> RivalTable:
    """Everyone's figures, and what the judged drafter is better by, prompt by prompt.

    Args:
        judged: the drafter that is judged.
        baselines: from the same call of `evaluate_candidates`.
        evaluate: settings of that call.
        machine: what it ran on.

    Returns:
        Plain decoding first, the judged drafter last.
    """
    contests = judged.contests
    over = Resamples(drawn_together([contest.prompt for contest in contests]), evaluate=evaluate)
    plain = over.speed([contest.plain for contest in contests])
    own_speed = over.speed([contest.speculative[judged.position] for contest in contests])
    own_tau = over.acceptance(judged)

    def row(speed: Share, tau: Share, *, ours: bool, **named: Any) -> RivalRow:
        speedup, gain, faster = speed / plain, own_tau - tau, own_speed / speed
        return RivalRow(
            prompts=len(contests),
            acceptance_length=tau.pooled,
            acceptance_ci=over.interval(tau),
            tokens_per_s=speed.pooled,
            tokens_per_s_ci=over.interval(speed),
            speedup=speedup.pooled,
            speedup_ci=over.interval(speedup),
            gain=None if ours else gain.pooled,
            gain_ci=None if ours else over.interval(gain),
            faster=None if ours else faster.pooled,
            faster_ci=None if ours else over.interval(faster),
            **named,
        )

    rows = [row(plain, over.plain_acceptance(), ours=False, label=PLAIN, step=None, block_size=1, lossless=None)]
    for each in (*baselines, judged):
        ours = each is judged
        speed = own_speed if ours else over.speed([contest.speculative[each.position] for contest in contests])
        result = each.result
        rows.append(
            row(
                speed,
                own_tau if ours else over.acceptance(each),
                ours=ours,
                label=result.drafter,
                step=result.step,
                block_size=result.block_size,
                lossless=result.lossless,
            )
        )
    first = judged.result
    return RivalTable(first.dataset, first.temperature, first.batch_size, first.confidence, machine=machine, rows=tuple(rows))


def rival_lines(table: RivalTable) -> list[str]:
    """The table as lines of text, at most 80 columns with labels of the usual length."""
    rows = [HEADS]
    for row in table.rows:
        name = clean_text(row.label if row.lossless in (None, True) else f"{row.label} (NOT LOSSLESS)")
        interval = "" if row.acceptance_ci is None or row.label == PLAIN else "{:.2f} to {:.2f}".format(*row.acceptance_ci)
        behind = "" if row.gain is None else f"{row.gain:.2f}{_ends(row.gain_ci)}"
        rows.append(
            (_cut(name), f"{row.acceptance_length:.2f}", interval, f"{row.tokens_per_s:.0f}", f"{row.speedup:.2f}x", behind)
        )
    return aligned(rows, left=1)


def _ends(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"


def _cut(label: str) -> str:
    longest = 20
    return label if len(label) <= longest else f"{label[: longest - 3]}..."
