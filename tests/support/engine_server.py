"""A real HTTP server in the formats of vLLM and SGLang, with a real model that decodes speculatively behind it.

What it counts, and when, is what the engines document: drafts behind an answer's end are counted, the prefill's token is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace, speculative_decode_batch
from dflash.evaluate.proposal import Proposer
from dflash.model.sampling import Sampling
from dflash.model.target import Target
from tests.support.answer_server import AnswerServer, Behaviour

LABELS = 'engine="{engine}",model_name="target"'


@dataclass
class Engine:
    """What runs in the server.

    Attributes:
        proposer: None decodes plainly.
        keys: the proposer's name of a prompt; the prompt's ids as text if it is not there.
        accounts: what a vLLM reply tells; `none` is a server started without `--per-request-spec-decode-metrics`.
        before_page: called with the number of a page of metrics before it is shown, e.g. to let others use the server.
        old_names: SGLang's names of 2025, and vLLM's counters without `_total`.
        timed: vLLM tells the time behind the first token.
        decoded: what the same target and proposer have decoded before; shared by the servers of a test file.
    """

    target: Target
    proposer: Proposer | None
    keys: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    accounts: Literal["none", "summary", "detailed"] = "detailed"
    before_page: Callable[[int, EngineServer], None] = lambda number, server: None
    old_names: bool = False
    timed: bool = False
    page: str | None = None
    decoded: dict[Any, SpeculativeTrace] = field(default_factory=dict)


@dataclass
class Count:
    """Counters of a vLLM server."""

    positions: list[int]
    drafts: int = 0
    draft_tokens: int = 0
    tokens: int = 0
    stopped: int = 0
    cut: int = 0


class EngineServer(AnswerServer):
    """A server on a free local port; use as a context manager."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, *, stop_ids: set[int], behaviour: Behaviour) -> None:
        super().__init__(lambda ids, body: self._written, tokenizer, stop_ids=stop_ids, behaviour=behaviour)
        self.engine = engine
        self.pages = 0
        self._written: list[int] = []
        self.width = 0 if engine.proposer is None else engine.proposer.max_drafts
        self.count = Count([0] * self.width)

    @property
    def root(self) -> str:
        """Address without the version."""
        return self.url.removesuffix("/v1")

    def takes(self, path: str) -> bool:
        return path == "/v1/completions" or (path == "/generate" and self.behaviour.style == "sglang")

    def page(self, path: str) -> Any:
        if path == "/metrics" and self.behaviour.style == "vllm":
            self.engine.before_page(self.pages, self)
            self.pages += 1
            return (self.engine.page or self._metrics()).encode()
        if path == "/version" and self.behaviour.style == "vllm":
            return {"version": "0.32.0"}
        if path == "/get_server_info" and self.behaviour.style == "sglang":
            speculative = self.engine.proposer is not None
            return {
                "model_path": "target", "version": "0.5.9", "speculative_algorithm": "DFLASH" if speculative else None,
                "speculative_num_draft_tokens": self.width + 1 if speculative else None, "internal_states": [{"dtype": "float32"}],
            }  # fmt: skip
        return None

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        native = "input_ids" in body
        settings = body["sampling_params"] if native else body
        ids = body["input_ids"] if native else body["prompt"]
        with self.model_lock:
            trace = self._decode(ids, settings)
            self._counted(trace)
            if native:
                return self._generated(ids, trace)
            self._written = list(trace.tokens)
            reply = super().complete_locked(body)
        metrics: dict[str, Any] = {}
        if self.engine.timed:
            metrics["generation_time_ms"] = 2.0 * len(trace.verifications) * 1e3
        if self.engine.accounts != "none" and self.engine.proposer is not None:
            metrics["speculative_decoding"] = self._account(trace)
        return {**reply, "metrics": metrics or None}

    def forget(self) -> None:
        """As if it had been started again."""
        self.count = Count([0] * self.width)

    def _decode(self, ids: list[int], settings: Mapping[str, Any]) -> SpeculativeTrace:
        limit = settings["max_new_tokens"] if "max_new_tokens" in settings else settings["max_tokens"]
        seed = settings.get("seed", settings.get("sampling_seed", 0))
        key = (self.engine.proposer is None, tuple(ids), limit, settings["temperature"], seed, tuple(settings["stop_token_ids"]))
        if key in self.engine.decoded:
            return self.engine.decoded[key]
        [trace] = speculative_decode_batch(
            self.engine.target,
            self.engine.proposer or _Nothing(),
            [ids],
            keys=[self.engine.keys.get(tuple(ids), str(ids))],
            limits=DecodeLimits(limit, frozenset(settings["stop_token_ids"])),
            sampling=Sampling(settings["temperature"], seed),
            rollback=self.engine.target.keep,
        )
        self.engine.decoded[key] = trace
        return trace

    def _counted(self, trace: SpeculativeTrace) -> None:
        self.count.tokens += len(trace.tokens)
        if trace.tokens[-1] in self.stop_ids:
            self.count.stopped += 1
        else:
            self.count.cut += 1
        if self.engine.proposer is None:
            return
        for step in trace.verifications:
            self.count.drafts += 1
            self.count.draft_tokens += step.drafted
            for place in range(step.accepted):
                self.count.positions[place] += 1

    def _account(self, trace: SpeculativeTrace) -> dict[str, Any]:
        accepted = [step.accepted for step in trace.verifications]
        drafted = [step.drafted for step in trace.verifications]
        account: dict[str, Any] = {
            "num_spec_steps": len(accepted), "num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": sum(drafted),
            "num_spec_tokens": self.width, "acceptance_histogram": [accepted.count(n) for n in range(self.width + 1)],
            "mean_acceptance_length": 1 + sum(accepted) / max(1, len(accepted)),
        }  # fmt: skip
        if self.engine.accounts == "detailed":
            account |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
        return account

    def _generated(self, ids: list[int], trace: SpeculativeTrace) -> dict[str, Any]:
        """A reply of SGLang's own route."""
        stopped = trace.tokens[-1] in self.stop_ids
        reason: dict[str, Any] = (
            {"type": "stop", "matched": trace.tokens[-1]} if stopped else {"type": "length", "length": len(trace.tokens)}
        )
        meta: dict[str, Any] = {
            "id": "1", "finish_reason": reason, "prompt_tokens": len(ids), "cached_tokens": 0,
            "completion_tokens": len(trace.tokens),
        }  # fmt: skip
        accepted = [step.accepted for step in trace.verifications]
        if accepted and self.engine.proposer is not None:
            names = ("spec_accept_token_num", "spec_accept_histogram") if self.engine.old_names else (
                "spec_num_correct_drafts", "spec_correct_drafts_histogram"
            )  # fmt: skip
            meta |= {
                "spec_verify_ct": len(accepted), "spec_accept_length": len(trace.tokens) / len(accepted), names[0]: sum(accepted),
                names[1]: [accepted.count(n) for n in range(max(accepted) + 1)],
            }  # fmt: skip
            if not self.engine.old_names:
                meta["spec_num_proposed_drafts"] = len(accepted) * self.width
        text = self.tokenizer.decode(list(trace.tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {"text": text, "output_ids": list(trace.tokens), "meta_info": meta}

    def _metrics(self) -> str:
        """The page of two engines behind one address, of which the second does all the work."""
        total = "" if self.engine.old_names else "_total"
        count = self.count
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{LABELS.format(engine=1)}}} 0.0",
        ]

        def counter(name: str, value: float, more: str = "") -> None:
            lines.append(f"# TYPE vllm:{name} counter")
            lines.extend(
                f"vllm:{name}{total}{{{LABELS.format(engine=engine)}{more}}} {number:.1f}"
                for engine, number in ((0, 0.0), (1, float(value)))
            )
            lines.append(f"vllm:{name}_created{{{LABELS.format(engine=1)}{more}}} 1.7e+09")

        counter("generation_tokens", count.tokens)
        counter("request_success", count.stopped, ',finished_reason="stop"')
        counter("request_success", count.cut, ',finished_reason="length"')
        if self.engine.proposer is not None:
            counter("spec_decode_num_drafts", count.drafts)
            counter("spec_decode_num_draft_tokens", count.draft_tokens)
            counter("spec_decode_num_accepted_tokens", sum(count.positions))
            for place, value in enumerate(count.positions):
                counter("spec_decode_num_accepted_tokens_per_pos", value, f',position="{place}"')
        return "\n".join(lines) + "\n"


class _Nothing:
    """Proposes nothing: plain decoding."""

    needs_features = False
    max_drafts = 0

    def begin(self, keys: Any) -> None:
        """Nothing is remembered."""

    def select_rows(self, rows: Any) -> None:
        """Nothing is remembered."""

    def propose(self, committed: Any) -> Any:
        from dflash.evaluate.proposers import padded_proposal

        return padded_proposal([[] for _ in committed.texts], device=committed.anchors.device)
