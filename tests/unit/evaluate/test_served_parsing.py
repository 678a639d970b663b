"""What vLLM and SGLang say, read in one form: counters of a Prometheus page, accounts in replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.served_protocol import MalformedReplyError, Sampling
from dflash.errors import EvaluationError
from dflash.evaluate.served_counters import Counters, parse_prometheus, read_counters
from dflash.evaluate.served_replies import NO_DRAFTING, Drafting, parse_sglang, parse_vllm, sglang_request

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="org/a"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="org/a"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="org/a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="org/a"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="org/a"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="org/a",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="org/a",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="org/a",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="org/a",position="1"} 2.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="org/a"} 3.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="org/a"} 1.0
vllm:generation_tokens_total{engine="0",model_name="org/a"} 31.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="org/a"} 4.0
python_gc_objects_collected_total{generation="0"} 99.0
"""
READ = Counters(drafts=15, draft_tokens=45, accepted=12, per_position=(9, 2, 1), requests=4, tokens=31)


class TestCounters:
    def test_every_engine_and_reason_is_summed_under_either_form_of_the_names(self) -> None:
        assert read_counters(PAGE) == READ
        assert read_counters(PAGE.replace("_total{", "{").replace("_total Number", " Number")) == READ

    def test_a_server_without_a_drafter_has_no_drafts(self) -> None:
        page = "".join(line + "\n" for line in PAGE.splitlines() if "spec_decode" not in line)
        assert read_counters(page) == Counters(None, 0, 0, (), 4, 31)

    @pytest.mark.parametrize(
        ("page", "words"),
        [
            ("<html>\n<body>proxy</body>", "not a page of Prometheus metrics: '<html>'"),
            ('vllm:generation_tokens_total{engine="0" 3.0', "not a page of Prometheus metrics"),
            ("vllm:generation_tokens_total three", "not a page of Prometheus metrics"),
            ("vllm:generation_tokens_total NaN", "is nan"),
            ("vllm:generation_tokens_total -1.0", "is -1.0"),
            ("vllm:generation_tokens_total 1.5", "is 1.5"),
            ("go_goroutines 3", "holds no vLLM metric"),
            ("", "holds no vLLM metric"),
            (PAGE.replace('position="1"', 'position="5"'), r"lacks positions: there are \[0, 2, 5\]"),
            (PAGE.replace('position="1"', 'position="x"'), "names the position 'x'"),
        ],
    )
    def test_what_is_no_such_page_is_told(self, page: str, words: str) -> None:
        with pytest.raises(MalformedReplyError, match=words):
            read_counters(page)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), st.text(max_size=8), max_size=3), st.integers(0, 10**15))
    def test_any_label_value_survives_its_escapes(self, labels: dict[str, str], value: int) -> None:
        written = {name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()}
        inside = ",".join(f'{name}="{text}"' for name, text in written.items())
        page = f"a:b{{{inside}}} {value}.0 1700000000\n"
        assert parse_prometheus(page) == {"a:b": [(labels, float(value))]}

    def test_a_line_break_in_a_label_is_read(self) -> None:
        assert parse_prometheus(r'm{a="x\ny", b = "z",} 1') == {"m": [({"a": "x\ny", "b": "z"}, 1.0)]}

    def test_a_difference_is_what_came_in_between(self) -> None:
        earlier = Counters(12, 36, 10, (8, 1, 1), 3, 24)
        assert READ.since(earlier) == Counters(3, 9, 2, (1, 1, 0), 1, 7)
        assert READ.since(READ).drafting() == Drafting(0, 0, 0, (0, 0, 0, 0), None)
        assert READ.since(earlier).drafting() == Drafting(3, 9, 2, (2, 0, 1, 0), None)

    @pytest.mark.parametrize("field", ["drafts", "draft_tokens", "accepted", "requests", "tokens"])
    def test_a_counter_that_fell_is_another_servers(self, field: str) -> None:
        with pytest.raises(EvaluationError, match="started again"):
            READ.since(replace(READ, **{field: getattr(READ, field) + 1}))
        for positions in ((9, 2, 2), (9, 2)):
            with pytest.raises(EvaluationError, match="started again"):
                READ.since(replace(READ, per_position=positions))

    @pytest.mark.parametrize("change", [{"accepted": 13}, {"per_position": (2, 9, 1)}, {"drafts": 8}])
    def test_counters_that_contradict_each_other_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(EvaluationError, match="contradict each other"):
            replace(READ, **change).drafting()


def completion(told: Any = None, *, ids: int = 5, tokens: int = 5, **metrics: Any) -> dict[str, Any]:
    """A reply of vLLM whose answer has some tokens."""
    choice = {"text": "x", "finish_reason": "length", "token_ids": list(range(ids)), "stop_reason": None}
    shown = {**metrics, "speculative_decoding": told} if told is not None or metrics else None
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}, "metrics": shown}


ACCOUNT: dict[str, Any] = {
    "num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3, "acceptance_histogram": [1, 0, 0, 1],
    "num_spec_tokens": 3, "per_step_accepted": [0, 3], "per_step_drafted": [3, 3],
}  # fmt: skip


class TestVllm:
    def test_every_level_of_detail_is_read(self) -> None:
        whole = parse_vllm(completion(ACCOUNT, generation_time_ms=250))
        assert whole.drafting == Drafting(2, 6, 3, (1, 0, 0, 1), ((3, 0), (3, 3)))
        assert (whole.decode_s, whole.cut, whole.ids, whole.prompt_tokens) == (0.25, True, (0, 1, 2, 3, 4), 3)
        summary = {name: value for name, value in ACCOUNT.items() if not name.startswith("per_step")}
        found = parse_vllm(completion(summary)).drafting
        assert found == replace(whole.drafting, steps=None)
        assert parse_vllm(completion()).drafting is None and parse_vllm(completion()).decode_s is None

    @pytest.mark.parametrize(
        "change",
        [
            {"num_spec_steps": 3},
            {"num_accepted_draft_tokens": 4},
            {"acceptance_histogram": [0, 1, 0, 1]},
            {"per_step_accepted": [3]},
            {"per_step_accepted": [1, 3]},
            {"per_step_drafted": [3, 2]},
            {"num_draft_tokens": "6"},
            {"num_draft_tokens": None},
            {"acceptance_histogram": {"0": 1}},
            {"acceptance_histogram": [1, 0, 0, -1]},
            {"num_spec_steps": True},
        ],
    )
    def test_an_account_that_contradicts_itself_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(MalformedReplyError):
            parse_vllm(completion({**ACCOUNT, **change}))

    @pytest.mark.parametrize(
        "body", [completion(ids=4), completion(ids=0, tokens=0), completion([1]), {**completion(), "metrics": 3}, [], None]
    )
    def test_a_reply_with_parts_missing_is_refused(self, body: Any) -> None:
        with pytest.raises(MalformedReplyError):
            parse_vllm(body)


def generated(*, tokens: int = 5, reason: Any = "length", **meta: Any) -> dict[str, Any]:
    """A reply of SGLang."""
    return {
        "text": "x", "output_ids": list(range(tokens)),
        "meta_info": {"finish_reason": {"type": reason}, "prompt_tokens": 3, "completion_tokens": tokens, **meta},
    }  # fmt: skip


class TestSglang:
    @pytest.mark.parametrize(
        ("meta", "wanted"),
        [
            (
                {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [1, 0, 0, 1]},
                Drafting(2, 6, 3, (1, 0, 0, 1), None),
            ),
            ({"spec_accepted_drafts": 3, "spec_proposed_drafts": 6}, Drafting(2, 6, 3, None, None)),
            ({"spec_accept_token_num": 3, "spec_draft_token_num": 8}, Drafting(2, None, 3, None, None)),
            ({"spec_accept_histogram": [0, 1, 1]}, Drafting(2, None, 3, (0, 1, 1), None)),
        ],
        ids=["2026", "between", "2025", "histogram alone"],
    )
    def test_the_names_of_every_year_are_read_and_none_is_guessed(self, meta: dict[str, Any], wanted: Drafting) -> None:
        # Its own acceptance length counts the prefill's token and is not looked at.
        assert parse_sglang(generated(spec_verify_ct=2, spec_accept_length=2.5, **meta)).drafting == wanted

    def test_an_answer_of_one_token_needs_no_account_and_a_longer_one_has_none_without(self) -> None:
        assert parse_sglang(generated(tokens=1)).drafting == NO_DRAFTING
        assert parse_sglang(generated()).drafting is None
        assert parse_sglang(generated(reason="stop")).cut is False

    def test_a_stop_token_that_was_left_out_is_put_back(self) -> None:
        reply = generated(reason="stop")
        reply["meta_info"]["finish_reason"]["matched"] = 9
        reply["output_ids"] = [1, 2, 3, 4]
        assert parse_sglang(reply).ids == (1, 2, 3, 4, 9)
        reply["output_ids"] = [1, 2, 3]
        with pytest.raises(MalformedReplyError, match="3 of 5 generated tokens"):
            parse_sglang(reply)

    @pytest.mark.parametrize(
        "body",
        [
            generated(reason="abort"),
            generated(spec_verify_ct=2),
            generated(spec_verify_ct=2, spec_num_correct_drafts=3, spec_correct_drafts_histogram=[1, 1]),
            generated(spec_verify_ct=2, spec_num_correct_drafts="3"),
            {**generated(), "output_ids": [1, 2]},
            {**generated(), "output_ids": ["a"] * 5},
            {"text": "x"},
            {"object": "error", "message": "no"},
            "html",
            None,
        ],
    )
    def test_what_is_no_reply_is_refused(self, body: Any) -> None:
        with pytest.raises(MalformedReplyError):
            parse_sglang(body)

    def test_a_request_says_everything_and_seeds_samples_alone(self) -> None:
        greedy = sglang_request(Sampling("m", 9, 0.0, 1, (2, 3)), [5, 6], key="q")
        assert greedy["input_ids"] == [5, 6] and greedy["stream"] is False
        said = greedy["sampling_params"]
        assert (said["max_new_tokens"], said["temperature"], said["stop_token_ids"]) == (9, 0.0, [2, 3])
        assert (said["top_p"], said["top_k"], said["min_p"], said["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert not said["skip_special_tokens"] and "sampling_seed" not in said
        hot = Sampling("m", 9, 0.7, 1, ())
        seeds = [sglang_request(hot, [5], key=key)["sampling_params"]["sampling_seed"] for key in ("a", "b", "a")]
        assert seeds[0] == seeds[2] != seeds[1]
