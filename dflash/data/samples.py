"""Conversations in, checked samples out: rendering, the limits on length, the proofs about tokens, the counts.

Invariant: a sample that was added has two consecutive supervised tokens (hence an anchor), at most
`max_length_tokens` tokens, only ids that the target has rows for, and never the mask token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash.config import DataConfig
from dflash.data.answers import AnsweredConversation
from dflash.data.buckets import bucket_of
from dflash.data.quarantine import BadRowError, Quarantine
from dflash.data.render import ChatRenderer, Rendered, has_supervised_pair
from dflash.data.shards import ShardWriter, TokenizedSample
from dflash.data.synthetic import prompt_hash
from dflash.errors import DataError
from dflash.records import BucketStats, Conversation, QuarantinedRow, ShardEntry

PREVIEW_PER_BUCKET = 6
"""Samples of each bucket that the preview page shows."""


@dataclass(slots=True)
class _Count:
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    shown: list[TokenizedSample] = field(default_factory=list)


class SampleBuilder:
    """Turns conversations into the shards of one data set.

    Args:
        folder: receives the shards.
        data: limits, edges and policies.
        renderer: the target's chat template.
        mask_token_id: must never occur.
        vocab_size: rows of the target's embedding.
        quarantine: receives what cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        data: DataConfig,
        renderer: ChatRenderer,
        mask_token_id: int,
        vocab_size: int,
        quarantine: Quarantine,
    ) -> None:
        self._data = data
        self._renderer = renderer
        self._mask_token_id = mask_token_id
        self._vocab_size = vocab_size
        self._quarantine = quarantine
        self._counts = [_Count() for _ in data.bucket_edges_tokens]
        self.prompt_hashes: set[str] = set()
        self.writer = ShardWriter(
            folder,
            buckets=len(data.bucket_edges_tokens),
            rows_per_shard=data.rows_per_shard,
            rows_per_group=data.rows_per_group,
        )

    def add(self, answered: AnsweredConversation | QuarantinedRow) -> None:
        """Add one conversation, or set it aside.

        Raises:
            BadRowError: it cannot be used and the policy is `error`.
            DataError: a token is the mask token or unknown to the target, or the template contradicts itself.
        """
        if isinstance(answered, QuarantinedRow):
            self._quarantine.add(answered)
            return
        conversation = answered.conversation
        try:
            sample = self._sample(conversation, finished=answered.finished)
        except BadRowError as error:
            # The renderer does not know where a conversation came from; the quarantine names it.
            self._quarantine.add(QuarantinedRow(conversation.origin, error.row.reason))
            return
        bucket = bucket_of(len(sample.input_ids), self._data.bucket_edges_tokens)
        self.writer.add(sample, bucket=bucket)
        self.prompt_hashes.update(prompt_hash(turn.content) for turn in conversation.messages if turn.role == "user")
        count = self._counts[bucket]
        count.samples += 1
        count.tokens += len(sample.input_ids)
        count.supervised += sum(sample.loss_mask)
        if len(count.shown) < PREVIEW_PER_BUCKET:
            count.shown.append(sample)

    def close(self) -> tuple[ShardEntry, ...]:
        """Finish the shards and return them in order."""
        return self.writer.close()

    @property
    def buckets(self) -> tuple[BucketStats, ...]:
        """What each bucket holds so far."""
        return tuple(
            BucketStats(bucket, edge, count.samples, count.tokens, count.supervised)
            for bucket, (edge, count) in enumerate(zip(self._data.bucket_edges_tokens, self._counts, strict=True))
        )

    @property
    def preview_samples(self) -> list[TokenizedSample]:
        """The first few samples of every bucket."""
        return [sample for count in self._counts for sample in count.shown]

    def _sample(self, conversation: Conversation, *, finished: bool) -> TokenizedSample:
        messages = conversation.messages
        rendered = self._renderer.render(messages) if finished else self._renderer.render_unfinished(messages)
        self._check_ids(rendered.input_ids, conversation)
        rendered = self._within_limit(rendered, conversation)
        if not has_supervised_pair(rendered.loss_mask):
            raise BadRowError(
                "no_supervised_pair",
                f"{sum(rendered.loss_mask)} supervised tokens of {len(rendered.input_ids)}, no two in a row",
                origin=conversation.origin,
            )
        return TokenizedSample(conversation.id, conversation.kind, rendered.input_ids, rendered.loss_mask)

    def _within_limit(self, rendered: Rendered, conversation: Conversation) -> Rendered:
        limit = self._data.max_length_tokens
        length = len(rendered.input_ids)
        if length <= limit:
            return rendered
        if self._data.over_long == "truncate":
            return Rendered(rendered.input_ids[:limit], rendered.loss_mask[:limit])
        raise BadRowError(
            "over_long", f"sample {conversation.id!r} has {length} tokens, the limit is {limit}", origin=conversation.origin
        )

    def _check_ids(self, ids: list[int], conversation: Conversation) -> None:
        where = f"{conversation.origin}: sample {conversation.id!r}"
        if self._mask_token_id in ids:
            token = _shown(self._renderer.tokenizer, self._mask_token_id)
            raise DataError(
                f"{where} uses the mask token {token} (id {self._mask_token_id}) at token {ids.index(self._mask_token_id)}",
                remedy="choose a target.mask_token that the corpus never uses, or remove the sample",
            )
        if max(ids, default=0) >= self._vocab_size:
            raise DataError(
                f"{where} has token id {max(ids)}, the target's embedding has {self._vocab_size} rows",
                remedy="use the tokenizer that belongs to the target",
            )


def _shown(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens(token_id))
