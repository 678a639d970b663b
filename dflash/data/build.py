"""One build of a data set, step by step: read, answer, render, write; the manifest last."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.config import Config
from dflash.data.answers import AnsweredConversation, GenerateFn, Progress, answer_conversations
from dflash.data.conversations import configured_conversations
from dflash.data.fingerprint import answers_fingerprint
from dflash.data.manifest import MANIFEST_FILE, PREVIEW_FILE, PROMPT_HASHES_FILE, QUARANTINE_FILE, hashes_sha256
from dflash.data.preview import preview_page
from dflash.data.quarantine import Quarantine
from dflash.data.render import ChatRenderer
from dflash.data.samples import SampleBuilder
from dflash.data.tokenizer import stop_token_ids, template_sha256, tokenizer_sha256
from dflash.errors import DataError
from dflash.records import Conversation, DataManifest, QuarantinedRow, to_json
from dflash.storage import atomic_write_text

logger = logging.getLogger(__name__)

MIN_EXACT_FRAC = 0.9
"""Share of answers under which the template, not the odd token, must be why rendering changes them."""


class DataBuild:
    """One build of one data set.

    Args:
        config: what to build.
        tokenizer: the target's.
        identity: fields of the manifest that are known beforehand.
        folder: final place of the data set; the journal of answers lies beside it.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, identity: dict[str, Any], folder: Path) -> None:
        self._config = config
        self._data = config.data
        self._tokenizer = tokenizer
        self._identity = identity
        self._root = folder.parent
        self._report = folder.with_suffix(".quarantine.jsonl")  # outlives a build that stops for its bad rows
        self._quarantine = Quarantine(
            bad_rows=self._data.bad_rows, over_long=self._data.over_long, max_bad_frac=self._data.max_bad_frac
        )
        self._renderer = ChatRenderer(tokenizer, supervise=self._data.supervise, template_flags=self._data.template_flags)
        self._answers = 0
        self._exact = 0

    def run(self, partial: Path, *, generate: GenerateFn | None, progress: Progress) -> DataManifest:
        """Write a complete data set into `partial`, the manifest last."""
        conversations = self._conversations()
        rows = len(conversations) + len(self._quarantine.rows)
        self._quarantine.check(total_rows=rows, listed_in=self._report)  # before the target works for an hour
        builder = SampleBuilder(
            partial,
            data=self._data,
            renderer=self._renderer,
            mask_token_id=self._identity["mask_token_id"],
            vocab_size=self._identity["vocab_size"],
            quarantine=self._quarantine,
        )
        try:
            for answered in self._answered(conversations, generate, progress):
                builder.add(answered)
            self._quarantine.check(total_rows=rows, listed_in=self._report)
        except BaseException:
            builder.writer.abort()
            raise
        self._quarantine.warn(total_rows=rows)
        manifest = self._manifest(builder)
        self._warn_of_inexact_answers()
        self._quarantine.write(partial / QUARANTINE_FILE)
        atomic_write_text(partial / PROMPT_HASHES_FILE, "".join(f"{line}\n" for line in sorted(builder.prompt_hashes)))
        page = preview_page(builder.preview_samples, manifest, self._tokenizer)
        atomic_write_text(partial / PREVIEW_FILE, page)
        atomic_write_text(partial / MANIFEST_FILE, to_json(manifest, indent=2) + "\n")
        self._report.unlink(missing_ok=True)
        return manifest

    def _warn_of_inexact_answers(self) -> None:
        if self._exact < MIN_EXACT_FRAC * self._answers:
            logger.warning(
                "only %d of %d answered conversations are rendered as the very tokens that the target generated: "
                "look at the chat template's treatment of white space and reasoning",
                self._exact,
                self._answers,
            )

    def _conversations(self) -> list[Conversation]:
        """All usable conversations; bad rows go into the quarantine."""
        usable = []
        for row in configured_conversations(self._data):
            if isinstance(row, Conversation):
                usable.append(row)
            else:
                self._quarantine.add(row)
        return usable

    def _answered(
        self, conversations: list[Conversation], generate: GenerateFn | None, progress: Progress
    ) -> Iterator[AnsweredConversation | QuarantinedRow]:
        if not self._data.answers.regenerate:
            for done, conversation in enumerate(conversations, start=1):
                yield AnsweredConversation(conversation, finished=True, exact=True)
                progress("render", done, len(conversations))
            return
        if generate is None:
            raise DataError(
                "data.answers.regenerate is set, but there is no target to write the answers",
                remedy="load the target, or set data.answers.regenerate: false",
            )
        name = answers_fingerprint(self._config, tokenizer=self._tokenizer, target_fingerprint=self._identity["target_fingerprint"])
        for answered in answer_conversations(
            conversations,
            renderer=self._renderer,
            generate=generate,
            answers=self._data.answers,
            stop_ids=stop_token_ids(self._tokenizer, self._config.target),
            max_length_tokens=self._data.max_length_tokens,
            journal=self._root / "answers" / f"{name[:16]}.jsonl",
            progress=progress,
        ):
            if isinstance(answered, AnsweredConversation):
                self._answers += 1
                self._exact += answered.exact
            yield answered

    def _manifest(self, builder: SampleBuilder) -> DataManifest:
        shards, buckets = builder.close(), builder.buckets
        answers = self._data.answers
        sampling: dict[str, Any] = {}
        if answers.regenerate:
            sampling = {
                "temperature": answers.temperature,
                "max_new_tokens": answers.max_new_tokens,
                "seed": self._data.seed if answers.temperature > 0 else None,
                "rendered_exactly_frac": self._exact / max(self._answers, 1),
            }
        return DataManifest(
            **self._identity,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            target_path=self._config.target.path,
            tokenizer_sha256=tokenizer_sha256(self._tokenizer),
            template_sha256=template_sha256(self._tokenizer),
            template_flags=self._data.template_flags,
            on_policy=answers.regenerate,
            answer_sampling=sampling,
            samples=sum(bucket.samples for bucket in buckets),
            tokens=sum(bucket.tokens for bucket in buckets),
            supervised_tokens=sum(bucket.supervised_tokens for bucket in buckets),
            max_length_tokens=self._data.max_length_tokens,
            quarantined=self._quarantine.counts,
            prompt_hashes_sha256=hashes_sha256(builder.prompt_hashes),
            buckets=buckets,
            shards=shards,
        )
