"""The record of an evaluation through a server: the same one as in process, with None for what the engine did not tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.config import EvaluateConfig
from dflash.errors import EvaluationError
from dflash.evaluate.bootstrap import IntArray, resample_groups
from dflash.evaluate.lossless import NearTie
from dflash.evaluate.metrics import VerificationTable, acceptance_metrics, survival_untruncated
from dflash.evaluate.prompts import EvalPrompt, drawn_together, repeated_prompts
from dflash.evaluate.result_slices import prompt_set_entries
from dflash.evaluate.served_account import Account, figures_of_all, figures_of_answers, reconcile, steps_table
from dflash.evaluate.served_client import Known
from dflash.evaluate.served_counters import Counters
from dflash.evaluate.served_replies import NO_DRAFTING, Drafting, ServedReply
from dflash.evaluate.slices import alarms, bigram_accuracy, slice_by_context, slice_by_label
from dflash.records import EvaluationResult

Judge = Callable[[EvalPrompt, tuple[int, ...], tuple[int, ...]], NearTie]
"""Judges two different greedy answers, the plain one first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the servers said.

    Attributes:
        prompts: what was asked.
        replies: of the speculating server, one a prompt.
        plain: of the one without a drafter; None if there is none.
        counters: one a prompt, one of all, or none where the replies hold accounts themselves.
        known: of the speculating server, at `address`.
        seconds: of the whole asking.
    """

    prompts: tuple[EvalPrompt, ...]
    replies: tuple[ServedReply, ...]
    plain: tuple[ServedReply, ...] | None
    counters: tuple[Counters, ...]
    known: Known
    address: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculative against plain answers.

    Attributes:
        differing: prompts whose answers differ, with the judgement where there is one; None without plain answers.
    """

    differing: dict[int, NearTie | None] | None

    @property
    def unexcused(self) -> list[int]:
        """Prompts whose difference nothing excuses."""
        return [index for index, tie in (self.differing or {}).items() if tie is None or not tie.excused]


def accounts_of(asked: Asked, *, expected: int) -> tuple[tuple[Account, ...], int]:
    """One account an answer, or one of all answers, and the drafts of a proposal (`expected` if the server does not tell).

    Raises:
        EvaluationError: the server drafted nothing, or its accounts contradict its answers.
    """
    replies = asked.replies
    told = _told(asked)
    positions = asked.known.positions or max(map(_most_drafts, told)) or expected
    if sum(each.verifications for each in told) == 0:
        _nothing_verified(replies)
    if len(told) != len(replies):
        tokens = sum(reply.completion_tokens for reply in replies)
        whole = reconcile(told[0], answers=len(replies), completion_tokens=tokens, positions=positions, what="all answers")
        return (whole,), positions
    accounts = tuple(
        reconcile(
            each, answers=1, completion_tokens=reply.completion_tokens, positions=positions, what=f"the answer to {prompt.id!r}"
        )
        for each, reply, prompt in zip(told, replies, asked.prompts, strict=True)
    )
    return accounts, positions


def compare(asked: Asked, *, judge: Judge | None, sampled: bool) -> Comparison:
    """Compare answers token by token, or by their text where a server returns no ids.

    Sampled answers are not compared: an engine's seeds do not give speculative and plain decoding the same sample.
    """
    if asked.plain is None or sampled:
        return Comparison(None)
    differing: dict[int, NearTie | None] = {}
    for index, (prompt, one, other) in enumerate(zip(asked.prompts, asked.plain, asked.replies, strict=True)):
        if one.ids is None or other.ids is None:
            if (one.text, one.completion_tokens) != (other.text, other.completion_tokens):
                differing[index] = None
        elif one.ids != other.ids:
            differing[index] = None if judge is None else judge(prompt, one.ids, other.ids)
    return Comparison(differing)


def served_result(
    asked: Asked,
    accounts: Sequence[Account],
    comparison: Comparison,
    *,
    evaluate: EvaluateConfig,
    label: str,
    positions: tuple[int, int],
    concurrency: int,
) -> tuple[EvaluationResult, VerificationTable | None]:
    """The record, and one row a verification where the engine names them.

    Args:
        asked: what the servers said.
        accounts: from `accounts_of`.
        comparison: from `compare`.
        evaluate: bootstrap.
        label: name of the drafter in results.
        positions: drafts of a proposal, as served and as expected.
        concurrency: prompts under way at once; times are compared one at a time only.
    """
    prompts, differing = asked.prompts, comparison.differing
    table = steps_table(asked.replies, accounts) if len(accounts) == len(asked.replies) else None
    counts = resample_groups(drawn_together(prompts), samples=evaluate.bootstrap_samples, seed=evaluate.seed)
    figures, slices, found = _figures(asked, accounts, table, positions=positions[0], counts=counts, confidence=evaluate.confidence)
    unjudged = differing is not None and any(tie is None for tie in differing.values())
    ties = sum(tie is not None and tie.excused for tie in (differing or {}).values())
    slow, fast, speedup = _times(asked) if concurrency == 1 else (None, None, None)
    result = EvaluationResult(
        drafter=label,
        step=None,
        dataset="+".join(dict.fromkeys(prompt.dataset for prompt in prompts)),
        prompts=len(prompts),
        block_size=positions[0] + 1,
        temperature=evaluate.temperature,
        template_flags=prompts[0].template_flags,
        confidence=evaluate.confidence,
        slices=slices,
        plain_s_per_token=slow,
        speculative_s_per_token=fast,
        speedup=speedup,
        lossless=None if differing is None else not comparison.unexcused,
        differing_prompts=None if differing is None else len(differing),
        near_tie_prompts=None if differing is None or unjudged else ties,
        divergence_frac=None if differing is None else len(differing) / len(prompts),
        batch_size=concurrency,
        warnings=(*_faults(prompts, comparison), *_mismatch(positions), *found, *repeated_prompts(prompts)),
        prompt_sets=prompt_set_entries(prompts),
        **figures,
    )
    return result, table


def _most_drafts(told: Drafting) -> int:
    """Drafts of the longest proposal that an account tells of, 0 where it tells of none."""
    bins = 0 if told.histogram is None else len(told.histogram) - 1
    return max(bins, *(drafted for drafted, _ in told.steps or ()), 0)


def _told(asked: Asked) -> list[Drafting]:
    """What the server told: by counters, or in its replies."""
    if asked.counters:
        return [since.drafting() for since in asked.counters]
    # An answer that the prefill ended has nothing to account for.
    accounts = [reply.drafting or (NO_DRAFTING if reply.completion_tokens == 1 else None) for reply in asked.replies]
    told = [account for account in accounts if account is not None]
    if len(told) < len(asked.replies):
        first = next(prompt.id for prompt, account in zip(asked.prompts, accounts, strict=True) if account is None)
        raise EvaluationError(
            f"{len(asked.replies) - len(told)} of {len(asked.replies)} answers came without an account of their verifications, "
            f"first {first!r}",
            remedy="serve by one engine with one drafter; docs/evaluation.md says which versions are known",
        )
    return told


def _figures(
    asked: Asked,
    accounts: Sequence[Account],
    table: VerificationTable | None,
    *,
    positions: int,
    counts: IntArray,
    confidence: float,
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Figures, slices and alarms, as many as the engine's accounts allow."""
    if table is not None:
        figures, slices = _whole_figures(table, asked.prompts, positions, counts, confidence)
        bigram = bigram_accuracy([reply.ids for reply in asked.plain or asked.replies if reply.ids is not None])
        datasets = [prompt.dataset for prompt in asked.prompts]
        found = alarms(
            table, prompts=len(datasets), counts=counts, confidence=confidence, bigram_level=bigram, datasets=datasets
        )  # fmt: skip
        return figures, slices, found
    if len(accounts) == len(asked.replies):
        figures = figures_of_answers(accounts, counts=counts, confidence=confidence)
    else:
        figures = figures_of_all(accounts[0])
    stuck = figures["committed_tokens"] == figures["verifications"]
    sentence = "acceptance length is exactly 1.00: no draft was ever accepted; look at the mask token, vocabulary and tap layers"
    return figures, {}, [sentence] if stuck else []


def _whole_figures(
    table: VerificationTable, prompts: Sequence[EvalPrompt], positions: int, counts: IntArray, confidence: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All figures and slices, from single verifications."""
    settings: dict[str, Any] = {"positions": positions, "counts": counts, "confidence": confidence}
    figures = asdict(acceptance_metrics(table, prompts=len(prompts), **settings))
    figures["survival_untruncated_per_position"] = survival_untruncated(table, positions=positions)
    slices: dict[str, Any] = {}
    for name in ("kind", "dataset", "turn", "language", "domain"):
        labels = [getattr(prompt, name) for prompt in prompts]
        parts = slice_by_label(table, [None if label is None else str(label) for label in labels], **settings)
        if parts:
            slices[name] = parts
    slices["context_tokens"] = slice_by_context(table, **settings)
    return figures, slices


def _times(asked: Asked) -> tuple[float | None, float | None, float | None]:
    """Plain and speculative time a token, and the speed-up; None where an engine does not tell its times."""
    fast, slow = _s_per_token(asked.replies), None if asked.plain is None else _s_per_token(asked.plain)
    return slow, fast, None if slow is None or not fast else slow / fast


def _s_per_token(replies: Sequence[ServedReply]) -> float | None:
    """Time behind the first token over those tokens; None unless every answer has its time."""
    times = [reply.decode_s for reply in replies if reply.decode_s is not None]
    tokens = sum(reply.completion_tokens - 1 for reply in replies)
    return sum(times) / tokens if len(times) == len(replies) and tokens else None


def _faults(prompts: Sequence[EvalPrompt], comparison: Comparison) -> list[str]:
    wrong = comparison.unexcused
    if not wrong:
        return []
    unjudged = any(tie is None for tie in (comparison.differing or {}).values())
    hint = "; whether they are near-ties was not judged (evaluate.server.judge_differences)" if unjudged else ""
    sentence = (
        f"not lossless: {len(wrong)} of {len(prompts)} answers differ from those of the same engine without a drafter, first "
        f"{prompts[wrong[0]].id!r}{hint}"
    )
    return [sentence]


def _mismatch(positions: tuple[int, int]) -> list[str]:
    served, expected = positions
    if served == expected:
        return []
    return [f"the server drafts {served} tokens a block, the run's blocks have {expected}"]


def _nothing_verified(replies: Sequence[ServedReply]) -> None:
    if all(reply.completion_tokens == 1 for reply in replies):
        raise EvaluationError(
            "every answer ended with its first token: nothing was verified",
            remedy="raise evaluate.max_new_tokens, or check the chat template: the target has nothing to say to these prompts",
        )
    raise EvaluationError(
        "the server verified no draft at all in these answers",
        remedy="look at its log: some settings and requests switch speculation off without an error",
    )
