"""Building a data set: reuse, proofs, policies, and nothing half-written behind any failure or kill."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import signal
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest
from chat_toys import CHATML, MASK_ID, ToyTarget, supervised_texts, toy_tokenizer

from dflash.config import Config
from dflash.data.answers import GenerateFn
from dflash.data.fingerprint import data_fingerprint
from dflash.data.prepare import PreparedData, load_data, prepare_data
from dflash.data.quarantine import BadRowError
from dflash.data.reader import SampleStore, read_prompt_hashes
from dflash.data.synthetic import prompt_hash
from dflash.errors import DataError, SchemaVersionError, StorageError, TargetError

TOKENIZER = toy_tokenizer(CHATML)
VOCAB_SIZE = len(TOKENIZER)


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    TOKENIZER.save_pretrained(str(folder))
    return folder


@pytest.fixture
def workplace(tmp_path: Path, target_dir: Path) -> Workplace:
    return Workplace(tmp_path, target_dir)


class Workplace:
    """A folder with a target, source files and builds."""

    def __init__(self, folder: Path, target_dir: Path) -> None:
        self.folder = folder
        self.target_dir = target_dir
        self.target = ToyTarget(TOKENIZER)

    @property
    def data_root(self) -> Path:
        return self.folder / "runs" / "data"

    def corpus(self, *rows: Any, name: str = "a.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return str(self.folder / name)

    def config(self, *files: str, mask: Any = None, **data: Any) -> Config:
        answers = {"regenerate": data.pop("regenerate", False), "max_new_tokens": 24, **data.pop("answers", {})}
        edges = {"bucket_edges_tokens": (24, 40, 80), "max_length_tokens": 80}
        tree = {
            "run": {"root": str(self.folder / "runs")},
            "target": {"path": str(self.target_dir), **(mask or {"mask_token": "<|mask|>"})},
            "data": {"source": "files", "files": files, "answers": answers, **edges, **data},
        }
        return Config.model_validate(tree)

    def prepare(self, config: Config, *, generate: GenerateFn | None = None, target: str = "t1") -> PreparedData:
        return prepare_data(
            config,
            tokenizer=TOKENIZER,
            vocab_size=VOCAB_SIZE,
            target_fingerprint=target,
            generate=generate or self.target,
            progress=lambda *_: None,
        )

    def left_behind(self) -> set[str]:
        return {path.name for path in self.data_root.iterdir()} - {".lock", "answers"} if self.data_root.exists() else set()


def rows(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": f"answer to {prompt}", "id": f"r{i}"} for i, prompt in enumerate(prompts)]


GOOD = rows("hi", "what is the weather", "and numbers", "talk about " + "the weather and " * 5)


def texts_of(data: PreparedData) -> list[list[str]]:
    with SampleStore(data.dir) as store:
        samples = store.read(range(store.rows))
    return [supervised_texts(TOKENIZER, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples]


class TestContent:
    def test_rows_become_samples_in_their_buckets(self, workplace: Workplace) -> None:
        data = workplace.prepare(workplace.config(workplace.corpus(*GOOD)))
        assert not data.reused
        assert sorted(texts_of(data)) == sorted([f"{row['completion']}<|im_end|>"] for row in GOOD)
        with SampleStore(data.dir) as store:
            manifest = data.manifest
            assert manifest.samples == store.rows == 4
            assert manifest.tokens == store.lengths.sum()
            edges = (0, 24, 40, 80)
            for row in range(store.rows):
                bucket = store.buckets[row]
                assert edges[bucket] < store.lengths[row] <= edges[bucket + 1]
            for stats in manifest.buckets:
                own = store.lengths[store.buckets == stats.bucket]
                assert (stats.samples, stats.tokens) == (len(own), own.sum())
            masks = [sample.loss_mask.sum() for sample in store.read(range(store.rows))]
            assert manifest.supervised_tokens == sum(masks) == sum(b.supervised_tokens for b in manifest.buckets)

    def test_the_manifest_says_where_everything_came_from(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD), template_flags={"mood": "kind"})
        manifest = workplace.prepare(config, target="fingerprint of the target").manifest
        assert manifest.source["files"][0]["name"] == "a.jsonl"
        assert len(manifest.source["files"][0]["sha256"]) == 64
        assert manifest.target_fingerprint == "fingerprint of the target"
        assert manifest.template_flags == {"mood": "kind"}
        assert manifest.mask_token_id == MASK_ID
        assert (manifest.on_policy, manifest.answer_sampling) == (False, {})
        assert manifest.fingerprint.startswith(load_data(workplace.data_root / manifest.fingerprint[:16]).dir.name)

    def test_the_target_writes_the_answers_on_request(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "2 words", "completion": "nonsense"}, {"prompt": "3 words"})
        data = workplace.prepare(workplace.config(corpus, regenerate=True))
        assert sorted(texts_of(data)) == [["yes yes yes<|im_end|>"], ["yes yes<|im_end|>"]]
        assert data.manifest.on_policy
        assert data.manifest.answer_sampling["rendered_exactly_frac"] == 1.0
        assert data.manifest.answer_sampling["max_new_tokens"] == 24

    def test_answers_cut_by_the_limit_are_kept_without_an_end_on_request(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "loop"}, {"prompt": "2 words"})
        answers = {"regenerate": True, "keep_unfinished": True}
        data = workplace.prepare(workplace.config(corpus, answers=answers))
        assert sorted(texts_of(data)) == [[" and" * 24], ["yes yes<|im_end|>"]]

    def test_hashes_of_every_user_turn_that_was_trained_on_are_listed(self, workplace: Workplace) -> None:
        turns = [("user", "Hi there!"), ("assistant", "yo"), ("user", "and 2?"), ("assistant", "two")]
        chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
        long = {"prompt": "the weather " * 60, "completion": "x y"}
        corpus = workplace.corpus(chat, long)
        data = workplace.prepare(workplace.config(corpus, max_bad_frac=0.5))
        assert read_prompt_hashes(data.dir) == {prompt_hash("hi there"), prompt_hash("and 2?")}

    def test_synthetic_conversations_need_no_file(self, workplace: Workplace) -> None:
        config = workplace.config(source="synthetic", num_conversations=12, max_length_tokens=600, bucket_edges_tokens=(200, 600))
        big = config.model_copy(update={"plan": config.plan})
        data = workplace.prepare(big)
        assert data.manifest.samples == 12
        assert data.manifest.source["kind"] == "synthetic"


class TestPreview:
    def test_it_shows_samples_with_supervised_tokens_marked_and_escapes_them(self, workplace: Workplace) -> None:
        nasty = "<script>alert('x')</script> & more"
        data = workplace.prepare(workplace.config(workplace.corpus({"prompt": nasty, "completion": "<b>é漢🙂</b>", "id": "<i>"})))
        page = (data.dir / "preview.html").read_text(encoding="utf-8")
        assert "<script" not in page
        assert "<b>é" not in page
        assert "&lt;i&gt;" in page
        shown = page.split("<pre>")[1].split("</pre>")[0]
        supervised = shown.split('<span class="on">')[1]
        for character in "é漢🙂":
            assert character in supervised, "characters of several tokens are shown whole"
        assert "\ufffd" not in page
        assert "alert" in shown.split('<span class="on">')[0].replace('</span><span class="t">', "")

    def test_every_bucket_is_shown(self, workplace: Workplace) -> None:
        data = workplace.prepare(workplace.config(workplace.corpus(*GOOD, *[r | {"id": f"x{i}"} for i, r in enumerate(GOOD * 9)])))
        page = (data.dir / "preview.html").read_text(encoding="utf-8")
        shown = page.count("<article>")
        assert shown == sum(min(6, bucket.samples) for bucket in data.manifest.buckets)
        assert shown < data.manifest.samples


class TestReuse:
    def test_an_unchanged_input_is_reused_without_touching_a_file(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD))
        first = workplace.prepare(config)
        stamps = {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")}
        second = workplace.prepare(config)
        assert second.reused
        assert second == PreparedData(first.dir, first.manifest, reused=True)
        assert {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")} == stamps

    def test_a_moved_file_and_another_batch_size_change_nothing(self, workplace: Workplace) -> None:
        corpus = Path(workplace.corpus(*GOOD))
        first = workplace.prepare(workplace.config(str(corpus)))
        (workplace.folder / "elsewhere").mkdir()
        moved = corpus.rename(workplace.folder / "elsewhere" / corpus.name)
        config = workplace.config(str(moved), answers={"batch_size": 3})
        assert workplace.prepare(config).dir == first.dir

    @pytest.mark.parametrize(
        "change", ["row", "edges", "supervise", "limit", "system", "flags", "target", "mask", "template", "rows_per_group"]
    )
    def test_whatever_changes_the_content_changes_the_fingerprint(self, workplace: Workplace, change: str) -> None:
        corpus = workplace.corpus(*GOOD)
        tokenizer, target, settings, mask = TOKENIZER, "t1", {}, None
        before = data_fingerprint(workplace.config(corpus), tokenizer=tokenizer, target_fingerprint=target)
        if change == "row":
            workplace.corpus(*GOOD[:-1], GOOD[-1] | {"completion": "other"})
        elif change == "target":
            target = "t2"
        elif change == "template":
            tokenizer = toy_tokenizer(CHATML + "{# another #}")
        elif change == "mask":
            mask = {"mask_token": "<|head|>"}
        settings = {
            "edges": {"bucket_edges_tokens": (25, 40, 80)},
            "supervise": {"supervise": "last"},
            "limit": {"max_length_tokens": 79},
            "system": {"system_prompt": "Be kind."},
            "flags": {"template_flags": {"x": 1}},
            "rows_per_group": {"rows_per_group": 2},
        }.get(change, {})
        after = data_fingerprint(workplace.config(corpus, mask=mask, **settings), tokenizer=tokenizer, target_fingerprint=target)
        assert after != before

    def test_other_buckets_take_the_answers_from_the_journal(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "2 words"}, {"prompt": "3 words"})
        workplace.prepare(workplace.config(corpus, regenerate=True))
        asked = len(workplace.target.asked)
        again = workplace.prepare(workplace.config(corpus, regenerate=True, bucket_edges_tokens=(30, 80)))
        assert not again.reused
        assert len(workplace.target.asked) == asked
        workplace.prepare(workplace.config(corpus, regenerate=True), target="another target")
        assert len(workplace.target.asked) == 2 * asked

    def test_a_damaged_data_set_is_not_reused(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD))
        data = workplace.prepare(config)
        file = next(data.dir.rglob("*.parquet"))
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
        with pytest.raises(DataError, match="differs from the hash") as caught:
            workplace.prepare(config)
        assert f"remove {data.dir}" in str(caught.value)
        load_data(data.dir)  # sizes alone cannot tell
        with pytest.raises(DataError):
            load_data(data.dir, verify=True)

    def test_a_data_set_of_another_schema_version_is_refused(self, workplace: Workplace) -> None:
        data = workplace.prepare(workplace.config(workplace.corpus(*GOOD)))
        file = data.dir / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 99}))
        with pytest.raises(SchemaVersionError, match="schema version 99"):
            load_data(data.dir)


class TestPolicies:
    def test_the_first_bad_row_stops_the_build_by_default(self, workplace: Workplace) -> None:
        corpus = workplace.corpus(GOOD[0], "{oops", GOOD[1])
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: not_json"):
            workplace.prepare(workplace.config(corpus))
        assert workplace.left_behind() == set()

    def test_bad_rows_are_set_aside_on_request_with_origin_and_reason(self, workplace: Workplace) -> None:
        corpus = workplace.corpus(GOOD[0], "{oops", {"messages": []}, {"prompt": "x", "completion": ""}, {"prompt": "y"}, GOOD[1])
        data = workplace.prepare(workplace.config(corpus, bad_rows="quarantine", max_bad_frac=0.7))
        assert data.manifest.samples == 2
        assert data.manifest.quarantined == {"empty": 1, "no_answer": 1, "no_supervised_pair": 1, "not_json": 1}
        lines = [json.loads(line) for line in (data.dir / "quarantine.jsonl").read_text().splitlines()]
        assert [line["origin"] for line in lines] == [f"{corpus}:{number}" for number in (2, 3, 4, 5)]
        assert all(": " in line["reason"] for line in lines)

    def test_too_many_bad_rows_stop_the_build_and_stay_listed(self, workplace: Workplace) -> None:
        corpus = workplace.corpus(*GOOD, "{oops", "[1]")
        with pytest.raises(DataError, match=r"2 of 6 rows cannot be used \(not_json 1, wrong_type 1\)") as caught:
            workplace.prepare(workplace.config(corpus, bad_rows="quarantine", max_bad_frac=0.3))
        assert f"{corpus}:5" in str(caught.value)
        [report] = workplace.left_behind()
        assert report.endswith(".quarantine.jsonl")
        assert len((workplace.data_root / report).read_text().splitlines()) == 2

    def test_they_stop_it_before_the_target_is_asked(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "2 words"}, "{oops")
        with pytest.raises(DataError, match="1 of 2 rows"):
            workplace.prepare(workplace.config(corpus, regenerate=True, bad_rows="quarantine"))
        assert workplace.target.asked == []

    @pytest.mark.parametrize("content", [[], ["", " "]])
    def test_an_empty_corpus_is_an_error(self, workplace: Workplace, content: list[str]) -> None:
        with pytest.raises(DataError, match="holds no row at all"):
            workplace.prepare(workplace.config(workplace.corpus(*content)))

    def test_unfinished_and_empty_answers_are_set_aside_whatever_the_policy(
        self, workplace: Workplace, caplog: pytest.LogCaptureFixture
    ) -> None:
        corpus = workplace.corpus(*({"prompt": text} for text in ("2 words", "loop", "mute", "3 words")))
        data = workplace.prepare(workplace.config(corpus, regenerate=True, max_bad_frac=0.0))
        assert data.manifest.quarantined == {"empty_answer": 1, "unfinished": 1}
        assert "2 of 4 conversations are left out for their answers" in caplog.text

    def test_a_target_that_never_finishes_leaves_nothing_to_learn_from(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "loop"})
        with pytest.raises(DataError, match=r"1 of 1 rows cannot be used \(unfinished 1\)"):
            workplace.prepare(workplace.config(corpus, regenerate=True, max_bad_frac=1.0))

    def test_answers_that_the_template_changes_are_warned_of(self, workplace: Workplace, caplog: pytest.LogCaptureFixture) -> None:
        stop = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
        letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "the"]
        corpus = workplace.corpus({"prompt": "hi"})
        data = workplace.prepare(
            workplace.config(corpus, regenerate=True), generate=lambda prompts, _: [[*letters, stop] for _ in prompts]
        )
        assert data.manifest.answer_sampling["rendered_exactly_frac"] == 0.0
        assert "only 0 of 1 answered conversations are rendered as the very tokens" in caplog.text

    @pytest.mark.parametrize("policy", ["error", "quarantine", "truncate"])
    def test_over_long_samples(self, workplace: Workplace, policy: str) -> None:
        long = {"prompt": "hi", "completion": "and the weather " * 40, "id": "long"}
        config = workplace.config(workplace.corpus(GOOD[0], long), over_long=policy, max_bad_frac=0.5)
        if policy == "error":
            with pytest.raises(BadRowError, match=r"over_long: sample 'long' has \d+ tokens, the limit is 80"):
                workplace.prepare(config)
            assert workplace.left_behind() == set()
            return
        data = workplace.prepare(config)
        with SampleStore(data.dir) as store:
            assert store.lengths.max() == (80 if policy == "truncate" else store.lengths.min())
        assert data.manifest.quarantined == ({} if policy == "truncate" else {"over_long": 1})

    def test_a_truncated_sample_without_an_answer_left_is_a_bad_row(self, workplace: Workplace) -> None:
        long = {"prompt": "the weather " * 60, "completion": "fine"}
        with pytest.raises(BadRowError, match=r"a\.jsonl:2: no_supervised_pair"):
            workplace.prepare(workplace.config(workplace.corpus(GOOD[0], long), over_long="truncate"))


class TestProofs:
    @pytest.mark.parametrize("where", ["prompt", "completion"])
    def test_a_corpus_that_uses_the_mask_token_is_refused(self, workplace: Workplace, where: str) -> None:
        corpus = workplace.corpus(GOOD[0], GOOD[1] | {where: "before <|mask|> after", "id": "culprit"})
        with pytest.raises(DataError) as caught:
            workplace.prepare(workplace.config(corpus, bad_rows="quarantine"))
        message = str(caught.value)
        assert "'culprit'" in message
        assert f"'<|mask|>' (id {MASK_ID})" in message
        assert "a.jsonl:2" in message
        assert workplace.left_behind() == set()

    def test_even_where_truncation_would_hide_it(self, workplace: Workplace) -> None:
        corpus = workplace.corpus({"prompt": "hi", "completion": "and the weather " * 40 + "<|mask|>"})
        with pytest.raises(DataError, match="uses the mask token"):
            workplace.prepare(workplace.config(corpus, over_long="truncate"))

    def test_ids_beyond_the_embedding_are_refused(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD))
        with pytest.raises(DataError, match=r"token id \d+, the target's embedding has 40 rows"):
            prepare_data(
                config, tokenizer=TOKENIZER, vocab_size=40, target_fingerprint="t", generate=None, progress=lambda *_: None
            )

    def test_an_unusable_mask_token_stops_everything_first(self, workplace: Workplace) -> None:
        with pytest.raises(TargetError, match="eos"):
            workplace.prepare(workplace.config(workplace.corpus(*GOOD), mask={"mask_token": "<|im_end|>"}))
        assert not workplace.data_root.exists()

    def test_a_missing_file_stops_everything_first(self, workplace: Workplace) -> None:
        with pytest.raises(StorageError, match=r"nowhere\.jsonl"):
            workplace.prepare(workplace.config("nowhere.jsonl"))
        assert not workplace.data_root.exists()

    def test_missing_answers_without_a_target_are_an_error(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD), regenerate=True)
        with pytest.raises(DataError, match="no target to write the answers"):
            prepare_data(
                config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t", generate=None, progress=lambda *_: None
            )
        assert workplace.left_behind() == set()


class TestKills:
    def test_a_kill_leaves_a_partial_folder_that_the_next_build_replaces(self, workplace: Workplace) -> None:
        corpus = workplace.corpus(*({"prompt": f"{1 + i % 4} words"} for i in range(40)))
        config = workplace.config(corpus, regenerate=True, answers={"batch_size": 2})

        def suicidal(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
            if len(workplace.target.batches) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return workplace.target(prompts, keys)

        child = multiprocessing.get_context("fork").Process(target=workplace.prepare, args=(config,), kwargs={"generate": suicidal})
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        [partial] = workplace.left_behind()
        assert partial.endswith(".partial")
        with pytest.raises(DataError, match="no complete data set"):
            load_data(workplace.data_root / partial)
        data = workplace.prepare(config)
        assert data.manifest.samples == 40
        assert len(workplace.target.keys) == 30, "ten answers came from the journal"
        assert workplace.left_behind() == {data.dir.name}
        load_data(data.dir, verify=True)

    def test_a_second_builder_waits_for_the_first_and_then_reuses(self, workplace: Workplace) -> None:
        config = workplace.config(workplace.corpus(*GOOD))
        built = workplace.prepare(config)
        context = multiprocessing.get_context("fork")
        inbox = context.Queue()

        def second() -> None:
            logger = logging.getLogger("dflash.data.prepare")
            logger.setLevel(logging.INFO)
            logger.addHandler(QueueHandler(inbox))
            inbox.put(workplace.prepare(config).reused)

        with (workplace.data_root / ".lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            child = context.Process(target=second)
            child.start()
            assert "waiting" in inbox.get(timeout=60).getMessage()
            assert inbox.empty()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert "reused" in inbox.get(timeout=60).getMessage()
            assert inbox.get(timeout=60) is True
            child.join()
        assert workplace.left_behind() == {built.dir.name}
