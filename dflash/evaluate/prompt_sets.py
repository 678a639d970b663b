"""Sets of evaluation prompts, from local files or from the hub, pinned by the SHA-256 of what was read.

Rows are conversations in any of the shapes of the data room, or prompts in the columns of a known set; `turns` lists several
user turns that the target answers one after the other. `language`, `domain` and `kind` of a row are its labels for slices.
Invariant: a row that is no prompt is an error that names it, never left out; ids are unique over all sets.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dflash.config import PROMPT_PLACE, PromptSetConfig
from dflash.data.conversations import READ_ROWS, with_system_prompt
from dflash.data.formats import RawRow, read_raw_batches
from dflash.data.formats_parquet import PARQUET_MAGIC
from dflash.data.formats_shapes import conversation_of
from dflash.data.formats_tools import without_nulls
from dflash.data.quarantine import BadRowError
from dflash.errors import EvaluationError
from dflash.evaluate.known_sets import ID_COLUMNS, KIND_COLUMNS, KNOWN, KnownSet, first_text, turns_of
from dflash.records import Conversation, Message
from dflash.storage import get_bytes, read_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a set: what is asked.

    Attributes:
        conversation: up to the first user turn that the target answers.
        later_turns: user turns that follow, each asked behind the target's own answer.
        language, domain: labels; None where nothing tells.
        bare: the first user turn without the set's template.
    """

    conversation: Conversation
    later_turns: tuple[str, ...] = ()
    language: str | None = None
    domain: str | None = None
    bare: str | None = None

    def user_turns(self) -> list[str]:
        """Every text of a user, with and without the template: none of them may have been trained on."""
        said = [message.content for message in self.conversation.messages if message.role == "user"]
        return [*said, *self.later_turns, *([] if self.bare is None else [self.bare])]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A set of questions and where it came from; the fields are those of `records.PromptSetEntry`."""

    name: str
    origin: str
    sha256: str
    questions: tuple[Question, ...]


def read_prompt_set(config: PromptSetConfig, *, system_prompt: str | None) -> PromptSet:
    """Read a set.

    Args:
        config: its name and where it lies.
        system_prompt: system turn put before conversations that have none; None adds none.

    Raises:
        EvaluationError: the hub does not give it, its SHA-256 is not the expected one, or a row is no prompt.
        StorageError: its file is missing.
    """
    uri, origin = _located(config)
    sha256 = sha256_of([uri])
    if config.sha256 is not None and sha256 != config.sha256:
        raise EvaluationError(
            f"prompt set {config.name!r} ({origin}) has the SHA-256 {sha256}, expected {config.sha256}",
            remedy="evaluate on the file that was meant, or set sha256 to the one found if that is it",
        )
    if config.sha256 is None:
        logger.info("prompt set %s (%s) has the SHA-256 %s", config.name, origin, sha256)
    questions = tuple(_questions(uri, config, system_prompt))
    if not questions:
        raise EvaluationError(f"prompt set {config.name!r} ({origin}) holds no prompt", remedy="check the file")
    return PromptSet(config.name, origin, sha256, questions)


def sha256_of(uris: Sequence[str]) -> str:
    """SHA-256 of a file's bytes; of several files, that of their own digests line by line."""
    digests = []
    for uri in uris:
        digest = hashlib.sha256()
        for chunk in read_chunks(uri):
            digest.update(chunk)
        digests.append(digest.hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def with_own_ids(sets: Sequence[PromptSet]) -> list[PromptSet]:
    """The sets with every id unique over all of them: one that an earlier set uses gets its set's name in front.

    Raises:
        EvaluationError: one set uses an id twice.
    """
    used: set[str] = set()
    renamed = []
    for each in sets:
        own = [question.conversation.id for question in each.questions]
        twice = next((name for name in own if own.count(name) > 1), None) if len(set(own)) < len(own) else None
        if twice is not None:
            raise EvaluationError(f"prompt set {each.name!r} has two rows of the id {twice!r}", remedy="give every row its own id")
        questions = [
            replace(question, conversation=replace(question.conversation, id=f"{each.name}/{question.conversation.id}"))
            if question.conversation.id in used
            else question
            for question in each.questions
        ]
        used |= {question.conversation.id for question in questions}
        renamed.append(replace(each, questions=tuple(questions)))
    return renamed


def _located(config: PromptSetConfig) -> tuple[str, str]:
    """Where the set's file lies on this machine or in a bucket, and how it is called in results."""
    if config.file is not None:
        return config.file, PurePosixPath(config.file).name
    known = KNOWN[config.name]
    revision = config.revision or known.revision
    origin = f"{known.repository}@{revision}:{known.path}"
    try:
        local = huggingface_hub.hf_hub_download(known.repository, known.path, repo_type="dataset", revision=revision)
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise EvaluationError(
            f"the hub does not give prompt set {config.name!r} ({origin}): {type(error).__name__}",
            remedy=f"copy {Path(known.path).name} here and name it: evaluate.sets=[{{name: {config.name}, file: path/to/it}}]",
        ) from error
    return local, origin


def _questions(uri: str, config: PromptSetConfig, system_prompt: str | None) -> Iterator[Question]:
    label = PurePosixPath(uri).name
    for number, raw in _rows(uri):
        origin = f"{label}:{number}"
        try:
            yield _question(_row(raw, origin), config, origin=origin, number=number, system_prompt=system_prompt)
        except BadRowError as error:
            raise EvaluationError(
                f"{origin} is no prompt of {config.name!r}: {error.row.reason}", remedy="mend the row or take it out"
            ) from error


def _rows(uri: str) -> Iterator[tuple[int, RawRow]]:
    """Numbered rows; blank lines are none."""
    if next(read_chunks(uri), b"").startswith(PARQUET_MAGIC):
        # Whole, with every column: the data room reads only those of conversations. The largest known set has 24 MB.
        yield from enumerate(_table_rows(uri), start=1)
        return
    for batch in read_raw_batches(uri, rows_per_batch=READ_ROWS):
        for number, raw in enumerate(batch.rows, start=batch.first_row):
            if not isinstance(raw, bytes) or raw.strip():
                yield number, raw


def _table_rows(uri: str) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(get_bytes(uri))).to_pylist()
    except pa.ArrowException as error:
        raise EvaluationError(f"{uri} is a damaged Parquet file: {error}", remedy="fetch the file again") from error
    return rows


def _row(raw: RawRow, origin: str) -> Mapping[str, Any]:
    if isinstance(raw, dict):
        return without_nulls(raw)
    if not isinstance(raw, bytes):
        raise BadRowError("row_too_large", f"the row has {raw.size_bytes} bytes or more", origin=origin)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRowError("not_json", f"{error}", origin=origin) from error
    if not isinstance(value, dict):
        raise BadRowError("wrong_type", f"the row holds {type(value).__name__}, not an object", origin=origin)
    return {key: item for key, item in value.items() if item is not None}


def _question(
    row: Mapping[str, Any], config: PromptSetConfig, *, origin: str, number: int, system_prompt: str | None
) -> Question:  # fmt: skip
    known = KNOWN.get(config.name)
    turns = turns_of(row, known)
    identifier = first_text(row, ID_COLUMNS) or f"{config.name}:{number}"
    kind = first_text(row, KIND_COLUMNS) or config.name
    if turns is None:
        whole = conversation_of({**row, "id": identifier, "kind": kind}, origin=origin, default_id=identifier)
        conversation = _up_to_last_question(whole, origin)
    else:
        shaped = {key: row[key] for key in ("system", "tools") if key in row}
        shaped |= {"messages": [{"role": "user", "content": turns[0]}], "id": identifier, "kind": kind}
        conversation = conversation_of(shaped, origin=origin, default_id=identifier)
        if any(not turn.strip() for turn in turns):
            raise BadRowError("empty", "a turn has no text", origin=origin)
    conversation = replace(conversation, messages=with_system_prompt(conversation.messages, system_prompt))
    bare = None
    if config.template != PROMPT_PLACE:
        bare = next(message.content for message in conversation.messages if message.role == "user")
        conversation = _templated(conversation, config.template)
    return Question(
        conversation,
        tuple((turns or [])[1:]),
        language=first_text(row, ("language",)) or config.language or (None if known is None else known.language),
        domain=_domain(row, config, known),
        bare=bare,
    )


def _domain(row: Mapping[str, Any], config: PromptSetConfig, known: KnownSet | None) -> str | None:
    named = first_text(row, ("domain",)) or config.domain
    if named is not None or known is None:
        return named
    return known.domain or first_text(row, ("category",))


def _up_to_last_question(whole: Conversation, origin: str) -> Conversation:
    asked = [index for index, message in enumerate(whole.messages) if message.role == "user"]
    if not asked:
        raise BadRowError("no_answer", "it has no user turn", origin=origin)
    return replace(whole, messages=whole.messages[: asked[-1] + 1])


def _templated(conversation: Conversation, template: str) -> Conversation:
    """The first user turn inside the template's text."""
    first = next(index for index, message in enumerate(conversation.messages) if message.role == "user")
    said = template.replace(PROMPT_PLACE, conversation.messages[first].content)
    messages = (*conversation.messages[:first], Message("user", said), *conversation.messages[first + 1 :])
    return replace(conversation, messages=messages)
