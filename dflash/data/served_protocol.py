"""What is said to an OpenAI-compatible server, and how its replies are read: pure functions.

Prompts go to `/completions` as token ids: `/chat/completions` would render the server's own chat template, which nobody here
has seen, and take thoughts apart from answers. `return_token_ids` brings the generated ids back, as `token_ids` and
`prompt_token_ids` of a choice; a server that does not know it ignores it, and the answer's text is tokenized anew.

Hard decision: every sampling parameter is sent. A server fills what is missing from the model's generation configuration, and a
repetition penalty found there would make greedy answers differ from the target's own.

Sources: vllm/entrypoints/openai/completion/protocol.py (`return_token_ids` since August 2025),
sglang/srt/entrypoints/openai/serving_completions.py (since July 2026).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dflash.data.answers_engine import FinishReason

_SEED_BITS = 31
"""Seeds are held in 32-bit integers by some samplers."""


class MalformedReplyError(Exception):
    """A reply that is no completion: cut off on its way, or another protocol."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What decides an answer beside its prompt.

    Attributes:
        model: name of the target at the server.
        stop_ids: tokens that end an answer.
    """

    model: str
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]

    def request(self, prompt: list[int] | str, *, key: str) -> dict[str, Any]:
        """The body of one request for one answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_new_tokens,
            "n": 1,
            "stream": False,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.stop_ids),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
        }
        if self.temperature > 0:
            body["seed"] = keyed_seed(self.seed, key)
        return body


@dataclass(frozen=True, slots=True)
class Completion:
    """One reply of `/completions`.

    Attributes:
        token_ids, prompt_token_ids: None from a server that does not return them.
        stop_id: the token that ended it, where the server tells (vLLM names only those beside the eos token).
        prompt_tokens, completion_tokens: as the server counts them.
    """

    text: str
    finish_reason: FinishReason
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    stop_id: int | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of `/models`.

    Attributes:
        root: what was loaded, where the server tells; `name` may be an alias of it.
        max_length_tokens: prompt and answer together, where the server tells.
    """

    name: str
    root: str | None
    max_length_tokens: int | None


def keyed_seed(seed: int, key: str) -> int:
    """A seed that depends on (seed, key) alone."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def parse_completion(body: Any) -> Completion:
    """Read the reply to one request.

    Raises:
        MalformedReplyError: it is no finished completion.
    """
    try:
        [choice] = body["choices"]
        usage = body["usage"]
        reason = choice["finish_reason"]
        text = choice["text"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        stop = next((choice[name] for name in ("stop_reason", "matched_stop") if isinstance(choice.get(name), int)), None)
        ids = (_ids(choice, "token_ids"), _ids(choice, "prompt_token_ids"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReplyError(f"not a completion ({type(error).__name__}: {error}): {str(body)[:200]}") from error
    if reason not in ("stop", "length"):
        raise MalformedReplyError(f"the completion ended for the reason {reason!r}")
    if not isinstance(text, str) or not all(isinstance(count, int) for count in counts):
        raise MalformedReplyError(f"a completion without text or counts: {str(body)[:200]}")
    return Completion(text, cast("FinishReason", reason), *ids, stop, *counts)


def parse_models(body: Any) -> list[ServedModel]:
    """Read the reply of `/models`.

    Raises:
        MalformedReplyError: it is no list of models.
    """
    try:
        return [ServedModel(str(card["id"]), card.get("root"), card.get("max_model_len")) for card in body["data"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedReplyError(f"not a list of models: {str(body)[:200]}") from error


def error_message(body: Any, *, text: str) -> str:
    """A server's own words about a fault: `error.message` (OpenAI), `message` (SGLang) or `detail` (FastAPI)."""
    if isinstance(body, Mapping):
        inner = body.get("error")
        for holder, name in ((inner, "message"), (body, "message"), (body, "detail")):
            if isinstance(holder, Mapping) and holder.get(name):
                return str(holder[name])[:500]
        if isinstance(inner, str):
            return inner[:500]
    return " ".join(text.split())[:500] or "(no message)"


def _ids(choice: Mapping[str, Any], name: str) -> list[int] | None:
    ids = choice.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{name} holds something else than token ids")
    return ids
