"""vLLM's speculative counters, read from its Prometheus page before and after an evaluation. Pure; no network.

Invariant: a difference is used only if it belongs to this evaluation alone: requests and generated tokens have to add up with
the answers that were given, and no counter may have fallen (a server that was started again counts from zero).

Names (vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py): `vllm:spec_decode_num_drafts`, `..._num_draft_tokens`,
`..._num_accepted_tokens`, `..._num_accepted_tokens_per_pos{position}`, `vllm:request_success{finished_reason}`,
`vllm:generation_tokens`. The page writes counters with `_total`, older versions of the client library without. Every engine
of a data-parallel server has samples of its own: they are summed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash.data.served_protocol import MalformedReplyError
from dflash.errors import EvaluationError
from dflash.evaluate.served_replies import Drafting

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _PER_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)

Samples = Mapping[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters at one moment, or how far they went between two.

    Attributes:
        drafts: verifications of a proposal; None from a server that does not speculate.
        draft_tokens, accepted: proposed and accepted tokens, those behind an answer's end included.
        per_position: accepted at draft position 1, 2, ...
        requests: answered.
        tokens: generated, the first of an answer included.
    """

    drafts: int | None
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    requests: int
    tokens: int

    def since(self, earlier: Counters) -> Counters:
        """What was counted since an earlier moment.

        Raises:
            EvaluationError: the server was started again in between.
        """
        pairs = [
            (self.drafts or 0, earlier.drafts or 0),
            (self.draft_tokens, earlier.draft_tokens),
            (self.accepted, earlier.accepted),
            (self.requests, earlier.requests),
            (self.tokens, earlier.tokens),
            *zip(self.per_position, earlier.per_position, strict=False),
        ]
        if any(now < then for now, then in pairs) or len(self.per_position) != len(earlier.per_position):
            raise EvaluationError(
                "the server's counters fell during the evaluation: it was started again",
                remedy="evaluate again once the server stays up",
            )
        drafts, draft_tokens, accepted, requests, tokens, *positions = (now - then for now, then in pairs)
        return Counters(None if self.drafts is None else drafts, draft_tokens, accepted, tuple(positions), requests, tokens)

    def drafting(self) -> Drafting:
        """The counted verifications, with a histogram made from the positions (accepted drafts are prefixes)."""
        drafts = self.drafts or 0
        reached = (drafts, *self.per_position, 0)
        histogram = tuple(reached[k] - reached[k + 1] for k in range(len(reached) - 1))
        if min(histogram) < 0 or sum(self.per_position) != self.accepted:
            raise EvaluationError(
                f"the server's counters contradict each other: {drafts} drafts, {self.accepted} accepted tokens, by position "
                f"{list(self.per_position)}",
                remedy="nobody else may use the server during an evaluation; evaluate again",
            )
        return Drafting(drafts, self.draft_tokens, self.accepted, histogram, None)


def read_counters(page: str) -> Counters:
    """Read vLLM's page.

    Raises:
        MalformedReplyError: it is none, or lacks the request counters.
    """
    samples = parse_prometheus(page)
    if not any(name.startswith("vllm:") for name in samples):
        raise MalformedReplyError("the page of metrics holds no vLLM metric (was the server started with --disable-log-stats?)")
    requests, tokens = _total(samples, "vllm:request_success"), _total(samples, "vllm:generation_tokens")
    return Counters(
        drafts=_total(samples, _DRAFTS),
        draft_tokens=_total(samples, _DRAFT_TOKENS) or 0,
        accepted=_total(samples, _ACCEPTED) or 0,
        per_position=_by_position(samples),
        requests=requests or 0,  # samples with a reason appear with the first request of that reason
        tokens=tokens or 0,
    )


def parse_prometheus(page: str) -> Samples:
    """Samples of a page in Prometheus' text format by name: labels and value.

    Raises:
        MalformedReplyError: a line is no sample.
    """
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in page.split("\n"):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(text)
        if match is None:
            raise MalformedReplyError(f"not a page of Prometheus metrics: {text[:80]!r}")
        name, labels, value = match.groups()
        samples.setdefault(name, []).append((_labels(labels or "", text), _number(value, text)))
    return samples


def _labels(text: str, line: str) -> dict[str, str]:
    labels, place = {}, 0
    while place < len(text.rstrip()):
        match = _LABEL.match(text, place)
        if match is None:
            raise MalformedReplyError(f"not a page of Prometheus metrics: {line[:80]!r}")
        labels[match[1]] = re.sub(r'\\[\\"n]', lambda escape: _ESCAPES[escape[0]], match[2])
        place = match.end()
    return labels


def _number(text: str, line: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise MalformedReplyError(f"not a page of Prometheus metrics: {line[:80]!r}") from error


def _samples(samples: Samples, name: str) -> list[tuple[dict[str, str], float]]:
    """A counter's samples, under its name with or without `_total`."""
    return list(samples.get(f"{name}_total", samples.get(name, ())))


def _total(samples: Samples, name: str) -> int | None:
    """Sum over all label sets; None if there is no sample."""
    found = _samples(samples, name)
    return sum(_whole(value, name) for _, value in found) if found else None


def _by_position(samples: Samples) -> tuple[int, ...]:
    sums: dict[int, int] = {}
    for labels, value in _samples(samples, _PER_POSITION):
        place = labels.get("position", "")
        if not place.isdecimal():
            raise MalformedReplyError(f"{_PER_POSITION} names the position {place!r}")
        sums[int(place)] = sums.get(int(place), 0) + _whole(value, _PER_POSITION)
    if set(sums) != set(range(len(sums))):
        raise MalformedReplyError(f"{_PER_POSITION} lacks positions: there are {sorted(sums)}")
    return tuple(sums[place] for place in range(len(sums)))


def _whole(value: float, name: str) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise MalformedReplyError(f"{name} is {value}, which no counter of things can be")
    return int(value)
