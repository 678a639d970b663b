"""vLLM and SGLang as real HTTP servers with a real target and a real drafter behind them: the figures are those of the evaluation
in this process, or None; nothing that does not belong to the evaluation is taken for a figure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch

from dflash.config import DrafterConfig, EvaluateConfig, ServerConfig, TargetConfig
from dflash.data.served_check import ServedTarget, probe_prompts
from dflash.data.served_protocol import Sampling
from dflash.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from dflash.errors import DflashError, EvaluationError, ServerError, TargetError
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.decode import DecodeLimits, plain_decode
from dflash.evaluate.lossless import NearTie
from dflash.evaluate.prompts import EvalPrompt
from dflash.evaluate.proposers import DrafterProposer
from dflash.evaluate.run import Evaluation, evaluate_candidates
from dflash.evaluate.served import ServedEvaluation, ServedQuestion, evaluate_served, served_answers
from dflash.evaluate.served_client import EngineName, ServedWants
from dflash.model.target import Target, load_target
from dflash.records import EvaluationResult
from tests.support.answer_server import Behaviour, Fault
from tests.support.engine_server import Engine, EngineServer
from tests.support.fitted_drafter import fitted_drafter

torch.set_num_threads(1)
QUESTIONS = (
    "What is 12 + 30?",
    "Copy: red blue green",
    "Reverse the words: one two three",
    "Count from 3 to 9.",
    "Sort: 9 4 7 1",
)
SETTINGS = EvaluateConfig(max_new_tokens=10, bootstrap_samples=100)
PROBES = 3
"""Requests that a check with a single probe makes: how prompts are taken, the probe, and what vLLM tells."""
AFTER = 3
"""Number of the first page of metrics that is read behind the answers: one shows what the server is, two that it rests."""

WHOLE = {each.name for each in fields(EvaluationResult)} - {
    "drafter", "step", "plain_s_per_token", "speculative_s_per_token", "speedup", "speedup_ci", "target_frac", "drafter_frac",
    "other_frac",
    "lossless", "differing_prompts", "near_tie_prompts", "divergence_frac", "warnings", "slices", "batch_size",
}  # fmt: skip
BY_VERIFICATION = {
    "survival_per_position", "conditional_per_position", "acceptance_histogram", "drafted_per_position", "reached_per_position",
    "accepted_per_position",
}  # fmt: skip
BY_ANSWER = {"accepted", "accepted_length", "acceptance_length_macro", "acceptance_ci"}


@dataclass(frozen=True)
class Bench:
    """What every test shares."""

    target: Target
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    drafter: DrafterProposer
    prompts: list[EvalPrompt]
    reference: Evaluation
    decoded: dict[Any, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = TargetConfig(path="demo", mask_token="<|mask|>")
    tokenizer = load_tokenizer(config)
    stop_ids = stop_token_ids(tokenizer, config)
    target = load_target(config, target_layer_ids=(0, 1, 2), device=torch.device("cpu"))
    prompts = [EvalPrompt(f"q{n}", "ask", "toys", ids, f"{n:064d}", {}) for n, ids in enumerate(rendered(tokenizer))]
    limits = DecodeLimits(2 * SETTINGS.max_new_tokens, frozenset(stop_ids))
    texts = [(prompt.prompt_ids, plain_decode(target, prompt.prompt_ids, limits=limits).tokens) for prompt in prompts[:3]]
    shape = DrafterConfig(hidden_size=128, intermediate_size=128)
    mask_id = tokenizer.convert_tokens_to_ids("<|mask|>")
    drafter = fitted_drafter(target, texts, config=shape, mask_token_id=mask_id, steps=60)
    candidate = drafter_candidate(target, drafter, block_size=None, mask_token_id=mask_id, label="trained", step=1)
    [reference] = evaluate_candidates(
        target, [candidate], prompts, evaluate=SETTINGS, stop_ids=stop_ids, progress=lambda *_: None
    )  # fmt: skip
    assert isinstance(candidate.proposer, DrafterProposer)
    return Bench(target, tokenizer, stop_ids, candidate.proposer, prompts, reference)


def rendered(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in QUESTIONS
    ]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


@contextmanager
def serving(
    bench: Bench, *, style: EngineName = "vllm", plain: bool = False, behaviour: Any = None, **engine: Any
) -> Iterator[EngineServer]:
    runs = Engine(bench.target, None if plain else bench.drafter, decoded=bench.decoded, **engine)
    server = EngineServer(
        runs, bench.tokenizer, stop_ids=set(bench.stop_ids), behaviour=Behaviour(style=style, **(behaviour or {}))
    )  # fmt: skip
    with server:
        yield server


def questioned(
    bench: Bench,
    server: EngineServer,
    *,
    plain: EngineServer | str | None = None,
    evaluate: EvaluateConfig = SETTINGS,
    judge: Any = None,
    settle_s: float = 10.0,
    engine: EngineName | None = None,
    **patience: Any,
) -> ServedQuestion:
    settings = {"concurrency": 4, "request_timeout_s": 20.0, "max_retries": 2, "backoff_s": 0.001, **patience}
    target = ServedTarget(("target",), 200, bench.tokenizer, probe_prompts(bench.tokenizer, {})[:1], reference=None)
    sampling = Sampling("target", evaluate.max_new_tokens, evaluate.temperature, evaluate.seed, bench.stop_ids)
    return ServedQuestion(
        engine=engine or server.behaviour.style,
        server=ServerConfig(url=server.root, **settings),
        plain_url=plain.url if isinstance(plain, EngineServer) else plain,
        wants=ServedWants(target, sampling, settle_s),
        expected_positions=bench.drafter.max_drafts,
        judge=judge,
    )


def asked(bench: Bench, server: EngineServer, *, evaluate: EvaluateConfig = SETTINGS, **how: Any) -> ServedEvaluation:
    question = questioned(bench, server, evaluate=evaluate, **how)
    return evaluate_served(bench.prompts, question, evaluate=evaluate, progress=lambda *_: None)


def refusal(bench: Bench, server: EngineServer, error: type[DflashError], words: str, **how: Any) -> str:
    with pytest.raises(error, match=words) as caught:
        asked(bench, server, **how)
    return str(caught.value)


def differences(found: EvaluationResult, wanted: EvaluationResult, *, absent: set[str]) -> list[str]:
    """Fields that neither equal those of this process nor are rightly absent."""
    return [
        name for name in sorted(WHOLE)
        if getattr(found, name) != (None if name in absent else getattr(wanted, name))
    ]  # fmt: skip


def test_the_reference_is_worth_comparing_with(bench: Bench) -> None:
    result = bench.reference.result
    assert result.acceptance_length > 1.5
    assert result.acceptance_length_untruncated != result.acceptance_length, "an answer ends inside accepted drafts"
    assert sum(count > 0 for count in result.acceptance_histogram or ()) >= 3


class TestFigures:
    def test_vllm_that_lists_every_verification_gives_all_of_them(self, bench: Bench) -> None:
        together = threading.Barrier(4)

        def meet(number: int, body: dict[str, Any]) -> None:
            if PROBES <= number < PROBES + 4:
                together.wait(60)  # raises if the others do not come

        with serving(bench, behaviour={"fault": meet}) as server:
            found = asked(bench, server)
        wanted = bench.reference
        assert differences(found.result, wanted.result, absent=set()) == []
        assert found.result.slices["context_tokens"] == wanted.result.slices["context_tokens"]
        assert found.result.slices["kind"] == wanted.result.slices["kind"]
        assert found.result.warnings == wanted.result.warnings
        assert found.table is not None
        for name in ("prompt", "context_tokens", "drafted", "accepted", "counted"):
            assert getattr(found.table, name).tolist() == getattr(wanted.table, name).tolist()
        assert [reply.ids for reply in found.asked.replies] == [contest.plain.tokens for contest in wanted.contests]
        assert server.most_at_once == 4

    @pytest.mark.parametrize(
        ("engine", "concurrency", "absent"),
        [
            ({"accounts": "summary"}, 4, BY_VERIFICATION),
            ({"accounts": "none"}, 1, BY_VERIFICATION),
            ({"accounts": "none", "old_names": True}, 4, BY_VERIFICATION | BY_ANSWER),
            ({"style": "sglang"}, 4, BY_VERIFICATION),
            ({"style": "sglang", "old_names": True}, 1, BY_VERIFICATION),
        ],
        ids=["vllm, an account an answer", "vllm, counters one by one", "vllm, counters", "sglang", "sglang of 2025"],
    )
    def test_what_an_engine_tells_equals_this_process_and_the_rest_is_absent(
        self, bench: Bench, engine: dict[str, Any], concurrency: int, absent: set[str]
    ) -> None:
        with serving(bench, **engine) as server:
            found = asked(bench, server, concurrency=concurrency)
        assert differences(found.result, bench.reference.result, absent=absent) == []
        assert found.table is None and found.result.slices == {}
        assert found.result.lossless is None and found.result.speedup is None

    def test_counters_that_lag_behind_the_checks_own_requests_are_waited_for(self, bench: Bench) -> None:
        def lag(number: int, server: EngineServer) -> None:
            if number == 0:
                server.engine.page = server._metrics().replace("generation_tokens_total", "generation_tokens_seen_total")
            elif number == 2:
                server.engine.page = None

        with serving(bench, accounts="none", before_page=lag) as server:
            assert asked(bench, server).result.acceptance_length == bench.reference.result.acceptance_length

    def test_counters_of_the_past_are_not_this_evaluations(self, bench: Bench) -> None:
        with serving(bench, accounts="none") as server:
            first, second = (asked(bench, server).result for _ in range(2))
        assert first == second

    def test_sampled_answers_are_asked_with_a_seed_each_and_never_compared(self, bench: Bench) -> None:
        hot = SETTINGS.model_copy(update={"temperature": 0.8})
        with serving(bench) as server, serving(bench, plain=True) as plain:
            found = asked(bench, server, plain=plain, evaluate=hot)
        seeds = [body["seed"] for body in server.bodies[PROBES:]]
        assert len(set(seeds)) == len(bench.prompts)
        assert found.result.temperature == 0.8 and found.result.lossless is None and found.result.differing_prompts is None


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_what_is_asked_behind_an_answer_stands_behind_the_servers_own_greedy_one(bench: Bench, style: EngineName) -> None:
    hot = SETTINGS.model_copy(update={"temperature": 0.8})
    with serving(bench, style=style) as server, serving(bench, style=style, plain=True) as plain:
        question = questioned(bench, server, plain=plain, evaluate=hot)
        answers = served_answers(bench.prompts, question, progress=lambda *_: None)
        assert not server.bodies and plain.bodies
    assert [tuple(answer) for answer in answers] == [contest.plain.tokens for contest in bench.reference.contests]


class TestPlainDecoding:
    @pytest.mark.parametrize("style", ["vllm", "sglang"])
    def test_equal_answers_are_lossless(self, bench: Bench, style: EngineName) -> None:
        with serving(bench, style=style) as server, serving(bench, style=style, plain=True) as plain:
            result = asked(bench, server, plain=plain).result
        assert (result.lossless, result.differing_prompts, result.near_tie_prompts, result.divergence_frac) == (True, 0, 0, 0.0)

    def test_times_are_compared_one_by_one_where_the_engine_tells_them(self, bench: Bench) -> None:
        with serving(bench, timed=True) as server, serving(bench, plain=True, timed=True) as plain:
            alone = asked(bench, server, plain=plain, concurrency=1).result
            together = asked(bench, server, plain=plain, concurrency=3).result
        # The imitated engines say two seconds a target forward.
        assert alone.speedup == pytest.approx(alone.acceptance_length)
        assert alone.plain_s_per_token == 2.0
        assert together.speedup is None and together.speculative_s_per_token is None

    @pytest.mark.parametrize("excused", [None, True, False])
    def test_another_answer_is_told_and_judged(self, bench: Bench, excused: bool | None) -> None:
        judged = []

        def judge(prompt: EvalPrompt, plain: tuple[int, ...], speculative: tuple[int, ...]) -> NearTie:
            judged.append((prompt.id, plain, speculative))
            return NearTie(0, 0.0, 0.0, 0.0, excused=bool(excused))

        with serving(bench) as server, serving(bench, plain=True) as plain:
            honest = plain.complete

            def lying(body: dict[str, Any]) -> dict[str, Any]:
                reply = honest(body)
                if tuple(body["prompt"]) == bench.prompts[2].prompt_ids:
                    reply["choices"][0]["token_ids"][0] += 1
                return reply

            plain.complete = lying  # type: ignore[method-assign]
            result = asked(bench, server, plain=plain, judge=None if excused is None else judge).result
        assert result.differing_prompts == 1 and result.lossless is bool(excused)
        assert result.near_tie_prompts == (None if excused is None else int(excused))
        assert [name for name, _, _ in judged] == ([] if excused is None else ["q2"])
        assert any("1 of 5 answers differ" in warning for warning in result.warnings) is not bool(excused)

    def test_a_plain_server_that_speculates_is_none(self, bench: Bench) -> None:
        styles: tuple[EngineName, ...] = ("vllm", "sglang")
        for style in styles:
            with serving(bench, style=style) as server, serving(bench, style=style, accounts="none") as other:
                refusal(bench, server, EvaluationError, "speculates too", plain=other)
        with serving(bench) as server:
            refusal(bench, server, EvaluationError, "that of the speculating server", plain=f"{server.root}/v1/")


class TestWhatIsRefused:
    def test_a_server_that_is_away(self, bench: Bench) -> None:
        with serving(bench) as server:
            root = server.root
        with pytest.raises(ServerError, match=root) as caught:
            asked(bench, server)
        assert "evaluate.server.max_retries" in str(caught.value)

    @pytest.mark.parametrize("style", ["vllm", "sglang"])
    def test_another_model(self, bench: Bench, style: EngineName) -> None:
        models = {"models": [{"id": "other", "root": "org/other"}]}
        with (
            serving(bench, style=style, behaviour=models) as server,
            pytest.raises(TargetError, match="the configured target is target") as caught,
        ):
            asked(bench, server)
        assert "evaluate.server.model" in str(caught.value)

    @pytest.mark.parametrize("style", ["vllm", "sglang"])
    def test_a_server_without_a_drafter(self, bench: Bench, style: EngineName) -> None:
        with serving(bench, style=style, plain=True) as server, pytest.raises(EvaluationError, match="tells of no speculative"):
            asked(bench, server)

    def test_the_other_engine(self, bench: Bench) -> None:
        with serving(bench) as server, pytest.raises(EvaluationError, match="it is no SGLang"):
            asked(bench, server, engine="sglang")

    def test_counters_that_somebody_else_moves(self, bench: Bench) -> None:
        def meddle(number: int, server: EngineServer) -> None:
            if number == AFTER:
                server.complete({**server.bodies[-1], "prompt": list(bench.prompts[0].prompt_ids)})

        with serving(bench, accounts="none", before_page=meddle) as server:
            refusal(bench, server, EvaluationError, r"6 requests and \d+ tokens .* 5 and \d+ are its own .*somebody else")

    def test_counters_that_move_before_anything_is_asked(self, bench: Bench) -> None:
        def busy(number: int, server: EngineServer) -> None:
            server.count.tokens += 1

        with serving(bench, accounts="none", before_page=busy) as server:
            refusal(bench, server, EvaluationError, "move though nothing was asked", settle_s=0.0)

    def test_counters_that_never_catch_up(self, bench: Bench) -> None:
        def freeze(number: int, server: EngineServer) -> None:
            if number == 1:
                server.engine.page = server._metrics()

        with serving(bench, accounts="none", before_page=freeze) as server, pytest.raises(EvaluationError, match="they lag behind"):
            asked(bench, server, settle_s=0.0)

    def test_counters_that_fell(self, bench: Bench) -> None:
        with serving(
            bench, accounts="none", before_page=lambda number, server: server.forget() if number == AFTER else None
        ) as server:
            refusal(bench, server, EvaluationError, "it was started again")

    def test_a_page_of_metrics_that_is_a_web_page(self, bench: Bench) -> None:
        with serving(bench, accounts="none", page="<html><body>login</body></html>") as server:
            refusal(bench, server, ServerError, "not a page of Prometheus metrics: '<html>")

    def test_a_page_of_metrics_that_is_kept_back_is_not_one_that_is_missing(self, bench: Bench) -> None:
        pages = {403: (TargetError, "HTTP 403"), 404: (EvaluationError, "tells of no speculative decoding")}
        for status, (error, words) in pages.items():
            with serving(bench, accounts="none") as server:
                kept_back = Fault("status", status, b"no")
                server.behaviour.fault = lambda *_, server=server, page=kept_back: setattr(server.behaviour, "models_fault", page)
                refusal(bench, server, error, words)

    def test_a_web_page_as_an_error_is_told_in_its_own_words(self, bench: Bench) -> None:
        page = Fault("status", 403, b"<html><head><title>403 Forbidden</title></head>\n<body>nginx</body></html>")
        with serving(bench, behaviour={"fault": lambda number, body: page if number >= PROBES else None}) as server:
            said = refusal(bench, server, TargetError, r"HTTP 403: <html>.*403 Forbidden.*nginx")
        assert "evaluate.server.api_key_env" in said

    def test_an_answer_that_the_context_cuts(self, bench: Bench) -> None:
        with serving(bench) as server:
            whole = server.complete

            def short(body: dict[str, Any]) -> dict[str, Any]:
                return whole({**body, "max_tokens": min(body["max_tokens"], 3)})

            server.complete = short  # type: ignore[method-assign]
            refusal(bench, server, EvaluationError, r"cut the answer to 'q\d' at 3 tokens, evaluate.max_new_tokens is 10")

    @pytest.mark.parametrize("style", ["vllm", "sglang"])
    def test_tokens_that_are_missing_from_a_reply(self, bench: Bench, style: EngineName) -> None:
        with serving(bench, style=style) as server:
            whole = server.complete

            def lossy(body: dict[str, Any]) -> dict[str, Any]:
                reply = whole(body)
                ids = reply["output_ids"] if "output_ids" in reply else reply["choices"][0]["token_ids"]
                if len(server.bodies) > PROBES:
                    del ids[2:3]
                return reply

            server.complete = lossy  # type: ignore[method-assign]
            refusal(bench, server, DflashError, r"holds \d+ of \d+ generated tokens")


@pytest.mark.parametrize(("style", "kind"), [("vllm", "truncate"), ("vllm", "status"), ("sglang", "abort")])
def test_a_passing_fault_changes_nothing(bench: Bench, style: EngineName, kind: Any) -> None:
    faults = {"fault": lambda number, body: Fault(kind) if number in (PROBES, PROBES + 1) else None}
    with serving(bench, style=style, behaviour=faults) as server:
        found = asked(bench, server, concurrency=1)
    assert found.result.acceptance_length == bench.reference.result.acceptance_length


def test_an_answer_that_was_generated_twice_is_no_part_of_the_counters(bench: Bench) -> None:
    """A reply that was lost on its way has been counted by the server: the counters do not tell what belongs to which."""
    faults = {"fault": lambda number, body: Fault("truncate") if number == PROBES else None}
    with serving(bench, accounts="none", behaviour=faults) as server:
        refusal(bench, server, EvaluationError, "or requests were asked twice")
