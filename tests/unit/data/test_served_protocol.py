"""What is said to a server and how its words are read, without any server."""

from __future__ import annotations

import asyncio
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import ServerConfig
from dflash.data.served_http import NoReplyError, RefusedError, ServerClient, backoff_s, retry_after_s
from dflash.data.served_protocol import (
    Completion,
    MalformedReplyError,
    Sampling,
    ServedModel,
    error_message,
    keyed_seed,
    parse_completion,
    parse_models,
)
from dflash.errors import TargetError

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def reply(**choice: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "text": "yes", "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


class TestCompletion:
    def test_vllm(self) -> None:
        body = reply(stop_reason=None, token_ids=[7, 9], prompt_token_ids=[1, 2, 3])
        assert parse_completion(body) == Completion("yes", "stop", [7, 9], [1, 2, 3], None, 3, 2)

    def test_sglang(self) -> None:
        assert parse_completion(reply(matched_stop=9, token_ids=[7, 9])) == Completion("yes", "stop", [7, 9], None, 9, 3, 2)

    def test_a_stop_string_is_no_token(self) -> None:
        assert parse_completion(reply(stop_reason="###")).stop_id is None

    @pytest.mark.parametrize(
        "body",
        [
            None, [], {}, {"choices": []}, {"choices": [{}, {}], "usage": {}}, {"choices": [None], "usage": {}},
            {"choices": reply()["choices"]}, {"choices": reply()["choices"], "usage": None},
            {**reply(), "usage": {"prompt_tokens": "3", "completion_tokens": 2}},
            reply(finish_reason=None), reply(finish_reason="abort"), reply(text=None), reply(token_ids="7"), reply(token_ids=[7.5]),
        ],
    )  # fmt: skip
    def test_anything_else_is_malformed(self, body: Any) -> None:
        with pytest.raises(MalformedReplyError):
            parse_completion(body)


def test_models() -> None:
    body = {"data": [{"id": "a"}, {"id": "b", "root": "org/b", "max_model_len": 9}]}
    assert parse_models(body) == [ServedModel("a", None, None), ServedModel("b", "org/b", 9)]
    for bad in (None, [], {}, {"data": [1]}, {"data": [{}]}):
        with pytest.raises(MalformedReplyError):
            parse_models(bad)


@pytest.mark.parametrize(
    ("body", "text", "words"),
    [
        ({"error": {"message": "no"}}, "", "no"),
        ({"object": "error", "message": "no"}, "", "no"),
        ({"detail": "no"}, "", "no"),
        ({"error": "no"}, "", "no"),
        (None, "<html>\n no </html>", "<html> no </html>"),
        ({}, " ", "(no message)"),
        ({"detail": "x" * 9999}, "", "x" * 500),
    ],
)
def test_the_servers_words(body: Any, text: str, words: str) -> None:
    assert error_message(body, text=text) == words


class TestRequest:
    sampling = Sampling("m", max_new_tokens=8, temperature=0.0, seed=3, stop_ids=(5,))

    def test_greedy_requests_have_no_seed(self) -> None:
        assert "seed" not in self.sampling.request([1, 2], key="a")

    def test_seeds_are_keyed_and_fit_into_31_bits(self) -> None:
        seeds = {keyed_seed(seed, f"c{number}/0") for seed in (0, 1) for number in range(500)}
        assert len(seeds) == 1000
        assert all(0 <= seed < 2**31 for seed in seeds)
        assert max(seeds) > 2**30
        assert keyed_seed(3, "a") == keyed_seed(3, "a")


class TestWaits:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(number=st.integers(1, 10_000), first_s=st.floats(0.001, 10), key=st.text(max_size=5))
    def test_they_double_up_to_a_minute_within_half_and_whole(self, number: int, first_s: float, key: str) -> None:
        wait = backoff_s(number, first_s=first_s, key=key)
        whole = min(60.0, first_s * 2 ** min(number - 1, 32))
        assert 0.5 * whole <= wait <= whole
        assert wait == backoff_s(number, first_s=first_s, key=key)

    def test_prompts_that_failed_together_come_back_apart(self) -> None:
        assert len({backoff_s(1, first_s=1.0, key=str(number)) for number in range(100)}) == 100

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (None, None), ("", None), ("soon", None), ("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("nan", None), ("inf", None),
            (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
            (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
        ],
    )  # fmt: skip
    def test_a_server_may_name_its_own(self, value: str | None, seconds: float | None) -> None:
        assert retry_after_s(value, now=NOW) == seconds


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://host/v1", "host"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match=r"address of data\.answers\.server is"):
        ServerClient(ServerConfig(url=url), section="data.answers.server", kept="")


@pytest.mark.parametrize("answer", [httpx.Response(401), httpx.Response(503), httpx.Response(200)])
def test_a_server_that_repeats_the_key_brings_it_into_no_message(
    answer: httpx.Response, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_KEY", "hunter2planted")

    async def ask() -> None:
        client = ServerClient(
            ServerConfig(url="http://h/v1", api_key_env="A_KEY", max_retries=1, backoff_s=1e-3), section="s", kept=""
        )
        said = {"error": {"message": "no such key: Bearer hunter2planted"}}
        transport = httpx.MockTransport(lambda _request: httpx.Response(answer.status_code, json=said))
        monkeypatch.setattr(client._client, "_transport", transport)
        await client.ask("completions", body=None, parse=parse_completion, key="k")

    with pytest.raises((RefusedError, NoReplyError), match=r"Bearer \*\*\*") as caught:
        asyncio.run(ask())
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter2planted" not in shown + caplog.text


def test_a_password_in_the_address_is_never_shown() -> None:
    secret = "planted"[::-1]  # a traceback shows lines of this file as well
    with pytest.raises(TargetError, match="no http address") as caught:  # it would be a port
        ServerClient(ServerConfig(url=f"http://user:{secret}/x@host:8000/v1"), section="s", kept="")
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert ServerClient(ServerConfig(url="http://user:secret@host:8000/v1"), section="s", kept="").address == "http://host:8000/v1"
