"""What vLLM and SGLang say about one answer, in one form. Pure; no network.

Conventions, normalised here: a verification is one target forward over a proposal; `accepted` are drafts without the target's
own token; drafts behind the answer's end are counted, as the engines do. The answer's first token is the prefill's, so
an answer of n tokens has n-1 that verifications made.

vLLM (docs/features/speculative_decoding/acceptance_metrics.md): `metrics.speculative_decoding` of a completion, if the server was
started with `--per-request-spec-decode-metrics`; `detailed` lists every verification. `metrics.generation_time_ms` is the time
behind the first token (`--enable-per-request-metrics`).
SGLang (docs/basic_usage/native_api, managers/tokenizer_manager.py): `meta_info` of `/generate`; the fields were renamed, and
only the names whose meaning is known are read. Its `spec_accept_length` counts the prefill's token as well and is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.data.served_protocol import MalformedReplyError, Sampling, keyed_seed, parse_completion

_ACCEPTED_NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_DRAFTED_NAMES = ("spec_num_proposed_drafts", "spec_proposed_drafts")
_HISTOGRAM_NAMES = ("spec_correct_drafts_histogram", "spec_accept_histogram")


@dataclass(frozen=True, slots=True)
class Drafting:
    """An engine's account of verifications.

    Attributes:
        verifications: how many.
        drafted: proposed tokens; None where the engine does not tell.
        accepted: of these.
        histogram: verifications by accepted drafts; None where the engine does not tell.
        steps: (drafted, accepted) of every verification in their order; None where the engine does not tell.
    """

    verifications: int
    drafted: int | None
    accepted: int
    histogram: tuple[int, ...] | None
    steps: tuple[tuple[int, int], ...] | None


NO_DRAFTING = Drafting(0, 0, 0, (), ())
"""Of an answer that ended with the prefill's token."""


@dataclass(frozen=True, slots=True)
class ServedReply:
    """One answer.

    Attributes:
        ids: generated tokens, the stop token included; None from a server that does not return them.
        completion_tokens: how many they are.
        cut: the answer ended at a limit.
        decode_s: time behind the first token; None where the engine does not tell.
        drafting: None from an engine that does not speculate, or does not tell.
    """

    ids: tuple[int, ...] | None
    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool
    decode_s: float | None
    drafting: Drafting | None


def parse_vllm(body: Any) -> ServedReply:
    """Read a completion.

    Raises:
        MalformedReplyError: it is none, or its parts contradict each other.
    """
    said = parse_completion(body)
    metrics = _mapping(body.get("metrics"))
    told = metrics.get("speculative_decoding")
    time_ms = metrics.get("generation_time_ms")
    return _whole(
        ServedReply(
            None if said.token_ids is None else tuple(said.token_ids),
            said.text,
            said.prompt_tokens,
            said.completion_tokens,
            said.finish_reason == "length",
            time_ms / 1e3 if isinstance(time_ms, int | float) and not isinstance(time_ms, bool) else None,
            None if told is None else _vllm_drafting(_mapping(told)),
        )
    )


def parse_sglang(body: Any) -> ServedReply:
    """Read a reply of `/generate`.

    Raises:
        MalformedReplyError: it is none, or its parts contradict each other.
    """
    try:
        meta = body["meta_info"]
        reason = meta["finish_reason"]["type"]
        text, prompt_tokens, completion_tokens = str(body["text"]), meta["prompt_tokens"], meta["completion_tokens"]
        ids = body.get("output_ids")
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedReplyError(f"no reply of /generate ({type(error).__name__}: {error}): {str(body)[:200]}") from error
    if reason not in ("stop", "length"):
        raise MalformedReplyError(f"the answer ended for the reason {reason!r}")
    if not (_is_count(prompt_tokens) and _is_count(completion_tokens)) or not (ids is None or _are_counts(ids)):
        raise MalformedReplyError(f"no reply of /generate: {str(body)[:200]}")
    matched = meta["finish_reason"].get("matched")
    if ids is not None and len(ids) == completion_tokens - 1 and _is_count(matched):
        ids = [*ids, matched]  # some versions leave the stop token out, though it is one of the counted tokens
    return _whole(
        ServedReply(
            None if ids is None else tuple(ids),
            text,
            prompt_tokens,
            completion_tokens,
            reason == "length",
            None,
            _sglang_drafting(meta, completion_tokens),
        )
    )


def sglang_request(sampling: Sampling, prompt_ids: Sequence[int], *, key: str) -> dict[str, Any]:
    """The body of one request to `/generate`; every sampling parameter is sent, as for completions."""
    settings: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.temperature > 0:
        settings["sampling_seed"] = keyed_seed(sampling.seed, key)
    return {"input_ids": list(prompt_ids), "sampling_params": settings, "stream": False}


def _whole(reply: ServedReply) -> ServedReply:
    """Refuse an answer of which a part is missing."""
    if reply.ids is not None and len(reply.ids) != reply.completion_tokens:
        raise MalformedReplyError(f"the reply holds {len(reply.ids)} of {reply.completion_tokens} generated tokens")
    if reply.completion_tokens < 1:
        raise MalformedReplyError("the answer holds no token")
    return reply


def _vllm_drafting(told: Mapping[str, Any]) -> Drafting:
    counts = [told.get(name) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")]
    histogram = told.get("acceptance_histogram")
    lists = (told.get("per_step_drafted"), told.get("per_step_accepted"))
    fits = all(_is_count(count) for count in counts) and _are_counts(histogram) and all(x is None or _are_counts(x) for x in lists)
    if not fits:
        raise MalformedReplyError(f"metrics.speculative_decoding is not what vLLM documents: {str(dict(told))[:200]}")
    verifications, drafted, accepted = (int(count) for count in counts if count is not None)
    steps = None
    if lists[0] is not None and lists[1] is not None:
        if len(lists[0]) != len(lists[1]):
            raise MalformedReplyError("metrics.speculative_decoding lists drafts and acceptances of different lengths")
        steps = tuple(zip(lists[0], lists[1], strict=True))
    found = Drafting(verifications, drafted, accepted, tuple(histogram or ()), steps)
    return _checked(found, "metrics.speculative_decoding")


def _sglang_drafting(meta: Mapping[str, Any], completion_tokens: int) -> Drafting | None:
    verifications = meta.get("spec_verify_ct")
    if verifications is None:
        return NO_DRAFTING if completion_tokens == 1 else None
    accepted, drafted, histogram = (_first(meta, names) for names in (_ACCEPTED_NAMES, _DRAFTED_NAMES, _HISTOGRAM_NAMES))
    if accepted is None and _are_counts(histogram):
        accepted = sum(number * count for number, count in enumerate(histogram))
    fits = _is_count(verifications) and _is_count(accepted) and (drafted is None or _is_count(drafted))
    if not fits or not (histogram is None or _are_counts(histogram)):
        raise MalformedReplyError(f"meta_info is not what SGLang documents: {str(dict(meta))[:300]}")
    found = Drafting(verifications, drafted, accepted, None if histogram is None else tuple(histogram), None)
    return _checked(found, "meta_info")


def _checked(drafting: Drafting, where: str) -> Drafting:
    histogram, steps = drafting.histogram, drafting.steps
    sums = [(drafting.verifications, drafting.accepted)]
    if histogram is not None:
        sums.append((sum(histogram), sum(number * count for number, count in enumerate(histogram))))
    if steps is not None:
        sums.append((len(steps), sum(accepted for _, accepted in steps)))
    if len(set(sums)) > 1 or any(accepted > drafted for drafted, accepted in steps or ()):
        raise MalformedReplyError(f"{where} contradicts itself: (verifications, accepted) are {sums}")
    return drafting


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise MalformedReplyError(f"metrics are no object: {str(value)[:100]}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(_is_count(value) for value in values)
