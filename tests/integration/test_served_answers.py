"""Answers through a real HTTP server: exact prompts, faults survived, another model refused, the key kept."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash.config import AnswerConfig, ServerConfig
from dflash.data.answers import AnsweredConversation, AnswerSettings, InProcessAnswerer, answer_conversations
from dflash.data.answers_engine import Answer, Failure, GenerateFn, Question, Reply
from dflash.data.render import ChatRenderer
from dflash.data.served import ServedAnswerer
from dflash.data.served_check import ServedTarget, probe_prompts
from dflash.data.served_protocol import Sampling
from dflash.errors import DflashError, ServerError, TargetError
from dflash.records import Conversation, QuarantinedRow
from tests.support.answer_server import AnswerServer, Behaviour, Fault
from tests.unit.data.chat_toys import CHATML, ToyTarget, conversation, toy_tokenizer

TOKENIZER = toy_tokenizer(CHATML)
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
MAX_NEW_TOKENS = 24
PROBES = 5
"""Requests that the check of a server makes."""


def say(prompt: list[int], body: dict[str, Any]) -> list[int]:
    """The toy target, which knows only user turns."""
    [new] = ToyTarget(TOKENIZER)([prompt], ["k"])
    return new


@contextmanager
def serving(**behaviour: Any) -> Iterator[AnswerServer]:
    with AnswerServer(say, TOKENIZER, stop_ids={STOP}, behaviour=Behaviour(**behaviour)) as server:
        yield server


def answerer(
    server: AnswerServer,
    *,
    temperature: float = 0.0,
    names: tuple[str, ...] = ("target",),
    reference: GenerateFn | None = None,
    **patience: Any,
) -> ServedAnswerer:
    settings = {"concurrency": 4, "request_timeout_s": 20.0, "max_retries": 3, "backoff_s": 0.001, **patience}
    target = ServedTarget(names, needed_tokens=500, tokenizer=TOKENIZER, probes=probe_prompts(TOKENIZER, {}), reference=reference)
    sampling = Sampling(names[0], MAX_NEW_TOKENS, temperature, seed=7, stop_ids=(STOP,))
    return ServedAnswerer(ServerConfig(url=server.url, **settings), target=target, sampling=sampling)


def run(
    engine: Any, conversations: list[Conversation], journal: Path, *, temperature: float = 0.0
) -> list[AnsweredConversation | QuarantinedRow]:
    renderer = ChatRenderer(TOKENIZER, supervise="all", supervise_reasoning=True, template_flags={})
    settings = AnswerSettings(renderer, AnswerConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature), 480, None)
    return list(answer_conversations(conversations, answerer=engine, settings=settings, journal=journal, progress=lambda *_: None))


def in_process(conversations: list[Conversation], journal: Path) -> list[AnsweredConversation | QuarantinedRow]:
    return run(InProcessAnswerer(ToyTarget(TOKENIZER), batch_size=3, stop_ids=[STOP]), conversations, journal)


def corpus(count: int = 12) -> list[Conversation]:
    rows = [conversation(f"c{i}", f"{1 + i % 7} words", "x", f"hello {i}", "x") for i in range(count - 2)]
    return [*rows, conversation("loop", "loop"), conversation("mute", "mute")]


def answered(server: AnswerServer) -> Counter[tuple[int, ...]]:
    """How often the server has answered each prompt whole, its check left out."""
    probes = {tuple(ids) for ids in probe_prompts(TOKENIZER, {})}
    return Counter({prompt: count for prompt, count in server.completed.items() if prompt not in probes})


def fails(*kinds: str, **details: Any) -> Callable[[int, dict[str, Any]], Fault | None]:
    """The first requests after the check fail in these ways, one after the other."""

    def fault(number: int, body: dict[str, Any]) -> Fault | None:
        place = number - PROBES
        return Fault(kinds[place], **details) if 0 <= place < len(kinds) else None  # type: ignore[arg-type]

    return fault


@pytest.mark.parametrize(
    "behaviour",
    [
        {},
        {"keeps_stop_token": False},
        {"style": "sglang"},
        {"style": "sglang", "keeps_stop_token": False},
        {"returns_ids": False},
        {"takes_ids": False},
        {"takes_ids": False, "returns_ids": False, "style": "sglang"},
    ],
    ids=lambda behaviour: ",".join(f"{key}={value}" for key, value in behaviour.items()) or "vllm",
)
def test_the_answers_are_those_of_the_target_in_this_process(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    with serving(**behaviour) as server, answerer(server) as engine:
        assert run(engine, corpus(), tmp_path / "a") == in_process(corpus(), tmp_path / "b")
        assert server.most_at_once <= 4


def test_as_many_requests_as_configured_are_in_flight(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def meet(number: int, body: dict[str, Any]) -> None:
        if PROBES <= number < PROBES + 4:
            together.wait(60)  # raises if the others do not come

    with serving(fault=meet) as server, answerer(server) as engine:
        run(engine, corpus(), tmp_path / "j")
        assert server.most_at_once == 4


def test_prompts_are_the_ids_of_our_template_and_every_sampling_parameter_is_sent(tmp_path: Path) -> None:
    with serving() as server, answerer(server, temperature=0.7) as engine:
        run(engine, corpus(4), tmp_path / "j", temperature=0.7)
    bodies = server.bodies[PROBES:]
    texts = {TOKENIZER.decode(body["prompt"]) for body in bodies}
    assert "<|im_start|>user\nloop<|im_end|>\n<|im_start|>assistant\n" in texts
    for body in bodies:
        assert body["max_tokens"] == MAX_NEW_TOKENS
        assert body["temperature"] == 0.7
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert body["stop_token_ids"] == [STOP]
        assert not body["add_special_tokens"] and not body["skip_special_tokens"]
    seeds = [body["seed"] for body in bodies]
    assert len(set(seeds)) == len(seeds), "each prompt is sampled by a seed of its own"
    assert all("seed" not in body and body["temperature"] == 0 for body in server.bodies[:PROBES])


@pytest.mark.parametrize("kind", ["status", "disconnect", "truncate", "garbage", "abort"])
def test_a_passing_fault_is_survived(tmp_path: Path, kind: str) -> None:
    with serving(fault=fails(kind, kind, kind)) as server, answerer(server, concurrency=1) as engine:
        assert run(engine, corpus(), tmp_path / "a") == in_process(corpus(), tmp_path / "b")
    assert set(answered(server).values()) == {1}


def test_faults_that_are_survived_are_told_but_not_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(fault=fails(*["status"] * 12)) as server, answerer(server, max_retries=20) as engine:
        run(engine, corpus(), tmp_path / "j")
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "completions: HTTP 503: out of order; try 2 of 21 in 0.0 s" in told[0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_asked_again(tmp_path: Path, status: int) -> None:
    fault = fails("status", "status", status=status, headers=(("Retry-After", "0"),))
    with serving(fault=fault) as server, answerer(server, concurrency=1, backoff_s=1e6) as engine:
        [item] = run(engine, [conversation("c", "2 words")], tmp_path / "j")  # ends today: the server's wait counts, not ours
    assert isinstance(item, AnsweredConversation)
    assert len(server.bodies) == PROBES + 3


def test_a_reply_that_does_not_come_in_time_is_asked_for_again(tmp_path: Path) -> None:
    with serving(fault=fails("hang")) as server, answerer(server, request_timeout_s=0.5) as engine:
        [item] = run(engine, [conversation("c", "2 words")], tmp_path / "j")
    assert isinstance(item, AnsweredConversation)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"error": {"message": "prompt is too long"}}, "HTTP 400: prompt is too long"),
        (404, {"detail": "Not Found"}, "HTTP 404: Not Found"),
        (422, {"object": "error", "message": "bad top_k"}, "HTTP 422: bad top_k"),
        (301, {}, "HTTP 301"),
    ],
)
def test_a_refusal_is_not_asked_again_and_tells_the_servers_words(tmp_path: Path, status: int, body: Any, words: str) -> None:
    with serving(fault=fails(*["status"] * 50, status=status, body=body)) as server, answerer(server, concurrency=1) as engine:
        with pytest.raises(TargetError, match=words):
            run(engine, corpus(), tmp_path / "j")
        assert len(server.bodies) == PROBES + 1


class TestPromptsThatFail:
    def poisoned(self, number: int, body: dict[str, Any]) -> Fault | None:
        poison = number >= PROBES and "hello 3" in TOKENIZER.decode(body["prompt"])
        return Fault("status", 500, {"error": {"message": "it broke"}}) if poison else None

    @pytest.mark.parametrize("concurrency", [1, 4])
    def test_one_that_fails_in_all_tries_is_set_aside_and_asked_again_next_time(self, tmp_path: Path, concurrency: int) -> None:
        with serving(fault=self.poisoned) as server, answerer(server, concurrency=concurrency) as engine:
            got = run(engine, corpus(), tmp_path / "j")
        whole = in_process(corpus(), tmp_path / "b")
        assert got[:3] + got[4:] == whole[:3] + whole[4:]
        assert got[3] == QuarantinedRow("toy:c3", "unanswered: answer 1: HTTP 500: it broke (try 4 of 4)")
        with serving() as healthy, answerer(healthy) as engine:
            assert run(engine, corpus(), tmp_path / "j") == whole
        assert len(healthy.bodies) == PROBES + 1, "only what was missing is asked"

    def test_a_server_that_is_gone_stops_the_work_and_nothing_is_lost(self, tmp_path: Path) -> None:
        server_behaviour = Behaviour()
        with AnswerServer(say, TOKENIZER, stop_ids={STOP}, behaviour=server_behaviour) as server:
            gone = Fault("status", 503)

            def dying(number: int, body: dict[str, Any]) -> Fault | None:
                if number >= PROBES + 6:
                    server_behaviour.models_fault = gone
                    return gone
                return None

            server_behaviour.fault = dying
            with answerer(server) as engine, pytest.raises(ServerError, match="does not answer: HTTP 503: out of order") as caught:
                run(engine, corpus(), tmp_path / "j")
            assert "every answer so far is kept" in str(caught.value)
        kept = (tmp_path / "j").read_text().count("\n")
        assert 0 < kept <= 6
        with serving() as healthy, answerer(healthy) as engine:
            assert run(engine, corpus(), tmp_path / "j") == in_process(corpus(), tmp_path / "b")
        assert answered(healthy).total() == (tmp_path / "b").read_text().count("\n") - kept

    def test_an_engine_that_fails_at_everything_stops_the_work_though_its_server_is_there(self, tmp_path: Path) -> None:
        broken = serving(fault=lambda number, body: Fault("status", 500) if number >= PROBES else None)
        with broken as server, answerer(server, concurrency=2) as engine, pytest.raises(ServerError, match="8 prompts in a row"):
            run(engine, [conversation(f"c{i}", f"hello {i}") for i in range(40)], tmp_path / "j")

    def test_a_server_that_was_never_there_is_named(self, tmp_path: Path) -> None:
        with serving() as server:
            engine = answerer(server, max_retries=1)
        with engine, pytest.raises(ServerError, match=server.url.replace("/v1", "")):
            run(engine, corpus(), tmp_path / "j")


class TestIdentity:
    @pytest.mark.parametrize(
        ("behaviour", "names", "words"),
        [
            (
                {"models": [{"id": "other", "root": "org/other"}]},
                ("target",),
                r"serves other \(org/other\), the configured target is target",
            ),
            ({"models": []}, ("target",), "serves nothing"),
            ({"models": [{"id": "target", "max_model_len": 499}]}, ("target",), "context of 499 tokens.*need 500"),
            ({"takes_ids": False, "adds_bos": 2}, ("target",), r"read \d+ prompt tokens: \[2, 3.* gives \d+: \[3,"),
            ({"spells": str.upper}, ("target",), "reads its own tokens"),
        ],
        ids=["another model", "no model", "short context", "another prompt", "another vocabulary"],
    )
    def test_a_server_that_does_not_run_the_target_is_refused(
        self, tmp_path: Path, behaviour: dict[str, Any], names: tuple[str, ...], words: str
    ) -> None:
        with serving(**behaviour) as server, answerer(server, names=names) as engine, pytest.raises(TargetError, match=words):
            run(engine, corpus(), tmp_path / "j")
        assert not (tmp_path / "j").read_bytes()

    @pytest.mark.parametrize("names", [("alias",), ("org/target",), ("missing", "org/target")])
    def test_it_may_be_listed_under_an_alias_or_as_what_was_loaded(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        models = [{"id": "else"}, {"id": "alias", "root": "org/target", "max_model_len": None}]
        with serving(models=models) as server, answerer(server, names=names) as engine:
            run(engine, corpus(3), tmp_path / "j")
        assert {body["model"] for body in server.bodies} == {"alias"}

    def test_greedy_answers_may_be_compared_with_those_of_the_target_here(self, tmp_path: Path) -> None:
        def off_by_a_tie(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
            first, *others = ToyTarget(TOKENIZER)(prompts, keys)
            return [[*first[:3], *[token + 1 for token in first[3:]]], *others]

        def otherwise(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
            return [TOKENIZER("quite another answer<|im_end|>")["input_ids"] for _ in prompts]

        for reference in (ToyTarget(TOKENIZER), off_by_a_tie):
            with serving() as server, answerer(server, reference=reference) as engine:
                run(engine, corpus(3), tmp_path / "j")
        for behaviour in ({}, {"returns_ids": False}):
            with (
                serving(**behaviour) as server,
                answerer(server, reference=otherwise) as engine,
                pytest.raises(TargetError, match=r"of \d+ greedy tokens 0 agree.*characters' where the target says 'quite an"),
            ):
                run(engine, corpus(3), tmp_path / "other")

    def test_a_whole_journal_needs_no_server(self, tmp_path: Path) -> None:
        whole = in_process(corpus(), tmp_path / "j")
        with serving() as server:
            engine = answerer(server)
        with engine:
            assert run(engine, corpus(), tmp_path / "j") == whole


class TestKey:
    SECRET = "sk-very-secret"

    def test_it_comes_from_the_named_variable_and_is_never_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        monkeypatch.setenv("MY_KEY", self.SECRET)
        with serving(key=self.SECRET, fault=fails("status")) as server, answerer(server, api_key_env="MY_KEY") as engine:
            run(engine, corpus(4), tmp_path / "j")
        assert all(headers["Authorization"] == f"Bearer {self.SECRET}" for headers in server.headers)
        assert self.SECRET not in caplog.text
        assert self.SECRET not in (tmp_path / "j").read_text()

    def test_a_wrong_one_is_a_clear_error_without_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_KEY", "sk-wrong")
        with (
            serving(key=self.SECRET) as server,
            answerer(server, api_key_env="MY_KEY") as engine,
            pytest.raises(TargetError, match="HTTP 401: Unauthorized") as caught,
        ):
            run(engine, corpus(4), tmp_path / "j")
        assert "api_key_env" in str(caught.value)
        assert "sk-wrong" not in str(caught.value)

    @pytest.mark.parametrize("key", ["sk-ünsafe", "sk-a\nb"])
    def test_one_that_no_header_can_carry_is_refused_without_showing_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
    ) -> None:
        monkeypatch.setenv("MY_KEY", key)
        with (
            serving() as server,
            answerer(server, api_key_env="MY_KEY") as engine,
            pytest.raises(DflashError, match="environment variable MY_KEY") as caught,
        ):
            run(engine, corpus(4), tmp_path / "j")
        assert "sk-" not in str(caught.value)


def test_a_place_is_given_up_only_when_its_answer_has_been_fetched_and_kept(tmp_path: Path) -> None:
    """So a kill repeats at most `concurrency` prompts, however many were ready."""
    with serving() as server, answerer(server, concurrency=3) as engine, engine.session() as session:
        prompt = list(probe_prompts(TOKENIZER, {})[0])
        for number in range(30):
            session.submit(Question(f"d{number}", f"k{number}", [*prompt, number]))
        kept = 0
        replies: list[Reply] = []
        while kept < 30:
            replies = session.collect()
            kept += len(replies)
            assert len(server.bodies) - PROBES <= kept + 3
        assert not any(isinstance(reply.outcome, Failure) for reply in replies)
        assert isinstance(replies[0].outcome, Answer)


def test_leaving_a_session_drops_what_is_in_flight_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serving(fault=lambda number, body: Fault("hang") if number >= PROBES else None) as server:
        with answerer(server) as engine:
            with engine.session() as session:
                for number in range(9):
                    session.submit(Question(f"d{number}", f"k{number}", [5, number]))
            names = {thread.name for thread in set(threading.enumerate()) - before}
            assert "served-answers" in names
        assert "served-answers" not in {thread.name for thread in set(threading.enumerate()) - before}
