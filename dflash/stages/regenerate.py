"""On-policy answers as a conversation file: the target answers the prompts of a corpus, once, for any number of data sets.

Invariant: the journal has every answer before the file has it, so a killed run started again asks for nothing twice and
writes the same file. The corpus is read twice: once to know what there is (and whether too many rows are bad) before the
target works for hours, once to have it answered.
"""

from __future__ import annotations

import fcntl
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import Config
from dflash.data.answers import AnsweredConversation, Answerer, AnswerSettings, answer_conversations, count_answers
from dflash.data.answers_file import AnswersFile
from dflash.data.bad_rows import BadRowFile, check_share, reason_code, refuse_if_forbidden, warn_of_answers
from dflash.data.conversations import configured_conversations
from dflash.data.fingerprint import answers_fingerprint
from dflash.data.render import ChatRenderer
from dflash.data.tokenizer import Tokenizer, load_tokenizer
from dflash.errors import DataError, StorageError
from dflash.model.target_info import read_target_info
from dflash.records import Conversation, QuarantinedRow
from dflash.stages.answerer import open_answerer
from dflash.storage import disk_errors, put_file

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RegenerateStage:
    """What the target has written.

    Attributes:
        output: the conversation file.
        conversations: in it.
        answers: that the corpus asked for.
        unfinished: conversations in it whose last answer was cut at the limit.
        exact: conversations in it that are rendered as the very tokens that were generated.
        quarantined: rows left out, by reason; they are listed in `quarantine`.
    """

    output: str
    quarantine: str
    journal: str
    conversations: int
    answers: int
    unfinished: int
    exact: int
    quarantined: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where everything lies: the folder of the journal, and the two files."""

    folder: Path
    output: str
    quarantine: str


@dataclass(frozen=True, slots=True)
class _Survey:
    """The corpus before anything is asked."""

    rows: int
    answers: int


def regenerate_stage(config: Config, *, output: str | None, progress: Progress) -> RegenerateStage:
    """Let the target answer every prompt of the configured corpus and write the conversations into one file.

    Args:
        config: its `data` section and target matter; needs no run.
        output: local path or `s3://` object, packed if it ends in `.gz`; `<run.root>/answers/<run.name>.jsonl` if None.
        progress: called with (label, done, total).

    Raises:
        DataError: rows cannot be used, or another process writes the same answers.
        StorageError: a source is missing, or the output cannot be written.
        TargetError: the target cannot be used, or a server runs another one.
        ServerError: the server is away; every answer so far is kept.
    """
    places = _places(config, output)
    survey = _survey(config)
    tokenizer = load_tokenizer(config.target)
    target = read_target_info(config.target).fingerprint
    name = answers_fingerprint(config, tokenizer=tokenizer, target_fingerprint=target)[:16]
    journal = places.folder / f"journal-{name}.jsonl"
    with (
        _alone(places.folder / f"{name}.lock"),
        open_answerer(config, tokenizer) as answerer,
        closing(_answered(config, tokenizer, answerer, survey, journal, progress)) as rows,
        disk_errors(f"write conversations in {places.folder}", remedy="free space there and run it again: all answers are kept"),
    ):
        written, bad = _write(rows, config, survey, places, name)
    return RegenerateStage(
        output=places.output,
        quarantine=places.quarantine,
        journal=str(journal),
        conversations=written["rows"],
        answers=survey.answers,
        unfinished=written["unfinished"],
        exact=written["exact"],
        quarantined=bad,
    )


def _places(config: Config, output: str | None) -> _Places:
    folder = Path(config.run.root) / "answers"
    output = output or str(folder / f"{config.run.name}.jsonl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if "://" not in output:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}", remedy="give a path that can be written") from error
    return _Places(folder, output, f"{output}.quarantine.jsonl")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases however the process ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is having the same answers written in {path.parent}", remedy="wait for it, or stop it"
            ) from error
        yield


def _survey(config: Config) -> _Survey:
    """Read the corpus once; stops at rows that are not tolerated, or at too many of those that are."""
    rows = answers = 0
    codes: Counter[str] = Counter()
    example: QuarantinedRow | None = None
    for row in configured_conversations(config.data):
        rows += 1
        answers += count_answers([row])
        if isinstance(row, QuarantinedRow):
            refuse_if_forbidden(row, config.data)
            codes[reason_code(row)] += 1
            example = example or row
    check_share(codes, rows=rows, data=config.data, example=example, listed_in="nothing was asked yet")
    return _Survey(rows, answers)


def _answered(
    config: Config, tokenizer: Tokenizer, answerer: Answerer, survey: _Survey, journal: Path, progress: Progress
) -> Generator[AnsweredConversation | QuarantinedRow]:
    """Every row of the corpus, in order: answered, or with the reason why not."""
    data = config.data
    renderer = ChatRenderer(
        tokenizer, supervise=data.supervise, supervise_reasoning=data.supervise_reasoning, template_flags=data.template_flags
    )
    settings = AnswerSettings(renderer, data.answers, data.max_length_tokens, survey.answers)
    unusable: list[QuarantinedRow] = []
    usable = _usable(config, unusable)
    answered = answer_conversations(usable, answerer=answerer, settings=settings, journal=journal, progress=progress)
    with closing(answered):  # the journal is let go at once when the writing stops
        for row in answered:
            yield from unusable
            unusable.clear()
            yield row
    yield from unusable


def _usable(config: Config, unusable: list[QuarantinedRow]) -> Iterator[Conversation]:
    for row in configured_conversations(config.data):
        if isinstance(row, Conversation):
            yield row
        else:
            unusable.append(row)


def _write(
    rows: Iterable[AnsweredConversation | QuarantinedRow], config: Config, survey: _Survey, places: _Places, name: str
) -> tuple[Counter[str], dict[str, int]]:
    """Write both files; returns what is in the one, and the reasons in the other."""
    written: Counter[str] = Counter()
    bad = BadRowFile(places.folder / f"{name}.quarantine.partial", config.data)
    try:
        with AnswersFile(places.output, partial=places.folder / f"{name}.partial", sampling=_sampling(config)) as file:
            for row in rows:
                if isinstance(row, QuarantinedRow):
                    bad.add(row)
                else:
                    file.add(row)
                    written.update(rows=1, unfinished=not row.finished, exact=row.exact)
            bad.close()
            put_file(bad.path, places.quarantine, only_if_absent=False)
            listed = f"all are listed in {places.quarantine}"
            check_share(bad.counts, rows=survey.rows, data=config.data, example=None, listed_in=listed)
            warn_of_answers(bad.counts, rows=survey.rows, data=config.data)
            file.commit()
    finally:
        bad.close()
        bad.path.unlink(missing_ok=True)
    return written, bad.counts


def _sampling(config: Config) -> dict[str, Any]:
    answers = config.data.answers
    return {
        "engine": answers.engine,
        "model": answers.server.model or config.target.path,
        "temperature": answers.temperature,
        "top_p": 1.0,
        "max_tokens": answers.max_new_tokens,
        "seed": config.data.seed if answers.temperature > 0 else None,
    }
