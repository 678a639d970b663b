"""Building a data set: content, preview, reuse, and nothing half-written behind a kill."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
from chat_toys import CHATML, MASK_ID, supervised_texts, toy_tokenizer
from workshop import GOOD, TOKENIZER, Workshop, many_questions

from dflash.data.fingerprint import data_fingerprint
from dflash.data.prepare import PreparedData, load_data
from dflash.data.reader import SampleStore, read_prompt_hashes
from dflash.data.synthetic import prompt_hash
from dflash.errors import DataError, SchemaVersionError


def texts_of(data: PreparedData) -> list[list[str]]:
    with SampleStore(data.dir) as store:
        samples = store.read(range(store.rows))
    return [supervised_texts(TOKENIZER, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples]


class TestContent:
    def test_rows_become_samples_in_their_buckets(self, workshop: Workshop) -> None:
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD)))
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

    def test_the_manifest_says_where_everything_came_from(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD), template_flags={"mood": "kind"})
        manifest = workshop.prepare(config, target="fingerprint of the target").manifest
        assert manifest.source["files"][0]["name"] == "a.jsonl"
        assert len(manifest.source["files"][0]["sha256"]) == 64
        assert manifest.target_fingerprint == "fingerprint of the target"
        assert manifest.template_flags == {"mood": "kind"}
        assert manifest.mask_token_id == MASK_ID
        assert (manifest.on_policy, manifest.answer_sampling) == (False, {})
        assert manifest.fingerprint.startswith(load_data(workshop.data_root / manifest.fingerprint[:16]).dir.name)

    def test_the_target_writes_the_answers_on_request(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "2 words", "completion": "nonsense"}, {"prompt": "3 words"})
        data = workshop.prepare(workshop.config(corpus, regenerate=True))
        assert sorted(texts_of(data)) == [["yes yes yes<|im_end|>"], ["yes yes<|im_end|>"]]
        assert data.manifest.on_policy
        assert data.manifest.answer_sampling["rendered_exactly_frac"] == 1.0
        assert data.manifest.answer_sampling["max_new_tokens"] == 24

    def test_answers_cut_by_the_limit_are_kept_without_an_end_on_request(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "loop"}, {"prompt": "2 words"})
        answers = {"regenerate": True, "keep_unfinished": True}
        data = workshop.prepare(workshop.config(corpus, answers=answers))
        assert sorted(texts_of(data)) == [[" and" * 24], ["yes yes<|im_end|>"]]

    def test_hashes_of_every_user_turn_that_was_trained_on_are_listed(self, workshop: Workshop) -> None:
        turns = [("user", "Hi there!"), ("assistant", "yo"), ("user", "and 2?"), ("assistant", "two")]
        chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
        long = {"prompt": "the weather " * 60, "completion": "x y"}
        corpus = workshop.corpus(chat, long)
        data = workshop.prepare(workshop.config(corpus, max_bad_frac=0.5))
        assert read_prompt_hashes(data.dir) == {prompt_hash("hi there"), prompt_hash("and 2?")}

    def test_synthetic_conversations_need_no_file(self, workshop: Workshop) -> None:
        config = workshop.config(source="synthetic", num_conversations=12, max_length_tokens=600, bucket_edges_tokens=(200, 600))
        big = config.model_copy(update={"plan": config.plan})
        data = workshop.prepare(big)
        assert data.manifest.samples == 12
        assert data.manifest.source["kind"] == "synthetic"


class TestPreview:
    def test_it_shows_samples_with_supervised_tokens_marked_and_escapes_them(self, workshop: Workshop) -> None:
        nasty = "<script>alert('x')</script> & more"
        data = workshop.prepare(workshop.config(workshop.corpus({"prompt": nasty, "completion": "<b>é漢🙂</b>", "id": "<i>"})))
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

    def test_every_bucket_is_shown(self, workshop: Workshop) -> None:
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD, *[r | {"id": f"x{i}"} for i, r in enumerate(GOOD * 9)])))
        page = (data.dir / "preview.html").read_text(encoding="utf-8")
        shown = page.count("<article>")
        assert shown == sum(min(6, bucket.samples) for bucket in data.manifest.buckets)
        assert shown < data.manifest.samples


class TestReuse:
    def test_an_unchanged_input_is_reused_without_touching_a_file(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        first = workshop.prepare(config)
        stamps = {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")}
        second = workshop.prepare(config)
        assert second.reused
        assert second == PreparedData(first.dir, first.manifest, reused=True)
        assert {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")} == stamps

    def test_a_moved_file_and_another_batch_size_change_nothing(self, workshop: Workshop) -> None:
        corpus = Path(workshop.corpus(*GOOD))
        first = workshop.prepare(workshop.config(str(corpus)))
        (workshop.folder / "elsewhere").mkdir()
        moved = corpus.rename(workshop.folder / "elsewhere" / corpus.name)
        config = workshop.config(str(moved), answers={"batch_size": 3})
        assert workshop.prepare(config).dir == first.dir

    @pytest.mark.parametrize(
        "change", ["row", "edges", "supervise", "limit", "system", "flags", "target", "mask", "template", "rows_per_group"]
    )
    def test_whatever_changes_the_content_changes_the_fingerprint(self, workshop: Workshop, change: str) -> None:
        corpus = workshop.corpus(*GOOD)
        tokenizer, target, settings, mask = TOKENIZER, "t1", {}, None
        before = data_fingerprint(workshop.config(corpus), tokenizer=tokenizer, target_fingerprint=target)
        if change == "row":
            workshop.corpus(*GOOD[:-1], GOOD[-1] | {"completion": "other"})
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
        after = data_fingerprint(workshop.config(corpus, mask=mask, **settings), tokenizer=tokenizer, target_fingerprint=target)
        assert after != before

    def test_other_buckets_take_the_answers_from_the_journal(self, workshop: Workshop) -> None:
        corpus = workshop.corpus({"prompt": "2 words"}, {"prompt": "3 words"})
        workshop.prepare(workshop.config(corpus, regenerate=True))
        asked = len(workshop.target.asked)
        again = workshop.prepare(workshop.config(corpus, regenerate=True, bucket_edges_tokens=(30, 80)))
        assert not again.reused
        assert len(workshop.target.asked) == asked
        workshop.prepare(workshop.config(corpus, regenerate=True), target="another target")
        assert len(workshop.target.asked) == 2 * asked

    def test_a_damaged_data_set_is_not_reused(self, workshop: Workshop) -> None:
        config = workshop.config(workshop.corpus(*GOOD))
        data = workshop.prepare(config)
        file = next(data.dir.rglob("*.parquet"))
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
        with pytest.raises(DataError, match="differs from the hash") as caught:
            workshop.prepare(config)
        assert f"remove {data.dir}" in str(caught.value)
        load_data(data.dir)  # sizes alone cannot tell
        with pytest.raises(DataError):
            load_data(data.dir, verify=True)

    def test_a_data_set_of_another_schema_version_is_refused(self, workshop: Workshop) -> None:
        data = workshop.prepare(workshop.config(workshop.corpus(*GOOD)))
        file = data.dir / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 99}))
        with pytest.raises(SchemaVersionError, match="schema version 99"):
            load_data(data.dir)


class TestKills:
    def test_a_kill_leaves_a_partial_folder_that_the_next_build_replaces(self, workshop: Workshop) -> None:
        root = Path(__file__).parents[3]
        script = Path(__file__).with_name("killed_build.py")
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), str(workshop.folder)]
        assert subprocess.run(command, cwd=root, env=environment, timeout=300).returncode == -signal.SIGKILL
        [partial] = workshop.left_behind()
        assert partial.endswith(".partial")
        with pytest.raises(DataError, match="no complete data set"):
            load_data(workshop.data_root / partial)
        data = workshop.prepare(many_questions(workshop))
        assert data.manifest.samples == 40
        assert len(workshop.target.keys) == 30, "ten answers came from the journal"
        assert workshop.left_behind() == {data.dir.name}
        load_data(data.dir, verify=True)

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
        assert workshop.left_behind() == {built.dir.name}
