"""Decoding one or several prompts, plain and speculative, greedy or sampled, on the same target cache.

Invariant: both return the same tokens, greedy or by the same keyed samples, up to near-ties of the floating-point kernels; the
contract and its proof are in `lossless`. Nothing behind the first stop id or the length limit is returned.

The speculative loop knows no drafter: a proposer offers up to K-1 tokens behind each row's last one (the anchor), the target
judges anchors and proposals in one forward, each row commits the accepted drafts and the target's own next token, and the
target's cache is rolled back to them, row by row. The last committed token is always the next anchor: it has no cache entry
and no features yet. Finished rows are dropped from the batch.

Times: the prefill and its first token are left out on both sides; the drafter's own pass over the prompt's features is
part of the first draft and counts. In a batch a row's time is the batch's up to the row's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.evaluate.judge import judge
from dflash.evaluate.proposal import Committed, Proposer
from dflash.evaluate.stopwatch import Stopwatch
from dflash.model.sampling import GREEDY, Sampling, choose
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache

Rollback = Callable[[TargetCache, Sequence[int]], None]
"""Leaves only each row's first tokens of the latest forward in the cache (`Target.keep`)."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Where an answer ends: at the first of `stop_ids` (which is kept), or after `max_new_tokens`."""

    max_new_tokens: int
    stop_ids: frozenset[int]

    def reaching(self, new: Sequence[int], *, have: int) -> tuple[int, bool]:
        """How many of the `new` tokens reach an answer that holds `have` already, and whether it ends with them."""
        room = self.max_new_tokens - have
        for index, token in enumerate(new[:room]):
            if token in self.stop_ids:
                return index + 1, True
        return min(len(new), room), len(new) >= room


@dataclass(frozen=True, slots=True)
class Verification:
    """One target forward over a block.

    Attributes:
        context_tokens: tokens in front of the anchor.
        drafted: proposed tokens; accepted: of these, the longest prefix that the target chose itself.
        counted: tokens that reached the answer, 1..accepted+1.
    """

    context_tokens: int
    drafted: int
    accepted: int
    counted: int

    @property
    def committed(self) -> int:
        """Accepted drafts and the target's own token, whether or not they reach the answer."""
        return self.accepted + 1


@dataclass(frozen=True, slots=True)
class PlainTrace:
    """One token a target forward."""

    tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class SpeculativeTrace:
    """What one prompt gave; `tokens` starts with the prefill's own token, which no verification made.

    Attributes:
        target_s, drafter_s: of `decode_s`, spent in the target's forwards and in the proposer.
    """

    tokens: tuple[int, ...]
    verifications: tuple[Verification, ...]
    prefill_s: float
    decode_s: float
    target_s: float
    drafter_s: float


@dataclass(slots=True)
class _Row:
    """One unfinished prompt: prompt and committed tokens."""

    index: int
    key: str
    prompt_tokens: int
    text: list[int]
    verifications: list[Verification] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.text) - self.prompt_tokens


@torch.inference_mode()
def plain_decode(target: Target, prompt_ids: Sequence[int], *, limits: DecodeLimits) -> PlainTrace:
    """Greedy decoding, one token a forward.

    Args:
        target: frozen target.
        prompt_ids: token ids, at least one.
        limits: where the answer ends.

    Returns:
        The answer with its times.
    """
    watch = Stopwatch(target.device)
    started_s = watch.now_s()
    logits, _, cache = target.prefill([prompt_ids], with_taps=True)
    choice = choose(logits[:, None], GREEDY, keys=(), firsts=())
    tokens = [int(choice)]
    prefilled_s = watch.now_s()
    ended = limits.reaching(tokens, have=0)[1]
    while not ended:
        choice = choose(target.logits_cached(choice, cache), GREEDY, keys=(), firsts=())
        token = int(choice)
        ended = limits.reaching([token], have=len(tokens))[1]
        tokens.append(token)
    return PlainTrace(tuple(tokens), prefilled_s - started_s, watch.now_s() - prefilled_s)


def speculative_decode(
    target: Target, proposer: Proposer, prompt_ids: Sequence[int], *, limits: DecodeLimits, rollback: Rollback
) -> SpeculativeTrace:
    """Greedy decoding of one prompt by blocks; see `speculative_decode_batch`."""
    (trace,) = speculative_decode_batch(
        target, proposer, [prompt_ids], keys=[""], limits=limits, sampling=GREEDY, rollback=rollback
    )
    return trace


@torch.inference_mode()
def speculative_decode_batch(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[str],
    limits: DecodeLimits,
    sampling: Sampling,
    rollback: Rollback,
) -> list[SpeculativeTrace]:
    """Decoding by blocks, lossless for any proposer.

    Args:
        target: frozen target.
        proposer: guesses the tokens after an anchor.
        prompts: token ids of each row, at least one each.
        keys: one name a row; samples are keyed by it.
        limits: where answers end.
        sampling: greedy or sampled.
        rollback: `target.keep`; anything else is a negative control.

    Returns:
        One trace a prompt: the answer, one `Verification` a target forward, and times.

    Raises:
        TargetError: an empty prompt, or a target whose rows cannot be rolled back (together).
    """
    loop = _Loop(target, proposer, limits, sampling, rollback)
    if prompts:
        loop.prefill(prompts, keys)
    while loop.rows:
        loop.verify()
    return [loop.traces[index] for index in range(len(prompts))]


class _Loop:
    """One batch on its way; `rows` are the unfinished ones, in the order of the cache's rows."""

    def __init__(self, target: Target, proposer: Proposer, limits: DecodeLimits, sampling: Sampling, rollback: Rollback) -> None:
        self._target, self._proposer, self._limits = target, proposer, limits
        self._sampling, self._rollback = sampling, rollback
        self._watch = Stopwatch(target.device)
        self._started_s = self._prefilled_s = 0.0
        self._features: Tensor | None = None
        self._kept: list[int] = []
        self.rows: list[_Row] = []
        self.traces: dict[int, SpeculativeTrace] = {}

    def prefill(self, prompts: Sequence[Sequence[int]], keys: Sequence[str]) -> None:
        """Feed the prompts and commit the target's first tokens."""
        self._started_s = self._watch.now_s()
        self._proposer.begin(keys)
        logits, self._features, self._cache = self._target.prefill(prompts, with_taps=self._proposer.needs_features)
        self._kept = [len(prompt) for prompt in prompts]
        chosen = choose(logits[:, None], self._sampling, keys=keys, firsts=[0] * len(prompts)).tolist()
        self.rows = [
            _Row(index, key, len(prompt), [*prompt]) for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True))
        ]
        self._prefilled_s = self._watch.now_s()
        self._go_on([self._limits.reaching(tokens, have=0)[1] for tokens in chosen], chosen)

    def verify(self) -> None:
        """Draft, judge, commit, roll back: one target forward for all rows."""
        rows = self.rows
        anchors = torch.tensor([row.text[-1:] for row in rows], device=self._target.device)
        committed = Committed([row.text for row in rows], anchors, self._features, self._kept)
        with self._watch.stage("drafter"):
            proposal = self._proposer.propose(committed)
        drafts = proposal.tokens.shape[1]
        block = torch.cat((anchors, proposal.tokens), dim=1)
        with self._watch.stage("target"):
            if self._proposer.needs_features:
                logits, self._features = self._target.forward_cached(block, self._cache)
            else:
                logits = self._target.logits_cached(block, self._cache)
        accepted, chosen = judge(
            proposal, logits, self._sampling, keys=[row.key for row in rows], firsts=[row.answered for row in rows]
        )
        ended = []
        for place, (row, agreed) in enumerate(zip(rows, accepted, strict=True)):
            counted, over = self._limits.reaching(chosen[place][: agreed + 1], have=row.answered)
            drafted = drafts if proposal.counts is None else proposal.counts[place]
            row.verifications.append(Verification(len(row.text) - 1, drafted, agreed, counted))
            chosen[place] = chosen[place][:counted]
            ended.append(over)
        self._kept = [agreed + 1 for agreed in accepted]
        going = [kept for kept, over in zip(self._kept, ended, strict=True) if not over]
        if going:
            # A finished row needs no rollback of its own: it takes the longest of the others and is dropped.
            self._rollback(self._cache, [max(going) if over else kept for kept, over in zip(self._kept, ended, strict=True)])
        self._go_on(ended, chosen)

    def _go_on(self, ended: Sequence[bool], chosen: Sequence[Sequence[int]]) -> None:
        """Commit tokens, close finished rows and drop them."""
        for row, over, tokens in zip(self.rows, ended, chosen, strict=True):
            row.text += tokens
            if over:
                self.traces[row.index] = self._trace(row)
        if any(ended):
            going = [place for place, over in enumerate(ended) if not over]
            self.rows = [self.rows[place] for place in going]
            self._kept = [self._kept[place] for place in going]
            if going:
                self._cache.select_rows(going)
                self._proposer.select_rows(going)
                self._features = None if self._features is None else self._features[going]
        if self._features is not None and self._kept:
            self._features = self._features[:, : max(self._kept)]

    def _trace(self, row: _Row) -> SpeculativeTrace:
        ended_s = self._watch.now_s()
        return SpeculativeTrace(
            tuple(row.text[row.prompt_tokens :]),
            tuple(row.verifications),
            self._prefilled_s - self._started_s,
            ended_s - self._prefilled_s,
            target_s=self._watch.seconds("target"),
            drafter_s=self._watch.seconds("drafter"),
        )
