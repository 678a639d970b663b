"""The rows of one unit as tokenized batches, in the order of its source; answered by the target first, if it must be.

Invariant: every row of the source is in exactly one batch, once, whatever the number of workers and however long the target
takes for it. A conversation whose id was met before in the source is a bad row; it is neither answered nor tokenized twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from dflash.data.answers import AnsweredConversation, Answerer, AnswerSettings, answer_conversations
from dflash.data.formats import read_raw_batches
from dflash.data.pool import map_in_order
from dflash.data.seen_ids import SeenIds, duplicate_row
from dflash.data.sources import UnitSpec, read_rows, survey_source
from dflash.data.tokenize import Batch, BatchTokenizer, Row, TokenizedBatch, TokenizeJob, make_renderer
from dflash.errors import DataError
from dflash.records import Conversation, QuarantinedRow

ROWS_PER_BATCH = 64
"""Rows that a tokenizing process takes at once: enough to make the hand-over cheap, few enough to keep memory flat."""

Answered = AnsweredConversation | QuarantinedRow


@dataclass(frozen=True, slots=True)
class Answering:
    """How the target answers one unit's conversations."""

    answerer: Answerer
    journal: Path
    progress: Callable[[str, int, int], None]


def tokenized_batches(spec: UnitSpec, job: TokenizeJob, *, answering: Answering | None) -> Generator[TokenizedBatch]:
    """Read, answer and tokenize a unit's rows. Whoever may stop before the end closes it (`contextlib.closing`).

    Raises:
        DataError: a token cannot be used, the template contradicts itself, or there is nobody to answer.
        StorageError: the source cannot be read.
    """
    data = job.data
    if data.answers.regenerate:
        if answering is None:
            raise DataError(
                "data.answers.regenerate is set, but there is no target to write the answers",
                remedy="load the target, or set data.answers.regenerate: false",
            )
        with closing(_answered_rows(spec, job, answering)) as answered:  # the journal is let go even if nobody takes the rest
            yield from map_in_order(BatchTokenizer, job, _batched(answered), workers=data.workers)
        return
    if spec.source.uri is None or spec.limit is not None:
        batches: Iterable[Batch] = _batched(read_rows(data, spec.source, limit=spec.limit))
    else:
        batches = read_raw_batches(spec.source.uri, rows_per_batch=ROWS_PER_BATCH)
    seen = SeenIds()
    for batch in map_in_order(BatchTokenizer, job, batches, workers=data.workers):
        yield _without_duplicates(batch, seen)


def _batched(rows: Iterable[Row]) -> Iterator[Batch]:
    source = iter(rows)
    while batch := list(islice(source, ROWS_PER_BATCH)):
        yield batch


def _answered_rows(spec: UnitSpec, job: TokenizeJob, answering: Answering) -> Generator[Answered]:
    """All rows in the order of the source; the engine looks ahead, so bad rows wait for the answers before them."""
    data = job.data
    waiting: deque[tuple[int, QuarantinedRow]] = deque()  # (conversations before it, bad row)
    asked = 0

    def usable() -> Iterator[Conversation]:
        nonlocal asked
        for row in read_rows(data, spec.source, limit=spec.limit):
            if isinstance(row, Conversation):
                asked += 1
                yield row
            else:
                waiting.append((asked, row))

    settings = AnswerSettings(
        renderer=make_renderer(job.tokenizer, data),
        answers=data.answers,
        max_length_tokens=data.max_length_tokens,
        total_answers=survey_source(data, spec.source, limit=spec.limit).answers,
    )
    answered = answer_conversations(
        usable(), answerer=answering.answerer, settings=settings, journal=answering.journal, progress=answering.progress
    )
    with closing(answered):
        for done, row in enumerate(answered):
            while waiting and waiting[0][0] <= done:
                yield waiting.popleft()[1]
            yield row
    yield from (row for _, row in waiting)


def _without_duplicates(batch: TokenizedBatch, seen: SeenIds) -> TokenizedBatch:
    duplicate = seen.add(batch.id_digests)
    if not duplicate.any():
        return batch
    places = np.flatnonzero(duplicate).tolist()
    rows = {batch.id_rows[place] for place in places}
    kept = np.flatnonzero(~np.isin(batch.owners, list(rows)))
    size = len(batch.prompt_digests) // max(1, len(batch.prompt_rows))
    prompts = [place for place, row in enumerate(batch.prompt_rows) if row not in rows]
    bad = [(row, why) for row, why in batch.bad if row not in rows]
    bad += [(batch.id_rows[place], duplicate_row(batch.ids[place], batch.origins[place])) for place in places]
    return replace(
        batch,
        samples=batch.samples.take(kept),
        owners=batch.owners[kept],
        bad=sorted(bad, key=lambda entry: entry[0]),
        dropped=[(row, tokens) for row, tokens in batch.dropped if row not in rows],
        prompt_digests=b"".join(batch.prompt_digests[size * place : size * (place + 1)] for place in prompts),
        prompt_rows=[batch.prompt_rows[place] for place in prompts],
    )
