"""Decoding one or several prompts, plain and speculative, greedy or sampled, on the same target cache.

Invariant: both return the same tokens, greedy or by the same keyed samples, up to near-ties of the floating-point kernels; the
contract and its proof are in `lossless`. Nothing behind the first stop id or the length limit is returned.

The speculative loop knows no drafter: a proposer offers up to K-1 tokens behind each row's last one (the anchor), the target
judges anchors and proposals in one forward, each row commits the accepted drafts and the target's own next token, and the
target's cache is rolled back to them, row by row. The last committed token is always the next anchor: it has no cache entry
and no features yet. A finished row's place is taken by the next prompt, in place; when nobody waits any more it is dropped.

Times: the prefill and its first token are left out on both sides; the drafter's own pass over the prompt's features is
part of the first draft and counts. In a batch a row's time is its share: what passes is divided among the unfinished rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.evaluate.judge import judge
from dflash.evaluate.proposal import Committed, Joining, Proposer
from dflash.evaluate.stopwatch import SharedTime, Stopwatch
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
    """A prompt in the batch: prompt and committed tokens; `over` until its place is taken or dropped."""

    index: int
    key: str
    prompt_tokens: int
    text: list[int]
    verifications: list[Verification] = field(default_factory=list)
    prefill_s: float = 0.0
    over: bool = False

    @property
    def answered(self) -> int:
        return len(self.text) - self.prompt_tokens

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.text[self.prompt_tokens :])


def plain_decode(target: Target, prompt_ids: Sequence[int], *, limits: DecodeLimits) -> PlainTrace:
    """Greedy decoding of one prompt, one token a forward; see `plain_decode_batch`."""
    (trace,) = plain_decode_batch(target, [prompt_ids], keys=[""], limits=limits, sampling=GREEDY)
    return trace


@torch.inference_mode()
def plain_decode_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[str],
    limits: DecodeLimits,
    sampling: Sampling,
    rows: int | None = None,
) -> list[PlainTrace]:
    """Decoding without drafts, one token of each row a forward.

    Args:
        target: frozen target.
        prompts: token ids, at least one each.
        keys: one name a prompt; samples are keyed by it.
        limits: where answers end.
        sampling: greedy or sampled.
        rows: prompts that are decoded at once, the next one joins where one has ended; all of them if None.

    Returns:
        One trace a prompt: the answer with its times.

    Raises:
        TargetError: an empty prompt, or several on a target whose rows cannot be stacked.
    """
    loop = _PlainLoop(target, limits, sampling)
    waiting = _Waiting(prompts, keys, rows)
    while waiting.rows or loop.going:
        if joining := waiting.next_for(len(loop.going)):
            loop.admit(joining)
        else:
            loop.step()
    return [loop.traces[index] for index in range(len(prompts))]


class _Waiting:
    """Prompts that have not begun."""

    def __init__(self, prompts: Sequence[Sequence[int]], keys: Sequence[str], rows: int | None) -> None:
        self.rows = [_Row(place, key, len(ids), [*ids]) for place, (key, ids) in enumerate(zip(keys, prompts, strict=True))]
        self._limit = len(prompts) if rows is None else rows

    def next_for(self, running: int) -> list[_Row]:
        """Those that join `running` rows now, taken out; none if there is no room, or nobody left."""
        free = self._limit - running
        joining, self.rows = self.rows[:free], self.rows[free:]
        return joining


class _Batch:
    """Rows on their way, in the order of the cache's rows; those that are over stay until they are replaced or dropped."""

    _cache: TargetCache

    def __init__(self, target: Target, limits: DecodeLimits, sampling: Sampling, *, stages: Sequence[str]) -> None:
        self._target, self._limits, self._sampling = target, limits, sampling
        self._watch = Stopwatch(target.device)
        self._clock = SharedTime(self._watch, stages=stages)
        self.rows: list[_Row] = []

    @property
    def going(self) -> list[int]:
        """Places of the unfinished rows."""
        return [place for place, row in enumerate(self.rows) if not row.over]

    def _prefill(self, joining: list[_Row], *, with_taps: bool) -> tuple[Tensor, Tensor | None, TargetCache]:
        """Feed new prompts: the target's first tokens [b, 1], their taps and their cache; nobody is charged for it."""
        if self.going:
            self._charge()
        started_s = self._watch.now_s()
        logits, features, cache = self._target.prefill([row.text for row in joining], with_taps=with_taps)
        chosen = choose(logits[:, None], self._sampling, keys=[row.key for row in joining], firsts=[0] * len(joining))
        for row in joining:
            row.prefill_s = (self._watch.now_s() - started_s) / len(joining)
        self._clock.skip()
        return chosen, features, cache

    def _seat(self, joining: list[_Row], cache: TargetCache) -> list[int]:
        """Places of new rows: of some that are over, or all of a new batch where nobody is left."""
        going = self.going
        if not going:
            self.rows, self._cache = joining, cache
            return list(range(len(joining)))
        places = [place for place, row in enumerate(self.rows) if row.over][: len(joining)]
        for place, row in zip(places, joining, strict=True):
            self.rows[place] = row
        self._cache.replace_rows(places, cache)
        return places

    def _charge(self) -> None:
        self._clock.charge([row.index for row in self.rows if not row.over])


class _PlainLoop(_Batch):
    """One token a forward."""

    _choice: Tensor

    def __init__(self, target: Target, limits: DecodeLimits, sampling: Sampling) -> None:
        super().__init__(target, limits, sampling, stages=())
        self.traces: dict[int, PlainTrace] = {}

    def admit(self, joining: list[_Row]) -> None:
        """Feed their prompts and commit the target's first tokens."""
        choice, _, cache = self._prefill(joining, with_taps=False)
        places = self._seat(joining, cache)
        if len(places) == len(self.rows):
            self._choice = choice
        else:
            self._choice[places] = choice
        self._commit(places, choice)

    def step(self) -> None:
        """One token of every row."""
        going = self.going
        if len(going) < len(self.rows):
            self.rows, self._choice = [self.rows[place] for place in going], self._choice[going]
            self._cache.select_rows(going)
        logits = self._target.logits_cached(self._choice, self._cache)
        keys, firsts = [row.key for row in self.rows], [row.answered for row in self.rows]
        self._choice = choose(logits, self._sampling, keys=keys, firsts=firsts)
        self._commit(range(len(self.rows)), self._choice)

    def _commit(self, places: Sequence[int], choice: Tensor) -> None:
        """Commit the choices [b, 1] of some rows and close finished ones."""
        ended = []
        for place, token in zip(places, choice[:, 0].tolist(), strict=True):
            row = self.rows[place]
            if self._limits.reaching([token], have=row.answered)[1]:
                ended.append(row)
            row.text.append(token)
        if ended:
            self._charge()
        for row in ended:
            row.over = True
            self.traces[row.index] = PlainTrace(row.answer, row.prefill_s, self._clock.of(row.index)[0])


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
    rows: int | None = None,
) -> list[SpeculativeTrace]:
    """Decoding by blocks, lossless for any proposer.

    Args:
        target: frozen target.
        proposer: guesses the tokens after an anchor.
        prompts: token ids, at least one each.
        keys: one name a prompt; samples are keyed by it.
        limits: where answers end.
        sampling: greedy or sampled.
        rollback: `target.keep`; anything else is a negative control.
        rows: prompts that are decoded at once, the next one joins where one has ended; all of them if None.

    Returns:
        One trace a prompt: the answer, one `Verification` a target forward, and times.

    Raises:
        TargetError: an empty prompt, or a target whose rows cannot be rolled back (together).
    """
    loop = _Loop(target, proposer, limits, sampling, rollback)
    waiting = _Waiting(prompts, keys, rows)
    while waiting.rows or loop.going:
        if joining := waiting.next_for(len(loop.going)):
            loop.admit(joining)
        else:
            loop.verify()
    return [loop.traces[index] for index in range(len(prompts))]


class _Loop(_Batch):
    """One block a forward.

    `_kept` says how many positions of the latest features are committed and not drafted from yet, for each row.
    """

    def __init__(self, target: Target, proposer: Proposer, limits: DecodeLimits, sampling: Sampling, rollback: Rollback) -> None:
        super().__init__(target, limits, sampling, stages=("target", "drafter"))
        self._proposer, self._rollback = proposer, rollback
        self._features: Tensor | None = None
        self._kept: list[int] = []
        self.traces: dict[int, SpeculativeTrace] = {}

    def admit(self, joining: list[_Row]) -> None:
        """Feed their prompts and commit the target's first tokens."""
        first, features, cache = self._prefill(joining, with_taps=self._proposer.needs_features)
        places, chosen = self._seat(joining, cache), first.tolist()
        if len(places) == len(self.rows):
            self._proposer.begin([row.key for row in joining])
            self._features, self._kept = features, [row.prompt_tokens for row in joining]
        else:
            taps = [None if features is None else features[new, : row.prompt_tokens][None] for new, row in enumerate(joining)]
            with self._watch.stage("drafter"):
                self._proposer.replace_rows([Joining(*new) for new in zip(places, [row.key for row in joining], taps, strict=True)])
            for place in places:
                self._kept[place] = 0
        self._commit(places, chosen, [self._limits.reaching(tokens, have=0)[1] for tokens in chosen])

    def verify(self) -> None:
        """Draft, judge, commit, roll back: one target forward for all rows."""
        self._drop_finished()
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
            # A finished row needs no rollback of its own: it takes the longest of the others and is replaced or dropped.
            self._kept = [max(going) if over else kept for kept, over in zip(self._kept, ended, strict=True)]
            self._rollback(self._cache, self._kept)
            self._features = None if self._features is None else self._features[:, : max(going)]
        self._commit(range(len(rows)), chosen, ended)

    def _commit(self, places: Sequence[int], chosen: Sequence[Sequence[int]], ended: Sequence[bool]) -> None:
        """Commit tokens of some rows and close those that have ended."""
        for place, tokens in zip(places, chosen, strict=True):
            self.rows[place].text += tokens
        if any(ended):
            self._charge()
            for place, over in zip(places, ended, strict=True):
                if over:
                    self.rows[place].over = True
                    self.traces[self.rows[place].index] = self._trace(self.rows[place])

    def _drop_finished(self) -> None:
        """Nobody waits for the places of finished rows."""
        going = self.going
        if len(going) < len(self.rows):
            self.rows, self._kept = [self.rows[place] for place in going], [self._kept[place] for place in going]
            self._cache.select_rows(going)
            self._proposer.select_rows(going)
            self._features = None if self._features is None else self._features[going]

    def _trace(self, row: _Row) -> SpeculativeTrace:
        decode_s, target_s, drafter_s = self._clock.of(row.index)
        verified = tuple(row.verifications)
        return SpeculativeTrace(row.answer, verified, row.prefill_s, decode_s, target_s=target_s, drafter_s=drafter_s)
