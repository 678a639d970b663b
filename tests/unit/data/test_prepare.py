"""Building a data set: content, preview, reuse, growth."""

from __future__ import annotations

import fcntl
import json
import logging
import queue
import re
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
from chat_toys import CHATML, MASK_ID, supervised_texts, toy_tokenizer
from workshop import GOOD, TOKENIZER, Workshop, rows, samples_of

from dflash.config import Config
from dflash.data.fingerprint import make_recipe
from dflash.data.prepare import PreparedData, load_data, plan_build
from dflash.data.prompt_hashes import read_prompt_hashes
from dflash.data.reader import SampleStore
from dflash.data.synthetic import prompt_hash
from dflash.errors import DataError, SchemaVersionError
from tests.support.sealing import rewrite, values_of


def texts_of(data: PreparedData, config: Config) -> list[list[str]]:
    return [supervised_texts(TOKENIZER, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples_of(data, config)]


class TestContent:
    def test_rows_become_samples_in_their_buckets(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        data = workshop.prepare(config)
        assert not data.reused
        assert sorted(texts_of(data, config)) == sorted([f"{row['completion']}<|im_end|>"] for row in GOOD)
        with SampleStore(data.location, fingerprint=data.fingerprint, reader=config.data.reader) as store:
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

    def test_the_manifest_says_where_everything_came_from(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD), template_flags={"mood": "kind"})
        manifest = workshop.prepare(config, target="fingerprint of the target").manifest
        (source,) = manifest.sources
        assert (source.label, source.rows, source.samples) == ("a.jsonl", 4, 4)
        assert len(source.sha256) == len(source.unit) == 64
        assert source.size_bytes == Path(config.data.files[0]).stat().st_size
        assert (manifest.rows, manifest.mask_token_uses, manifest.edges_tokens) == (4, 0, (24, 40, 80))
        assert manifest.target_id == "target"
        assert manifest.target_fingerprint == "fingerprint of the target"
        assert manifest.template_flags == {"mood": "kind"}
        assert manifest.mask_token_id == MASK_ID
        assert (manifest.on_policy, manifest.answer_sampling) == (False, {})
        assert str(workshop.folder) not in json.dumps(json.loads((next(workshop.data_root.glob("*/manifest.json"))).read_text()))

    def test_the_target_writes_the_answers_on_request(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "2 words", "completion": "nonsense"}, {"prompt": "3 words"})
        config = workshop.config(corpus, regenerate=True)
        data = workshop.prepare(config)
        assert sorted(texts_of(data, config)) == [["yes yes yes<|im_end|>"], ["yes yes<|im_end|>"]]
        assert data.manifest.on_policy
        assert data.manifest.answer_sampling["rendered_exactly_frac"] == 1.0
        assert data.manifest.answer_sampling["max_new_tokens"] == 24

    def test_answers_cut_by_the_limit_are_kept_without_an_end_on_request(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "loop"}, {"prompt": "2 words"})
        answers = {"regenerate": True, "keep_unfinished": True}
        config = workshop.config(corpus, answers=answers)
        assert sorted(texts_of(workshop.prepare(config), config)) == [[" and" * 24], ["yes yes<|im_end|>"]]

    def test_hashes_of_every_user_turn_that_was_trained_on_are_listed(self, workshop: Workshop) -> None:
        turns = [("user", "Hi there!"), ("assistant", "yo"), ("user", "and 2?"), ("assistant", "two")]
        chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
        long = {"prompt": "the weather " * 60, "completion": "x y"}
        corpus = workshop.corpus(chat, long)
        data = workshop.prepare(workshop.config(corpus, max_bad_frac=0.5))
        trained = read_prompt_hashes(data.store, data.manifest)
        assert len(trained) == 2
        assert prompt_hash("hi there") in trained
        assert prompt_hash("and 2?") in trained
        assert prompt_hash("the weather " * 60) not in trained, "no sample was made of it"

    def test_synthetic_conversations_need_no_file(self, workshop: Workshop) -> None:
        config = workshop.config(source="synthetic", num_conversations=12, max_length_tokens=600, bucket_edges_tokens=(200, 600))
        data = workshop.prepare(config)
        assert data.manifest.samples == 12
        assert [source.label for source in data.manifest.sources] == ["synthetic-7"]


class TestPreview:
    def test_it_shows_samples_with_supervised_tokens_marked_and_escapes_them(self, workshop: Workshop) -> None:
        nasty = "<script>alert('x')</script> & more"
        data = workshop.prepare(workshop.config(workshop.corpus({"prompt": nasty, "completion": "<b>é漢🙂</b>", "id": "<i>"})))
        page = data.store.read("preview.html").decode("utf-8")
        assert "<script" not in page
        assert "<b>é" not in page
        assert "&lt;i&gt;" in page
        shown = page.split("<pre>")[1].split("</pre>")[0]
        before, supervised = shown.split("<mark>", 1)
        for character in "é漢🙂":
            assert character in supervised, "characters of several tokens are shown whole"
        assert "\ufffd" not in page
        assert "alert" in re.sub(r"</?[is]>", "", before)

    def test_every_bucket_is_shown(self, workshop: Workshop) -> None:
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD, *[r | {"id": f"x{i}"} for i, r in enumerate(GOOD * 9)])))
        page = data.store.read("preview.html").decode("utf-8")
        shown = page.count("<article>")
        assert shown == sum(min(6, bucket.samples) for bucket in data.manifest.buckets)
        assert shown < data.manifest.samples


class TestReuse:
    def test_an_unchanged_input_is_reused_without_touching_a_file(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        first = workshop.prepare(config)
        folder = Path(first.location)
        stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        second = workshop.prepare(config)
        assert second.reused
        assert second == PreparedData(first.location, first.fingerprint, first.manifest, reused=True)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == stamps

    def test_a_moved_file_and_another_batch_size_change_nothing(self, workshop: Workshop) -> None:
        corpus = Path(workshop.corpus(*GOOD))
        first = workshop.prepare(workshop.config(str(corpus)))
        (workshop.folder / "elsewhere").mkdir()
        moved = corpus.rename(workshop.folder / "elsewhere" / corpus.name)
        config = workshop.config(str(moved), answers={"batch_size": 3})
        assert workshop.prepare(config) == PreparedData(first.location, first.fingerprint, first.manifest, reused=True)

    @pytest.mark.parametrize(
        "change", ["edges", "supervise", "limit", "system", "flags", "target", "mask", "template", "rows_per_group", "on_policy"]
    )
    def test_whatever_changes_the_samples_changes_the_recipe(self, workshop: Workshop, change: str) -> None:
        corpus = workshop.corpus(*GOOD)

        def recipe(**settings: object) -> str:
            template = CHATML + ("{# another #}" if settings.pop("template", False) else "")
            mask_id = 2 if settings.pop("mask", False) else 1
            target = str(settings.pop("target", "t1"))
            config = workshop.config(corpus, **settings)
            return make_recipe(
                config, tokenizer=toy_tokenizer(template), target_fingerprint=target, vocab_size=400, mask_token_id=mask_id
            ).fingerprint

        changed: dict[str, dict[str, object]] = {
            "edges": {"bucket_edges_tokens": (25, 40, 80)},
            "supervise": {"supervise": "last"},
            "limit": {"max_length_tokens": 79},
            "system": {"system_prompt": "Be kind."},
            "flags": {"template_flags": {"x": 1}},
            "rows_per_group": {"rows_per_group": 2},
            "on_policy": {"regenerate": True},
        }
        assert recipe(**changed.get(change, {change: True})) != recipe()

    def test_what_only_schedules_or_forbids_does_not_change_it(self, workshop: Workshop) -> None:
        corpus = workshop.corpus(*GOOD)

        def recipe(**settings: object) -> str:
            config = workshop.config(corpus, **settings)
            return make_recipe(config, tokenizer=TOKENIZER, target_fingerprint="t", vocab_size=400, mask_token_id=1).fingerprint

        for settings in ({"workers": 4}, {"bad_rows": "quarantine"}, {"max_bad_frac": 0.5}, {"store": "s3://b/x"}, {"seed": 99}):
            assert recipe(**settings) == recipe(), settings

    def test_a_changed_row_changes_the_unit_and_a_repeated_file_is_refused(self, workshop: Workshop) -> None:
        def units(*files: str) -> list[str]:
            _, specs = plan_build(
                workshop.config(*files), tokenizer=TOKENIZER, vocab_size=400, target_fingerprint="t", progress=lambda *_: None
            )
            return [spec.unit for spec in specs]

        corpus = workshop.corpus(*GOOD)
        before = units(corpus)
        workshop.corpus(*GOOD[:-1], GOOD[-1] | {"completion": "other"})
        assert units(corpus) != before
        (workshop.folder / "b").mkdir()
        with pytest.raises(DataError, match="the same name and the same content"):
            units(corpus, workshop.corpus(*GOOD[:-1], GOOD[-1] | {"completion": "other"}, name="b/a.jsonl"))

    def test_other_buckets_take_the_answers_from_the_journal(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "2 words"}, {"prompt": "3 words"})
        workshop.prepare(workshop.config(corpus, regenerate=True))
        asked = len(workshop.target.asked)
        again = workshop.prepare(workshop.config(corpus, regenerate=True, bucket_edges_tokens=(30, 80)))
        assert not again.reused
        assert len(workshop.target.asked) == asked
        workshop.prepare(workshop.config(corpus, regenerate=True), target="another target")
        assert len(workshop.target.asked) == 2 * asked

    @pytest.mark.parametrize("pattern", ["*.parquet", "*.npy", "*.jsonl", "units/*.json", "manifests/*.json"])
    def test_a_damaged_file_is_noticed_and_built_again(
        self, workshop: Workshop, caplog: pytest.LogCaptureFixture, pattern: str
    ) -> None:
        config = workshop.config(workshop.corpus(GOOD[0], "{oops", *GOOD[1:]), bad_rows="quarantine", max_bad_frac=0.5)
        data = workshop.prepare(config)
        before = {path.relative_to(data.location): path.read_bytes() for path in Path(data.location).rglob("*.*") if path.is_file()}
        file = next(Path(data.location).rglob(pattern))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        if pattern.startswith("units"):
            Path(data.location, "manifest.json").unlink()
            next(Path(data.location).glob("manifests/*")).unlink()
        elif not pattern.startswith("manifests"):
            load_data(data.location, fingerprint=data.fingerprint, verify="sizes")  # sizes alone cannot tell
            with pytest.raises(DataError, match="differs from the hash"):
                load_data(data.location, fingerprint=data.fingerprint, verify="full")
        mended = workshop.prepare(config)
        assert (mended.reused, mended.manifest) == (False, data.manifest)
        assert file.name in caplog.text
        for path, good in before.items():
            if path.name != "build.json":
                assert (Path(data.location) / path).read_bytes() == good, path

    def test_a_data_set_of_another_schema_version_is_refused(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        data = workshop.prepare(config)
        for file in workshop.manifests():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 99}))
        with pytest.raises(SchemaVersionError, match="schema version 99"):
            load_data(data.location, fingerprint=None, verify="sizes")
        with pytest.raises(SchemaVersionError, match="schema version 99"):
            workshop.prepare(config)

    @pytest.mark.parametrize(
        "name", ["../outside.parquet", "/etc/passwd", "bucket=0/../../x.parquet", "bucket=0/.hidden", "s3://a/b"]
    )
    def test_names_that_leave_the_data_set_are_refused(self, workshop: Workshop, name: str) -> None:
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD)))
        (workshop.data_root / "outside.parquet").write_bytes(b"x")
        for file in workshop.manifests():
            shards = values_of(file)["shards"]
            shards[0] |= {"path": name, "size_bytes": 1}
            rewrite(file, shards=shards)
        with pytest.raises(DataError, match="is no name of a file of a data set"):
            load_data(data.location, fingerprint=data.fingerprint, verify="sizes")


class TestGrowth:
    def test_adding_a_file_appends_rows_and_rewrites_nothing(self, workshop: Workshop) -> None:
        first_file = workshop.corpus(*GOOD)
        one = workshop.config(first_file)
        first = workshop.prepare(one)
        folder = Path(first.location)
        stamps = {path: path.stat().st_mtime_ns for path in (*folder.glob("bucket=*/*"), *folder.glob("units/*"))}
        both = workshop.config(first_file, workshop.corpus(*rows("a new prompt", "another"), name="b.jsonl"))
        second = workshop.prepare(both)
        assert second.location == first.location
        assert second.fingerprint != first.fingerprint
        assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
        assert second.manifest.shards[: len(first.manifest.shards)] == first.manifest.shards
        old, new = samples_of(first, one), samples_of(second, both)
        assert len(new) == 6
        assert [s.input_ids.tolist() for s in new[:4]] == [s.input_ids.tolist() for s in old]
        assert second.manifest.tokens == sum(len(sample.input_ids) for sample in new)

    def test_both_versions_stay_readable_and_the_newest_is_the_default(self, workshop: Workshop) -> None:
        first_file = workshop.corpus(*GOOD)
        first = workshop.prepare(workshop.config(first_file))
        second = workshop.prepare(workshop.config(first_file, workshop.corpus(*rows("new"), name="b.jsonl")))
        assert load_data(first.location, fingerprint=None, verify="full").manifest == second.manifest
        assert load_data(first.location, fingerprint=first.fingerprint, verify="full").manifest == first.manifest
        with pytest.raises(DataError, match="no complete data set"):
            load_data(first.location, fingerprint="0" * 64, verify="sizes")
        again = workshop.prepare(workshop.config(first_file))
        assert again.reused
        assert load_data(first.location, fingerprint=None, verify="full").manifest == first.manifest, "the newest asked for"

    def test_the_order_of_the_files_is_the_order_of_the_rows(self, workshop: Workshop) -> None:
        a, b = workshop.corpus(*rows("first")), workshop.corpus(*rows("second"), name="b.jsonl")
        one, other = workshop.config(a, b), workshop.config(b, a)
        forward, backward = workshop.prepare(one), workshop.prepare(other)
        assert forward.fingerprint != backward.fingerprint
        assert forward.manifest.shards == tuple(reversed(backward.manifest.shards))
        assert texts_of(forward, one) == texts_of(backward, other)[::-1]

    def test_a_changed_file_is_built_again_and_the_others_are_kept(self, workshop: Workshop) -> None:
        a, b = workshop.corpus(*GOOD), workshop.corpus(*rows("old"), name="b.jsonl")
        config = workshop.config(a, b)
        before = workshop.prepare(config)
        workshop.corpus(*rows("quite another one"), name="b.jsonl")
        after = workshop.prepare(config)
        assert after.manifest.shards[:-1] == before.manifest.shards[:-1]
        assert after.manifest.shards[-1].sha256 != before.manifest.shards[-1].sha256
        assert len(texts_of(after, config)) == 5

    def test_a_number_of_conversations_is_shared_out_in_the_order_of_the_files(self, workshop: Workshop) -> None:
        a, b = workshop.corpus(*GOOD), workshop.corpus("{oops", *rows("x", "y", "z"), name="b.jsonl")
        for wanted, taken in ((2, [2]), (4, [4]), (6, [4, 2]), (99, [4, 3])):
            config = workshop.config(a, b, num_conversations=wanted, bad_rows="quarantine", max_bad_frac=0.9)
            data = workshop.prepare(config)
            assert [source.samples for source in data.manifest.sources] == taken, wanted
        everything = workshop.config(a, b, bad_rows="quarantine", max_bad_frac=0.9)
        assert workshop.prepare(everything).fingerprint == data.fingerprint, "a limit above what there is changes nothing"


class TestMeasuredEdges:
    def test_edges_come_from_the_measured_lengths_and_later_files_keep_them(self, workshop: Workshop) -> None:
        prompts = ["talk " * (1 + number % 4) + str(number) for number in range(40)]
        a = workshop.corpus(*rows(*prompts))
        settings = {"bucket_edges_tokens": "auto", "num_buckets": 3}
        config = workshop.config(a, **settings)
        data = workshop.prepare(config)
        edges = data.manifest.edges_tokens
        assert edges[-1] == 80
        assert 2 <= len(edges) <= 3
        lengths = sorted(len(sample.input_ids) for sample in samples_of(data, config))
        with SampleStore(data.location, fingerprint=data.fingerprint, reader=config.data.reader) as store:
            assert sorted(store.lengths.tolist()) == lengths
            assert all(length <= edges[bucket] for length, bucket in zip(store.lengths, store.buckets, strict=True))
        fixed = workshop.prepare(workshop.config(a, bucket_edges_tokens=edges))
        assert [(s.rows, s.sha256) for s in fixed.manifest.shards] == [(s.rows, s.sha256) for s in data.manifest.shards]
        grown = workshop.prepare(workshop.config(a, workshop.corpus(*rows("x " * 30), name="b.jsonl"), **settings))
        assert grown.manifest.edges_tokens == edges
        assert grown.manifest.shards[: len(data.manifest.shards)] == data.manifest.shards
        assert not (Path(data.location) / "staging").exists()

    def test_nothing_is_tokenized_twice(self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        from dflash.data.tokenize import BatchTokenizer

        original = BatchTokenizer.__call__

        def counting(self: BatchTokenizer, batch: object) -> object:
            found = original(self, batch)  # type: ignore[arg-type]
            seen.append(found.rows)
            return found

        monkeypatch.setattr(BatchTokenizer, "__call__", counting)
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD), bucket_edges_tokens="equal_mass", num_buckets=2))
        assert sum(seen) == data.manifest.rows == 4


class TestTwoBuilders:
    def test_a_second_builder_waits_for_the_first_and_then_reuses(
        self, workshop: Workshop, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        built = workshop.prepare(config)
        said: queue.Queue[logging.LogRecord] = queue.Queue()
        caplog.set_level(logging.INFO, "dflash.data.prepare")
        logging.getLogger("dflash.data.prepare").addHandler(handler := QueueHandler(said))
        # A lock belongs to an open file, so another opening of it in this process stands for another process.
        with (workshop.data_root / ".lock").open("w") as held, ThreadPoolExecutor(1) as pool:
            fcntl.flock(held, fcntl.LOCK_EX)
            second = pool.submit(workshop.prepare, config)
            assert "waiting" in said.get(timeout=60).getMessage()
            assert not second.done()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert second.result(timeout=60).reused
        logging.getLogger("dflash.data.prepare").removeHandler(handler)
        assert "reused" in said.get_nowait().getMessage()
        assert workshop.left_behind() == {Path(built.location).name}
