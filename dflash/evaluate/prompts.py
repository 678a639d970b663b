"""Held-out prompts, rendered exactly as the drafter's training data was, and proven not to be part of it.

The sets themselves are read in `prompt_sets`.
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
from itertools import zip_longest
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
from dflash.evaluate.prompt_sets import PromptSet, Question, read_prompt_set, sha256_of, with_own_ids
from dflash.records import Conversation, DataManifest, Message, QuarantinedRow
from dflash.storage import Store
from dflash.storage.compression import expand

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptOrigin:
    """Where a prompt's set came from, and the SHA-256 of what was read; see `records.PromptSetEntry`."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One prompt to decode.

    Attributes:
        id: unique in the evaluation; samples are keyed by it.
        kind: label for slices (task kind, source).
        dataset: where it comes from: the set's name, `synthetic-<seed>` or the files' names.
        prompt_ids: token ids with the generation prompt.
        prompt_hash: normalised hash of its last user turn.
        template_flags: chat-template variables it was rendered with.
        turn: number of its last user turn, from 1.
        language, domain: labels for slices; None where nothing tells.
        first_turn: id of the prompt whose conversation it goes on; None for the first turn.
        origin: of its set; None for prompts made elsewhere.
        question: what it was rendered from, with the turns that follow once the target has answered; likewise.
    """

    id: str
    kind: str
    dataset: str
    prompt_ids: tuple[int, ...]
    prompt_hash: str
    template_flags: Mapping[str, Any]
    turn: int = 1
    language: str | None = None
    domain: str | None = None
    first_turn: str | None = None
    origin: PromptOrigin | None = None
    question: Question | None = None


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
        At most `evaluate.num_prompts` prompts of each set, the sets' prompts in turn; from files, a sample keyed by
        `evaluate.seed`. First turns only: `turns.with_later_turns` adds what is asked behind the target's own answers.

    Raises:
        EvaluationError: rendering would differ from training, a prompt was trained on, a row is bad, or there is none.
        StorageError: a file is missing.
    """
    check_rendering(config, tokenizer, manifest)
    sets = with_own_ids([_chosen(each, config.evaluate) for each in _sets(config)])
    trained = read_prompt_hashes(store, manifest)
    for each in sets:
        said = [_spoken(question) for question in each.questions]
        check_disjoint(said, trained=trained, synthetic=config.evaluate.source == "synthetic")
    renderer = renderer_of(config, tokenizer)
    # In turn: the first prompts are a fair sample of all sets, whatever number of them is decoded.
    rows = zip_longest(*([(each, question) for question in each.questions] for each in sets))
    return [_prompt(renderer, config, *pair) for row in rows for pair in row if pair is not None]


def require_room(prompts: Sequence[EvalPrompt], *, positions: int | None, new_tokens: int, block_size: int, key: str) -> None:
    """Refuse prompts that a target cannot answer at full length: behind its last position nothing it says means anything.

    Args:
        prompts: at least one.
        positions: of the target; None if it names no limit.
        new_tokens: longest answer.
        block_size: tokens of a verification, which may begin at the answer's last one.
        key: of the configuration, that sets the longest answer.

    Raises:
        EvaluationError: names the longest prompt.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    needed = len(longest.prompt_ids) + new_tokens + block_size
    if positions is not None and needed > positions:
        raise EvaluationError(
            f"prompt {longest.id!r} has {len(longest.prompt_ids)} tokens; with {key} {new_tokens} and a block it needs {needed} "
            f"positions, the target has {positions}",
            remedy=f"lower {key} or take the longest prompts out",
        )


def drawn_together(prompts: Sequence[EvalPrompt]) -> list[str]:
    """For each prompt what the bootstrap draws it as: the turns of a conversation are one, and prompts that are the same tokens.

    Two conversations that begin alike are one, whatever is asked later: each of their first turns tells what the other's does.
    """
    named: dict[tuple[int, ...], str] = {}
    heads: dict[str, str] = {}
    found = []
    for prompt in prompts:
        head = prompt.first_turn or prompt.id
        found.append(named.setdefault(prompt.prompt_ids, heads.get(head, head)))
        heads.setdefault(head, found[-1])
    return found


def repeated_prompts(prompts: Sequence[EvalPrompt]) -> list[str]:
    """A sentence if some prompts are the same tokens as others: they weigh as often, though the bootstrap draws them as one."""
    again = len(prompts) - len({prompt.prompt_ids for prompt in prompts})
    if not again:
        return []
    return [f"{again} of {len(prompts)} prompts repeat another one word for word: they weigh as often, and tell nothing new"]


def renderer_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """What renders a run's prompts: the same as its data set."""
    return ChatRenderer(
        tokenizer,
        supervise=config.data.supervise,
        supervise_reasoning=config.data.supervise_reasoning,
        template_flags=config.data.template_flags,
    )


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


def _prompt(renderer: ChatRenderer, config: Config, asked: PromptSet, question: Question) -> EvalPrompt:
    chat = question.conversation
    return EvalPrompt(
        id=chat.id,
        kind=chat.kind,
        dataset=asked.name,
        prompt_ids=tuple(renderer.prompt_ids(chat.messages, chat.tools)),
        prompt_hash=prompt_hash(chat.messages[-1].content),
        template_flags=dict(config.data.template_flags),
        turn=len(_user_turns(chat)),
        language=question.language,
        domain=question.domain,
        origin=PromptOrigin(asked.origin, asked.sha256),
        question=question,
    )


def _sets(config: Config) -> Iterator[PromptSet]:
    """The configured sets, whole."""
    settings, system_prompt = config.evaluate, config.data.system_prompt
    if settings.source == "sets":
        for each in settings.sets:
            yield read_prompt_set(each, system_prompt=system_prompt)
    elif settings.source == "synthetic":
        chats = synthetic_conversations(
            seed=settings.seed, count=settings.num_prompts, split="heldout", system_prompt=system_prompt
        )
        questions = tuple(Question(_asked(chat)) for chat in chats)
        digest = hashlib.sha256("\n".join(turn for each in questions for turn in each.user_turns()).encode()).hexdigest()
        yield PromptSet(f"synthetic-{settings.seed}", f"generator, seed {settings.seed}", digest, questions)
    else:
        uris = list(dict.fromkeys(uri for pattern in settings.files for uri in expand(pattern)))
        rows = _good_rows(read_conversations(settings.files, limit=None, system_prompt=system_prompt))
        name = "+".join(Path(file).name for file in settings.files)
        yield PromptSet(name, name, sha256_of(uris), tuple(Question(_asked(chat)) for chat in rows))


def _chosen(each: PromptSet, settings: EvaluateConfig) -> PromptSet:
    """At most `num_prompts` of a set: those with the smallest keyed hash, a fixed sample whatever the file's order."""
    questions = each.questions
    if settings.source != "synthetic":

        def key(question: Question) -> str:
            return hashlib.sha256(f"{settings.seed}/{question.conversation.id}".encode()).hexdigest()

        questions = tuple(sorted(questions, key=key)[: settings.num_prompts])
    if not questions:
        raise EvaluationError("there are no evaluation prompts", remedy="give evaluate.files that hold at least one prompt")
    if len(questions) < settings.num_prompts:
        logger.warning("%s has %d prompts, fewer than evaluate.num_prompts %d", each.name, len(questions), settings.num_prompts)
    return replace(each, questions=questions)


def _spoken(question: Question) -> Conversation:
    """Everything that a user says, for the proof that none of it was trained on."""
    said = tuple(Message("user", text) for text in question.user_turns())
    return replace(question.conversation, messages=said)


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
