"""The sources of a data set: which files they are, what they hold, and how many conversations each one gives.

Invariant: a source's identity is its label and the SHA-256 of its bytes, never its place or its date.
Hard decision: `data.num_conversations` is shared out before anything is built (by counting usable rows, file after file),
so that units never wait for each other.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from dflash.config import DataConfig
from dflash.data.answers import count_answers
from dflash.data.conversations import read_source, source_labels, synthetic_conversations
from dflash.data.fingerprint import Recipe, unit_fingerprint
from dflash.errors import DataError
from dflash.records import Conversation, QuarantinedRow, to_json
from dflash.storage import read_chunks
from dflash.storage.compression import expand, open_decompressed

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(label, done, total)."""

_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How gzip and zstd begin."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source as it is now.

    Attributes:
        uri: where its bytes are; None for the generator.
        label: the file's name without its folder (`plan_units` makes it unique), or the generator's name.
        sha256: of the file's bytes as they lie there (compressed or not), or of the generator's conversations.
        size_bytes: of the file; 0 for the generator.
        lines: about how many rows it holds, for the progress alone.
    """

    uri: str | None
    label: str
    sha256: str
    size_bytes: int
    lines: int


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit to build; small and picklable, so it can travel to whoever builds it.

    Attributes:
        unit: id, SHA-256 (hex) over recipe, label, content and limit.
        source: what it is built from.
        limit: conversations to take; all if None.
        journal: name of the journal of its answers, free of content: a changed file finds the answers of unchanged rows.
    """

    unit: str
    source: SourceFile
    limit: int | None
    journal: str

    @property
    def rows_expected(self) -> int:
        """About how many rows will be read, for the progress alone."""
        return self.source.lines if self.limit is None else min(self.limit, self.source.lines)


@dataclass(frozen=True, slots=True)
class SourceSurvey:
    """What a reading without tokenizing has found.

    Attributes:
        rows: conversations and bad rows.
        answers: answers that the conversations ask for.
        quarantined: bad rows by reason code; `first_bad` is one of them.
    """

    rows: int
    conversations: int
    answers: int
    quarantined: Mapping[str, int]
    first_bad: QuarantinedRow | None


def source_uris(data: DataConfig) -> tuple[str, ...]:
    """The files that a configuration names, globs expanded, in the configured order; empty for the generator.

    Raises:
        StorageError: a pattern matches nothing.
    """
    if data.source != "files":
        return ()
    return tuple(dict.fromkeys(uri for pattern in data.files for uri in expand(pattern)))


def describe_file(uri: str) -> SourceFile:
    """Hash one file; the price is one reading of its bytes (and one unpacking, if they are packed).

    Raises:
        StorageError: it is missing or cannot be read.
    """
    digest, size_bytes, lines = hashlib.sha256(), 0, 0
    head = b""
    for chunk in read_chunks(uri):
        head = head or chunk[:8]
        digest.update(chunk)
        size_bytes += len(chunk)
        lines += chunk.count(b"\n")
    if head.startswith(_PACKED):
        lines = sum(chunk.count(b"\n") for chunk in open_decompressed(uri))
    return SourceFile(uri, PurePosixPath(uri).name, digest.hexdigest(), size_bytes, max(1, lines))


def describe_generator(data: DataConfig) -> SourceFile:
    """Hash the conversations that the generator really gives."""
    digest, lines = hashlib.sha256(), 0
    for conversation in _generated(data):
        digest.update(to_json(conversation).encode())
        lines += 1
    return SourceFile(None, f"synthetic-{data.seed}", digest.hexdigest(), 0, lines)


def describe_sources(data: DataConfig, *, progress: Progress) -> list[SourceFile]:
    """Every source of a configuration, hashed one after the other.

    Raises:
        StorageError: a file is missing.
    """
    if data.source != "files":
        return [describe_generator(data)]
    uris = source_uris(data)
    sources = []
    for done, uri in enumerate(uris, start=1):
        sources.append(describe_file(uri))
        progress("hash files", done, len(uris))
    return sources


def read_rows(data: DataConfig, source: SourceFile, *, limit: int | None) -> Iterator[Conversation | QuarantinedRow]:
    """Stream one source's rows, up to `limit` conversations (bad rows not counted)."""
    if source.uri is None:
        yield from _generated(data)
        return
    taken = 0
    for row in read_source(source.uri, label=source.label, system_prompt=data.system_prompt):
        yield row
        taken += isinstance(row, Conversation)
        if taken == limit:
            return


def _generated(data: DataConfig) -> Iterator[Conversation]:
    count = data.num_conversations or 0
    return synthetic_conversations(seed=data.seed, count=count, split="train", system_prompt=data.system_prompt)


def survey_source(data: DataConfig, source: SourceFile, *, limit: int | None) -> SourceSurvey:
    """Read one source without tokenizing it.

    Raises:
        StorageError: it cannot be read.
    """
    codes: Counter[str] = Counter()
    first_bad: QuarantinedRow | None = None
    conversations = answers = 0
    for row in read_rows(data, source, limit=limit):
        if isinstance(row, Conversation):
            conversations += 1
            answers += count_answers([row])
        else:
            codes[row.reason.partition(":")[0]] += 1
            first_bad = first_bad or row
    return SourceSurvey(conversations + sum(codes.values()), conversations, answers, dict(sorted(codes.items())), first_bad)


def plan_units(data: DataConfig, sources: Sequence[SourceFile], recipe: Recipe) -> list[UnitSpec]:
    """The units of a data set, in the order of their samples.

    Args:
        data: says how many conversations are wanted; if it says so for files, they are counted here.
        sources: in the configured order.
        recipe: what is made of them.

    Raises:
        DataError: the same content comes twice.
    """
    left = data.num_conversations if data.source == "files" else None
    units: list[UnitSpec] = []
    names: Counter[str] = Counter()
    known: dict[tuple[str, str], SourceFile] = {}
    for given, label in zip(sources, source_labels([each.label for each in sources]), strict=True):
        before = known.setdefault((given.label, given.sha256), given)
        if before is not given:
            raise DataError(
                f"{given.uri} and {before.uri} have the same name and the same content",
                remedy="name each file once in data.files",
            )
        source = replace(given, label=label)
        limit = None
        if left is not None:
            found = survey_source(data, source, limit=left).conversations
            limit, left = (None if found < left else left), left - found
        unit = unit_fingerprint(recipe.fingerprint, label=label, sha256=source.sha256, limit=limit)
        names[given.label] += 1
        units.append(UnitSpec(unit, source, limit, journal=_journal_name(given.label, names[given.label])))
        if left == 0:
            break
    if left:
        logger.warning("data.num_conversations is %d, the files hold %d fewer", data.num_conversations, left)
    return units


def _journal_name(label: str, occurrence: int) -> str:
    """A file name: readable, and different for different labels."""
    plain = "".join(char if char.isalnum() or char in "._-" else "_" for char in label)[:64]
    return f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:8]}-{occurrence}"
