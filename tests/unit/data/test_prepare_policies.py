"""Building a data set from bad input: policies, proofs about tokens, and nothing half-written behind a failure."""

from __future__ import annotations

import json

import pytest
from chat_toys import MASK_ID
from workshop import GOOD, TOKENIZER, VOCAB_SIZE, Workshop, rows, samples_of

from dflash.data.prepare import prepare_data
from dflash.data.quarantine import BadRowError
from dflash.errors import DataError, StorageError, TargetError


class TestPolicies:
    def test_the_first_bad_row_stops_the_build_by_default(self, workshop: Workshop) -> None:
        corpus = workshop.corpus(GOOD[0], "{oops", GOOD[1])
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: not_json"):
            workshop.prepare(workshop.config(corpus))
        assert workshop.manifests() == []

    def test_bad_rows_are_set_aside_on_request_with_origin_and_reason(self, workshop: Workshop) -> None:
        corpus = workshop.corpus(GOOD[0], "{oops", {"messages": []}, {"prompt": "x", "completion": ""}, {"prompt": "y"}, GOOD[1])
        data = workshop.prepare(workshop.config(corpus, bad_rows="quarantine", max_bad_frac=0.7))
        assert data.manifest.samples == 2
        assert data.manifest.quarantined == {"empty": 1, "no_answer": 2, "not_json": 1}
        (file,) = data.manifest.quarantine_files
        lines = [json.loads(line) for line in data.store.read(file.path).decode().splitlines()]
        assert (file.rows, data.manifest.rows) == (4, 6)
        assert [line["origin"] for line in lines] == [f"a.jsonl:{number}" for number in (2, 3, 4, 5)]
        assert all(": " in line["reason"] for line in lines)

    def test_too_many_bad_rows_stop_the_build_and_stay_listed(self, workshop: Workshop) -> None:
        corpus = workshop.corpus(*GOOD, "{oops", "[1]")
        with pytest.raises(DataError, match=r"2 of 6 rows cannot be used \(not_json 1, wrong_type 1\)") as caught:
            workshop.prepare(workshop.config(corpus, bad_rows="quarantine", max_bad_frac=0.3))
        assert "a.jsonl:5: not_json" in str(caught.value)
        assert workshop.manifests() == []
        [report] = workshop.data_root.glob("*/units/*.quarantine-*.jsonl")
        assert str(report) in str(caught.value)
        assert len(report.read_text().splitlines()) == 2
        milder = workshop.config(corpus, bad_rows="quarantine", max_bad_frac=0.4)
        assert workshop.prepare(milder).manifest.samples == 4

    def test_the_share_is_that_of_the_whole_build_not_of_one_file(self, workshop: Workshop) -> None:
        files = [workshop.corpus(*rows(*"abcdefghi")), workshop.corpus("{oops", name="b.jsonl")]
        data = workshop.prepare(workshop.config(*files, bad_rows="quarantine", max_bad_frac=0.1))
        assert [source.samples for source in data.manifest.sources] == [9, 0]
        with pytest.raises(DataError, match=r"1 of 10 rows cannot be used \(not_json 1\)"):
            workshop.prepare(workshop.config(*files, bad_rows="quarantine", max_bad_frac=0.09))

    def test_a_unit_built_under_a_milder_policy_is_judged_again(self, workshop: Workshop) -> None:
        corpus = workshop.corpus(*GOOD, "{oops")
        workshop.prepare(workshop.config(corpus, bad_rows="quarantine", max_bad_frac=0.5))
        for manifest in workshop.manifests():
            manifest.unlink()
        with pytest.raises(BadRowError, match=r"a\.jsonl:5: not_json"):
            workshop.prepare(workshop.config(corpus))

    def test_a_repeated_id_is_a_bad_row_even_far_behind_the_first(self, workshop: Workshop) -> None:
        many = rows(*(f"prompt {number}" for number in range(150)))
        twice = [many[3], {"prompt": "new", "completion": "an answer", "id": "r77"}]
        for settings in ({}, {"workers": 2}, {"num_conversations": 150}, {"regenerate": True}):
            config = workshop.config(workshop.corpus(*many, *twice), bad_rows="quarantine", max_length_tokens=80, **settings)
            manifest = workshop.prepare(config).manifest
            if "num_conversations" in settings:
                assert (manifest.samples, manifest.quarantined) == (150, {})
                continue
            assert (manifest.samples, manifest.quarantined) == (150, {"duplicate_id": 2}), settings
            assert manifest.prompt_files[0].rows == 150, "the second row's prompt is not trained on"

    @pytest.mark.parametrize("edges", ["auto", "equal_mass"])
    def test_no_edges_are_measured_on_a_corpus_that_is_refused(self, workshop: Workshop, edges: str) -> None:
        corpus = workshop.corpus(*GOOD, *["{oops"] * 8)
        settings = {"bad_rows": "quarantine", "bucket_edges_tokens": edges, "num_buckets": 2}
        with pytest.raises(DataError, match=r"8 of 12 rows cannot be used \(not_json 8\).*a\.jsonl:5: not_json") as caught:
            workshop.prepare(workshop.config(corpus, **settings))
        [report] = workshop.data_root.glob("*/staging/units/*.quarantine-*.jsonl")
        assert str(report) in str(caught.value)
        assert list(workshop.data_root.glob("*/edges.json")) == []
        workshop.corpus(*GOOD, *({"prompt": "the weather " * number, "completion": "fine"} for number in range(1, 9)))
        mended = workshop.prepare(workshop.config(corpus, **settings | {"max_bad_frac": 0.0}))
        (workshop.folder / "again").mkdir()
        fresh = Workshop(workshop.folder / "again", workshop.target_dir)
        assert mended.manifest == fresh.prepare(workshop.config(corpus, **settings | {"store": str(fresh.folder)})).manifest

    @pytest.mark.parametrize("edges", ["auto", (24, 40, 80)])
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ([], "holds no row at all"),
            (["{oops"] * 3, r"3 of 3 rows cannot be used \(not_json 3\), nothing is left to learn from; e.g."),
        ],
    )
    def test_it_is_said_why_nothing_is_left(self, workshop: Workshop, content: list[str], reason: str, edges: object) -> None:
        settings = {"bad_rows": "quarantine", "max_bad_frac": 1.0, "bucket_edges_tokens": edges}
        with pytest.raises(DataError, match=reason) as caught:
            workshop.prepare(workshop.config(workshop.corpus(*content), **settings))
        assert "raise data.max_bad_frac" not in str(caught.value)

    def test_what_is_less_than_asked_for_is_said(self, workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
        files = [workshop.corpus(*GOOD), workshop.corpus(name="nothing.jsonl")]
        workshop.prepare(workshop.config(*files, num_conversations=9))
        assert "nothing.jsonl holds no row at all" in caplog.text
        assert "data.num_conversations is 9, the files hold 5 fewer" in caplog.text

    def test_they_stop_it_before_the_target_is_asked(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "2 words"}, "{oops")
        with pytest.raises(DataError, match="1 of 2 rows"):
            workshop.prepare(workshop.config(corpus, regenerate=True, bad_rows="quarantine"))
        assert workshop.target.asked == []

    @pytest.mark.parametrize("content", [[], ["", " "]])
    def test_an_empty_corpus_is_an_error(self, workshop: Workshop, content: list[str]) -> None:
        with pytest.raises(DataError, match="holds no row at all"):
            workshop.prepare(workshop.config(workshop.corpus(*content)))

    def test_unfinished_and_empty_answers_are_set_aside_whatever_the_policy(
        self, workshop: Workshop, caplog: pytest.LogCaptureFixture
    ) -> None:
        corpus = workshop.corpus(*({"prompt": text} for text in ("2 words", "loop", "mute", "3 words")))
        data = workshop.prepare(workshop.config(corpus, regenerate=True, max_bad_frac=0.0))
        assert data.manifest.quarantined == {"empty_answer": 1, "unfinished": 1}
        assert "2 of 4 conversations are left out for their answers" in caplog.text

    def test_a_target_that_never_finishes_leaves_nothing_to_learn_from(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "loop"})
        with pytest.raises(DataError, match=r"1 of 1 rows cannot be used \(unfinished 1\)"):
            workshop.prepare(workshop.config(corpus, regenerate=True, max_bad_frac=1.0))

    def test_answers_that_the_template_changes_are_warned_of(self, workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
        stop = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
        letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "the"]
        corpus = workshop.corpus({"prompt": "hi"})
        data = workshop.prepare(
            workshop.config(corpus, regenerate=True), generate=lambda prompts, _: [[*letters, stop] for _ in prompts]
        )
        assert data.manifest.answer_sampling["rendered_exactly_frac"] == 0.0
        assert "only 0 of 1 answered conversations are rendered as the very tokens" in caplog.text

    @pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
    def test_over_long_samples(self, workshop: Workshop, policy: str) -> None:
        long = {"prompt": "hi", "completion": "and the weather " * 40, "id": "long"}
        config = workshop.config(workshop.corpus(GOOD[0], long), over_long=policy, max_bad_frac=0.5)
        if policy == "error":
            with pytest.raises(BadRowError, match=r"a\.jsonl:2: over_long: the sample has \d+ tokens, the limit is 80"):
                workshop.prepare(config)
            assert workshop.manifests() == []
            return
        data = workshop.prepare(config)
        lengths = [len(sample.input_ids) for sample in samples_of(data, config)]
        if policy == "drop":
            assert (len(lengths), data.manifest.quarantined) == (1, {"over_long": 1})
            return
        assert data.manifest.quarantined == {}
        assert max(lengths) == 80
        assert len(lengths) == 2 if policy == "truncate" else len(lengths) > 2
        assert data.manifest.sources[0].samples == len(lengths)

    def test_a_truncated_sample_without_an_answer_left_is_a_bad_row(self, workshop: Workshop) -> None:
        long = {"prompt": "the weather " * 60, "completion": "fine"}
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: no_supervised_pair"):
            workshop.prepare(workshop.config(workshop.corpus(GOOD[0], long), over_long="truncate"))


class TestProofs:
    @pytest.mark.parametrize("where", ["prompt", "completion"])
    def test_a_corpus_that_uses_the_mask_token_is_refused(self, workshop: Workshop, where: str) -> None:
        corpus = workshop.corpus(GOOD[0], GOOD[1] | {where: "before <|mask|> after", "id": "culprit"})
        with pytest.raises(DataError) as caught:
            workshop.prepare(workshop.config(corpus, bad_rows="quarantine"))
        message = str(caught.value)
        assert "'culprit'" in message
        assert f"'<|mask|>' (id {MASK_ID})" in message
        assert "a.jsonl:2" in message
        assert workshop.manifests() == []

    def test_even_where_truncation_would_hide_it(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "hi", "completion": "and the weather " * 40 + "<|mask|>"})
        with pytest.raises(DataError, match="uses the mask token"):
            workshop.prepare(workshop.config(corpus, over_long="truncate"))

    def test_ids_beyond_the_embedding_are_refused(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        with pytest.raises(DataError, match=r"token id \d+, the target's embedding has 40 rows"):
            prepare_data(
                config, tokenizer=TOKENIZER, vocab_size=40, target_fingerprint="t", answerer=None, progress=lambda *_: None
            )

    def test_an_unusable_mask_token_stops_everything_first(self, workshop: Workshop) -> None:
        with pytest.raises(TargetError, match="eos"):
            workshop.prepare(workshop.config(workshop.corpus(*GOOD), mask={"mask_token": "<|im_end|>"}))
        assert not workshop.data_root.exists()

    def test_a_missing_file_stops_everything_first(self, workshop: Workshop) -> None:
        with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
            workshop.prepare(workshop.config("nowhere.jsonl"))
        assert not workshop.data_root.exists()

    def test_missing_answers_without_a_target_are_an_error(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD), regenerate=True)
        with pytest.raises(DataError, match="no target to write the answers"):
            prepare_data(
                config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t", answerer=None, progress=lambda *_: None
            )
        assert workshop.manifests() == []
