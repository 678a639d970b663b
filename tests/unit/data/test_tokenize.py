"""A batch of rows becomes samples in columns: ownership, order, limits, hashes, and errors that cross processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from chat_toys import MASK_ID, supervised_texts
from workshop import GOOD, TOKENIZER, VOCAB_SIZE, Workshop, rows

from dflash.data.answers import AnsweredConversation
from dflash.data.formats import read_raw_batches
from dflash.data.quarantine import BadRowError
from dflash.data.seen_ids import id_digests
from dflash.data.sources import describe_file, read_rows
from dflash.data.synthetic import prompt_hash
from dflash.data.tokenize import BatchTokenizer, TokenizeJob
from dflash.errors import DataError, StorageError
from dflash.records import Conversation, QuarantinedRow


def tokenizer_of(place: Workshop, **settings: object) -> BatchTokenizer:
    data = place.config(place.corpus(*GOOD, name="unused.jsonl"), **settings).data
    return BatchTokenizer(TokenizeJob(TOKENIZER, data, "a.jsonl", MASK_ID, VOCAB_SIZE))


def test_rows_keep_their_order_and_know_what_became_of_them(workshop: Workshop) -> None:
    corpus = workshop.corpus(GOOD[0], "{oops", GOOD[1], {"prompt": "no answer"}, GOOD[2])
    (raw,) = read_raw_batches(corpus, rows_per_batch=64)
    found = tokenizer_of(workshop)(raw)
    assert found.rows == 5
    assert found.owners.tolist() == [0, 2, 4]
    assert found.samples.sample_ids == ["a.jsonl/r0", "a.jsonl/r1", "a.jsonl/r2"]
    assert [(row, bad.reason.partition(":")[0]) for row, bad in found.bad] == [(1, "not_json"), (3, "no_answer")]
    assert found.id_rows == [0, 2, 3, 4]
    assert np.array_equal(found.id_digests, id_digests(found.ids))
    assert found.origins == [f"{corpus}:{number}" for number in (1, 3, 4, 5)]
    hashes = [found.prompt_digests[start : start + 16].hex() for start in range(0, len(found.prompt_digests), 16)]
    assert hashes == [prompt_hash(row["prompt"])[:32] for row in GOOD[:3]], "only of rows that became samples"
    assert found.prompt_rows == [0, 2, 4]
    for row, sample in enumerate(GOOD[:3]):
        one = found.samples.sample(row)
        said = supervised_texts(TOKENIZER, one.input_ids.tolist(), one.loss_mask.tolist())  # type: ignore[union-attr]
        assert said == [f"{sample['completion']}<|im_end|>"]
        assert one.turns == 2


def test_a_raw_batch_and_parsed_rows_give_the_same(workshop: Workshop) -> None:
    corpus = workshop.corpus(*GOOD, "{oops")
    (raw,) = read_raw_batches(corpus, rows_per_batch=64)
    run = tokenizer_of(workshop)
    parsed = list(read_rows(workshop.config(corpus).data, describe_file(corpus), limit=None))
    one, other = run(raw), run(parsed)
    assert one.bad == other.bad
    assert np.array_equal(one.samples.input_ids, other.samples.input_ids)
    assert np.array_equal(one.samples.loss_spans, other.samples.loss_spans)


def test_a_split_conversation_owns_all_of_its_pieces(workshop: Workshop) -> None:
    long = {"prompt": "hi", "completion": "and the weather " * 40, "id": "long"}
    corpus = workshop.corpus(GOOD[0], long, GOOD[1])
    (raw,) = read_raw_batches(corpus, rows_per_batch=64)
    found = tokenizer_of(workshop, over_long="split")(raw)
    pieces = [name for name in found.samples.sample_ids if name.startswith("a.jsonl/long#")]
    assert len(pieces) > 1
    assert found.owners.tolist() == [0, *[1] * len(pieces), 2]
    assert int(found.samples.lengths.max()) <= 80
    assert len(found.prompt_rows) == 3, "one prompt, however many pieces"


def test_an_unfinished_answer_has_no_end_of_turn(workshop: Workshop) -> None:
    corpus = workshop.corpus(*GOOD[:2])
    read = read_rows(workshop.config(corpus).data, describe_file(corpus), limit=None)
    conversations = [row for row in read if isinstance(row, Conversation)]
    batch = [
        AnsweredConversation(each, finished=done, exact=not done) for each, done in zip(conversations, (True, False), strict=True)
    ]
    found = tokenizer_of(workshop, regenerate=True)([*batch, QuarantinedRow("a:3", "unfinished: cut")])
    ends = [TOKENIZER.decode(found.samples.sample(row).input_ids[-1:]) for row in range(2)]
    assert "<|im_end|>" not in ends[1]
    assert (found.answers, found.exact_answers, found.rows) == (2, 1, 3)
    assert [row for row, _ in found.bad] == [2]


def test_an_empty_batch_is_no_trouble(workshop: Workshop) -> None:
    found = tokenizer_of(workshop)([])
    assert (found.rows, len(found.samples), found.bad, found.prompt_digests) == (0, 0, [], b"")


@pytest.mark.parametrize(
    "error",
    [
        DataError("what", remedy="do"),
        StorageError("gone", remedy="wait"),
        BadRowError("empty", "no text", origin="file:7"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_between_processes(error: DataError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - what a process pool does
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert again.args == error.args


def test_results_are_small_to_send(workshop: Workshop) -> None:
    corpus = workshop.corpus(*rows(*("talk about the weather " * 3 for _ in range(60))))
    (raw,) = read_raw_batches(corpus, rows_per_batch=64)
    found = tokenizer_of(workshop)(raw)
    tokens = len(found.samples.input_ids)
    assert len(pickle.dumps(found)) < 4 * tokens + 200 * found.rows
