"""A batch of rows in, checked samples in columns out: what each tokenizing process runs.

Invariant: a sample that comes out has two consecutive supervised tokens (hence an anchor), at most `max_length_tokens`
tokens, only ids that the target has rows for, and never the mask token; a row that goes in comes out as samples or as one
quarantined row, and every context of it that is in no sample as a quarantined part. A sample's id is unique in the data set.
The outcome depends on the batch alone, so batches may be tokenized anywhere, in any order.
The proofs about ids are made on whole conversations, before any limit could hide what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dflash.config import DataConfig
from dflash.data.answers import AnsweredConversation
from dflash.data.columns import SampleColumns, TokenizedSample
from dflash.data.conversations import parse_batch
from dflash.data.formats import RawBatch
from dflash.data.limits import apply_limit, qualified_id, sample_ids
from dflash.data.prompt_hashes import DIGEST_BYTES
from dflash.data.quarantine import PART_PREFIX, BadRowError
from dflash.data.render import ChatRenderer, Rendered
from dflash.data.seen_ids import id_digests
from dflash.data.synthetic import prompt_hash
from dflash.errors import DataError
from dflash.records import Conversation, QuarantinedRow

Row = Conversation | AnsweredConversation | QuarantinedRow
Batch = RawBatch | Sequence[Row]


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What a tokenizing process is made from.

    Attributes:
        data: rendering, limits and policies.
        label: of the source: qualifies the ids of its rows, and is the id, with the row's number, of rows without one.
        mask_token_id: must never occur; vocab_size: rows of the target's embedding.
    """

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    label: str
    mask_token_id: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """What became of one batch of R rows.

    Attributes:
        samples: n samples; `owners` [n]: the row that each was made from, ascending.
        bad: (row, why), ascending; also the parts that are left out of rows that became samples.
        dropped: (row, tokens of it that are in none of its samples), ascending; rows that are wholly used are not listed.
        id_rows, id_digests: [C] rows that are conversations, and 64 bits of a hash of their ids.
        ids, origins: [C] for the error about a duplicate.
        prompt_digests: hashes of the user turns of kept rows, end to end; `prompt_rows`: the row of each.
        answers, exact_answers: conversations among the kept rows that the target answered (exactly as rendered).
    """

    rows: int
    samples: SampleColumns
    owners: NDArray[np.int64]
    bad: list[tuple[int, QuarantinedRow]]
    dropped: list[tuple[int, int]]
    id_rows: list[int]
    id_digests: NDArray[np.uint64]
    ids: list[str]
    origins: list[str]
    prompt_digests: bytes
    prompt_rows: list[int]
    answers: int
    exact_answers: int


@dataclass(frozen=True, slots=True)
class _Used:
    """A row that became samples, and what of it did not."""

    samples: list[TokenizedSample]
    left_out: list[QuarantinedRow]
    dropped_tokens: int


class BatchTokenizer:
    """Renders, limits and checks; call it with a batch.

    Raises:
        DataError: template flags that the rendering itself decides.
        TargetError: the template is no valid Jinja.
    """

    def __init__(self, job: TokenizeJob) -> None:
        self._job = job
        self._renderer = make_renderer(job.tokenizer, job.data)

    def __call__(self, batch: Batch) -> TokenizedBatch:
        """Tokenize a batch.

        Raises:
            DataError: a token is the mask token or unknown to the target, or the template contradicts itself.
        """
        rows: Sequence[Row] = self._parsed(batch) if isinstance(batch, RawBatch) else batch
        answered = [(row, each) for row, each in enumerate(map(_answered, rows)) if each is not None]
        bad = [(row, each) for row, each in enumerate(rows) if isinstance(each, QuarantinedRow)]
        rendered = self._renderer.render_batch(
            [each.conversation for _, each in answered], finished=[each.finished for _, each in answered]
        )
        self._check_ids([each.conversation for _, each in answered], rendered)
        samples: list[TokenizedSample] = []
        owners: list[int] = []
        kept: list[tuple[int, AnsweredConversation]] = []
        dropped: list[tuple[int, int]] = []
        for (row, each), found in zip(answered, rendered, strict=True):
            outcome = found if isinstance(found, QuarantinedRow) else self._limited(each.conversation, found)
            if isinstance(outcome, QuarantinedRow):
                bad.append((row, outcome))
                continue
            samples += outcome.samples
            owners += [row] * len(outcome.samples)
            kept.append((row, each))
            bad += [(row, part) for part in outcome.left_out]
            if outcome.dropped_tokens:
                dropped.append((row, outcome.dropped_tokens))
        bad.sort(key=lambda entry: entry[0])
        prompts = [(row, text) for row, each in kept for text in _user_texts(each.conversation)]
        by_target = [each for _, each in kept if self._job.data.answers.regenerate]
        return TokenizedBatch(
            rows=len(rows),
            samples=SampleColumns.of(samples),
            owners=np.array(owners, np.int64),
            bad=bad,
            dropped=dropped,
            id_rows=[row for row, _ in answered],
            id_digests=id_digests([each.conversation.id for _, each in answered]),
            ids=[each.conversation.id for _, each in answered],
            origins=[each.conversation.origin for _, each in answered],
            prompt_digests=b"".join(bytes.fromhex(prompt_hash(text))[:DIGEST_BYTES] for _, text in prompts),
            prompt_rows=[row for row, _ in prompts],
            answers=len(by_target),
            exact_answers=sum(each.exact for each in by_target),
        )

    def _parsed(self, batch: RawBatch) -> list[Conversation | QuarantinedRow]:
        return parse_batch(batch, label=self._job.label, system_prompt=self._job.data.system_prompt)

    def _limited(self, conversation: Conversation, found: tuple[Rendered, ...]) -> _Used | QuarantinedRow:
        data = self._job.data
        pieces: list[Rendered] = []
        left_out: list[tuple[int, str]] = []
        for number, whole in enumerate(found, start=1):
            if len(whole) <= data.max_length_tokens and whole.has_pair:
                pieces.append(whole)
                continue
            try:
                pieces += apply_limit(whole, limit=data.max_length_tokens, policy=data.over_long).samples
            except BadRowError as error:
                left_out.append((number, error.row.reason))
        over_long = next((reason for _, reason in left_out if reason.startswith("over_long")), None)
        if not pieces or (over_long is not None and data.over_long == "error"):
            return QuarantinedRow(conversation.origin, over_long or left_out[-1][1])
        name = qualified_id(conversation.id, label=self._job.label, row=conversation.origin.rpartition(":")[2])
        return _Used(
            samples=[
                TokenizedSample(own, conversation.kind, piece.input_ids, piece.loss_spans, piece.turns)
                for own, piece in zip(sample_ids(name, len(pieces)), pieces, strict=True)
            ],
            left_out=[QuarantinedRow(conversation.origin, _part_reason(why, number, of=len(found))) for number, why in left_out],
            dropped_tokens=sum(map(len, found)) - sum(map(len, pieces)),
        )

    def _check_ids(self, conversations: Sequence[Conversation], rendered: Sequence[tuple[Rendered, ...] | QuarantinedRow]) -> None:
        """Prove that no id is the mask token's or out of range."""
        mask, rows = self._job.mask_token_id, self._job.vocab_size
        for conversation, found in zip(conversations, rendered, strict=True):
            for each in found if isinstance(found, tuple) else ():
                if int(each.input_ids.max(initial=0)) >= rows or (each.input_ids == mask).any():
                    self._refuse_ids(each.input_ids, conversation)

    def _refuse_ids(self, ids: NDArray[np.int32], conversation: Conversation) -> None:
        where, mask = f"{conversation.origin}: sample {conversation.id!r}", self._job.mask_token_id
        places = np.flatnonzero(ids == mask)
        if len(places):
            token = repr(self._job.tokenizer.convert_ids_to_tokens(mask))
            raise DataError(
                f"{where} uses the mask token {token} (id {mask}) at token {places[0]}",
                remedy="choose a target.mask_token that the corpus never uses, or remove the sample",
            )
        raise DataError(
            f"{where} has token id {ids.max()}, the target's embedding has {self._job.vocab_size} rows",
            remedy="use the tokenizer that belongs to the target",
        )


def make_renderer(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> ChatRenderer:
    """The renderer that a configuration describes."""
    return ChatRenderer(
        tokenizer,
        supervise=data.supervise,
        supervise_reasoning=data.supervise_reasoning,
        template_flags=data.template_flags,
    )


def _answered(row: Row) -> AnsweredConversation | None:
    if isinstance(row, Conversation):
        return AnsweredConversation(row, finished=True, exact=True)
    return row if isinstance(row, AnsweredConversation) else None


def _part_reason(reason: str, number: int, *, of: int) -> str:
    code, _, detail = reason.partition(": ")
    return f"{PART_PREFIX}{code}: context {number} of {of}: {detail}"


def _user_texts(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages if message.role == "user"]
