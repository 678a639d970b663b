"""Held-out prompts, rendered exactly as the drafter's training data was, and proven not to be part of it.

Invariant: no user turn of an evaluation prompt has the normalised hash of a user turn of the data set; a synthetic prompt
is moreover on the held-out side of the generator's border, so the target has not seen it either.
Tokenizer, chat template and its flags must be those of the data set: a different thinking mode alone has moved acceptance
from 60 % to 25 % elsewhere, and nothing in the output would show why.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.config import Config, EvaluateConfig
from dflash.data.conversations import read_conversations, synthetic_conversations
from dflash.data.prompt_hashes import read_prompt_hashes
from dflash.data.render import ChatRenderer
from dflash.data.synthetic import prompt_hash, split_of
from dflash.data.tokenizer import template_sha256, tokenizer_sha256
from dflash.errors import EvaluationError
from dflash.records import Conversation, DataManifest, QuarantinedRow
from dflash.storage import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One prompt to decode.

    Attributes:
        kind: label for slices (task kind, source).
        dataset: where it comes from: `synthetic-<seed>` or the files' names.
        prompt_ids: token ids with the generation prompt.
        prompt_hash: normalised hash of its last user turn.
        template_flags: chat-template variables it was rendered with.
    """

    id: str
    kind: str
    dataset: str
    prompt_ids: tuple[int, ...]
    prompt_hash: str
    template_flags: Mapping[str, Any]


def load_eval_prompts(
    config: Config, *, tokenizer: PreTrainedTokenizerBase, manifest: DataManifest, store: Store
) -> list[EvalPrompt]:
    """Load the configured held-out prompts.

    Args:
        config: the run's configuration.
        tokenizer: the target's.
        manifest: of the data set that the drafter was trained on.
        store: its folder, for the prompt hashes.

    Returns:
        At most `evaluate.num_prompts` prompts; from files, a sample keyed by `evaluate.seed`.

    Raises:
        EvaluationError: rendering would differ from training, a prompt was trained on, a row is bad, or there is none.
        StorageError: a file is missing.
    """
    check_rendering(config, tokenizer, manifest)
    settings = config.evaluate
    if settings.source == "synthetic":
        chats: Iterable[Conversation] = synthetic_conversations(
            seed=settings.seed, count=settings.num_prompts, split="heldout", system_prompt=config.data.system_prompt
        )
        dataset = f"synthetic-{settings.seed}"
    else:
        rows = read_conversations(settings.files, limit=None, system_prompt=config.data.system_prompt)
        chats = _sampled(_good_rows(rows), settings)
        dataset = "+".join(Path(file).name for file in settings.files)
    questions = [_asked(chat) for chat in chats]
    if not questions:
        raise EvaluationError("there are no evaluation prompts", remedy="give evaluate.files that hold at least one prompt")
    if len(questions) < settings.num_prompts:
        logger.warning("%d prompts, fewer than evaluate.num_prompts %d", len(questions), settings.num_prompts)
    check_disjoint(questions, trained=read_prompt_hashes(store, manifest), synthetic=settings.source == "synthetic")
    renderer = ChatRenderer(
        tokenizer,
        supervise=config.data.supervise,
        supervise_reasoning=config.data.supervise_reasoning,
        template_flags=config.data.template_flags,
    )
    return [
        EvalPrompt(
            id=chat.id,
            kind=chat.kind,
            dataset=dataset,
            prompt_ids=tuple(renderer.prompt_ids(chat.messages, chat.tools)),
            prompt_hash=prompt_hash(chat.messages[-1].content),
            template_flags=dict(config.data.template_flags),
        )
        for chat in questions
    ]


def check_rendering(config: Config, tokenizer: PreTrainedTokenizerBase, manifest: DataManifest) -> None:
    """Compare what turns a conversation into ids with what the data set was made with.

    Raises:
        EvaluationError: template flags, chat template or tokenizer differ.
    """
    if dict(config.data.template_flags) != dict(manifest.template_flags):
        raise EvaluationError(
            f"data.template_flags are {dict(config.data.template_flags)}, "
            f"the drafter was trained with {dict(manifest.template_flags)}",
            remedy="evaluate with the training flags (thinking mode and the like), or train again with these",
        )
    for name, found, trained in (
        ("chat template", template_sha256(tokenizer), manifest.template_sha256),
        ("tokenizer", tokenizer_sha256(tokenizer), manifest.tokenizer_sha256),
    ):
        if found != trained:
            raise EvaluationError(
                f"the target's {name} (SHA-256 {found[:12]}...) is not the one the data set was made with ({trained[:12]}...)",
                remedy="evaluate with the target that the drafter was trained for, or build the data again and train",
            )


def check_disjoint(chats: Sequence[Conversation], *, trained: Container[str], synthetic: bool) -> None:
    """Prove that no user turn was trained on.

    Args:
        chats: evaluation prompts.
        trained: normalised hashes of the data set's user turns.
        synthetic: also require the held-out side of the generator's border.

    Raises:
        EvaluationError: names the first offender and how many there are.
    """
    seen = [chat for chat in chats if any(prompt_hash(text) in trained for text in _user_turns(chat))]
    if seen:
        raise EvaluationError(
            f"{len(seen)} of {len(chats)} evaluation prompts are in the training data, first {seen[0].id!r} ({seen[0].origin})",
            remedy="take them out of evaluate.files, or evaluate on another file: acceptance on trained prompts means nothing",
        )
    if synthetic:
        wrong = [chat.id for chat in chats if any(split_of(text) != "heldout" for text in _user_turns(chat))]
        if wrong:
            raise AssertionError(f"the generator drew held-out prompts from the training side: {wrong[:3]}")


def _user_turns(chat: Conversation) -> list[str]:
    return [message.content for message in chat.messages if message.role == "user"]


def _asked(chat: Conversation) -> Conversation:
    """The conversation up to its last user turn: what is left to answer."""
    last = max(index for index, message in enumerate(chat.messages) if message.role == "user")
    return replace(chat, messages=chat.messages[: last + 1])


def _good_rows(rows: Iterable[Conversation | QuarantinedRow]) -> Iterator[Conversation]:
    for row in rows:
        if isinstance(row, QuarantinedRow):
            raise EvaluationError(
                f"{row.origin} is no prompt: {row.reason}", remedy="mend the row or take it out of evaluate.files"
            )
        if not _user_turns(row):
            raise EvaluationError(f"{row.origin} is no prompt: it has no user turn", remedy="take the row out of evaluate.files")
        yield row


def _sampled(chats: Iterable[Conversation], settings: EvaluateConfig) -> list[Conversation]:
    """The `num_prompts` conversations with the smallest keyed hash: a fixed sample, whatever the files' order."""

    def key(chat: Conversation) -> str:
        return hashlib.sha256(f"{settings.seed}/{chat.id}".encode()).hexdigest()

    return sorted(chats, key=key)[: settings.num_prompts]
