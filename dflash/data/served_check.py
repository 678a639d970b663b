"""Whether a server runs the configured target: asked before the first answer, because answers of another model look well.

Four proofs: the server lists the target; its context is long enough; it counts (and returns) the prompt's tokens as we do;
and the text that it reads out of generated ids is what the target's own tokenizer reads out of them.
The same model after more training passes all of them; only comparing its greedy answers with those of the target in this
process, which is optional because the target must be loaded for it, tells it apart.

The first probe also finds out how prompts can be sent: as token ids, or, where a server refuses those, as text.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from dflash.data.answers_engine import GenerateFn
from dflash.data.served_http import NoReplyError, RefusedError, ServerClient
from dflash.data.served_protocol import Completion, Sampling, ServedModel, parse_completion, parse_models
from dflash.errors import ServerError, TargetError

logger = logging.getLogger(__name__)

PromptForm = Literal["ids", "text"]

PROBE_TEXTS = (
    "Name three colours.",
    "What is 12345 + 678? Answer 1 22 333.",
    "Explain:\n\n\tdef f(x):\n        return x ** 2  # naïve café\n",
    "東京は日本の首都です。 🙂 Привет!",
)
"""Digits, white space, code and other scripts: what tokenizers differ in."""

_PROBE_TOKENS = 16
_LEAST_AGREED_FRAC = 0.5


def probe_prompts(tokenizer: PreTrainedTokenizerBase, template_flags: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Ids of the probes in the target's own template."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, **template_flags
        )
        for text in PROBE_TEXTS
    ]
    return tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """What the target must look like at the server.

    Attributes:
        names: under any of which the server may list it, as `id` or `root`; the first is the one to say.
        needed_tokens: longest prompt and longest answer together.
        tokenizer: the target's.
        probes: prompts, in the ids of the target's own template.
        reference: the target in this process, to compare greedy answers with; None leaves that out.
    """

    names: tuple[str, ...]
    needed_tokens: int
    tokenizer: PreTrainedTokenizerBase
    probes: tuple[tuple[int, ...], ...]
    reference: GenerateFn | None


@dataclass(frozen=True, slots=True)
class ServedAs:
    """How the target is asked at this server.

    Attributes:
        name: the model's name in requests.
        form: of a prompt.
    """

    name: str
    form: PromptForm


async def check_served(client: ServerClient, target: ServedTarget, sampling: Sampling) -> ServedAs:
    """Prove that a server runs the target.

    Raises:
        TargetError: it does not, or cannot answer prompts of the needed length; names what differs.
        ServerError: it does not answer at all.
    """
    try:
        model = await _listed(client, target)
        probe = replace(sampling, model=model.name, max_new_tokens=_PROBE_TOKENS, temperature=0.0)
        form = await _prompt_form(client, target, probe)
        answers = [await _probe(client, target, probe, ids, form) for ids in target.probes]
    except RefusedError as error:
        raise refused(client, error) from error
    except NoReplyError as error:
        raise away(client, str(error)) from error
    if any(answer.token_ids is None for answer in answers):
        logger.warning("%s returns no token ids: answers are tokenized anew from their text", client.address)
    if target.reference is not None:
        _compare(target, target.reference, answers, sampling.stop_ids, client.address)
    return ServedAs(model.name, form)


def refused(client: ServerClient, error: RefusedError) -> TargetError:
    """What a person is told about a request that a server refuses."""
    remedies = {401: f"put a valid key into the environment variable that {client.section}.api_key_env names"}
    remedies[403] = remedies[401]
    remedies[404] = "check the server's address (it ends in /v1) and that the server offers what is asked of it"
    return TargetError(
        f"the server {client.address} refuses a request: {error}",
        remedy=remedies.get(error.status, f"mend what it complains about; {client.kept}"),
    )


def away(client: ServerClient, fault: str) -> ServerError:
    """What a person is told about a server that does not answer any more."""
    return ServerError(
        f"the server {client.address} does not answer: {fault}",
        remedy=f"start it again and run the same command: {client.kept}; {client.section}.max_retries and backoff_s say how "
        "long to wait for it",
    )


def check_prompt_tokens(completion: Completion, prompt_ids: Sequence[int], *, address: str) -> None:
    """Compare the prompt that the server saw with ours.

    Raises:
        TargetError: it saw other tokens.
    """
    seen = completion.prompt_token_ids
    if completion.prompt_tokens != len(prompt_ids) or (seen is not None and seen != list(prompt_ids)):
        shown = f": {_start(seen)}" if seen is not None else ""
        raise TargetError(
            f"the server {address} read {completion.prompt_tokens} prompt tokens{shown} where the configured target's tokenizer "
            f"gives {len(prompt_ids)}: {_start(prompt_ids)}",
            remedy="serve the very model and tokenizer that target.path names",
        )


async def _listed(client: ServerClient, target: ServedTarget) -> ServedModel:
    models = await client.ask("models", body=None, parse=parse_models, key="models")
    for name in target.names:
        for model in models:
            if name in (model.name, model.root):
                if model.max_length_tokens is not None and model.max_length_tokens < target.needed_tokens:
                    raise TargetError(
                        f"{client.address} serves {model.name} with a context of {model.max_length_tokens} tokens, prompts and "
                        f"answers here need {target.needed_tokens}",
                        remedy="serve it with a longer context (vLLM --max-model-len, SGLang --context-length), or ask for "
                        "shorter prompts and answers",
                    )
                return model
    shown = ", ".join(model.name if model.root in (None, model.name) else f"{model.name} ({model.root})" for model in models)
    raise TargetError(
        f"{client.address} serves {shown or 'nothing'}, the configured target is {target.names[0]}",
        remedy=f"serve target.path, or set {client.section}.model to the name that it has at the server",
    )


async def _prompt_form(client: ServerClient, target: ServedTarget, sampling: Sampling) -> PromptForm:
    body = sampling.request(list(target.probes[0]), key="probe")
    try:
        await client.ask("completions", body=body, parse=parse_completion, key="probe")
    except RefusedError as error:
        if error.status not in (400, 422):
            raise
        logger.warning("%s refuses token ids as a prompt (%s): prompts are sent as text", client.address, error)
        return "text"
    return "ids"


async def _probe(
    client: ServerClient, target: ServedTarget, sampling: Sampling, ids: Sequence[int], form: PromptForm
) -> Completion:
    """Check how one prompt and its answer are tokenized."""
    prompt = list(ids) if form == "ids" else decode(target.tokenizer, ids)
    completion = await client.ask("completions", body=sampling.request(prompt, key="probe"), parse=parse_completion, key="probe")
    check_prompt_tokens(completion, ids, address=client.address)
    if completion.token_ids is not None:
        own = decode(target.tokenizer, without_stop(completion.token_ids, sampling.stop_ids))
        if not _same_text(completion.text, own) and not _same_text(completion.text, decode(target.tokenizer, completion.token_ids)):
            raise TargetError(
                f"the server {client.address} reads its own tokens {_start(completion.token_ids)} as {completion.text!r}, the "
                f"configured target's tokenizer reads them as {own!r}",
                remedy="serve the very model and tokenizer that target.path names",
            )
    return completion


def _compare(
    target: ServedTarget, reference: GenerateFn, answers: Sequence[Completion], stop_ids: Sequence[int], address: str
) -> None:
    """Compare greedy answers token by token up to the first difference.

    Another arithmetic may turn a near tie the other way, after which everything differs: so most tokens must agree, not all.
    """
    prompts = [list(ids) for ids in target.probes]
    agreed = total = 0
    worst: tuple[float, str, str] | None = None
    for own, answer in zip(reference(prompts, [f"probe/{n}" for n in range(len(prompts))]), answers, strict=True):
        ours = without_stop(own[:_PROBE_TOKENS], stop_ids)
        served = answer.token_ids
        if served is None:
            served = target.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        theirs = without_stop(served, stop_ids)
        same = next((n for n, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1]), len(ours))
        length = max(len(ours), len(theirs))
        agreed, total = agreed + same, total + length
        if length and (worst is None or same / length < worst[0]):
            worst = (same / length, decode(target.tokenizer, ours), decode(target.tokenizer, theirs))
    if worst is not None and worst[0] < 1:
        logger.warning("%s says %r where the target in this process says %r", address, worst[2], worst[1])
    if worst is not None and agreed < _LEAST_AGREED_FRAC * total:
        raise TargetError(
            f"the server {address} answers otherwise than the configured target: of {total} greedy tokens {agreed} agree up to the "
            f"first difference; it says {worst[2]!r} where the target says {worst[1]!r}",
            remedy="serve the very weights that target.path names, or leave the comparison out (compare_greedy: false)",
        )


def without_stop(ids: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Ids without the stop token that may be at their end."""
    return list(ids[:-1] if ids and ids[-1] in stop_ids else ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids, special tokens and white space as they are."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _same_text(one: str, other: str) -> bool:
    """Whether texts agree but for white space at the ends, and for a character that is cut in two at the end."""
    first, second = (text.strip().rstrip("\ufffd").strip() for text in (one, other))
    shorter, longer = sorted((first, second), key=len)
    return longer.startswith(shorter) and len(longer) - len(shorter) <= 2


def _start(ids: Sequence[int]) -> str:
    return f"{list(ids[:12])}{' ...' if len(ids) > 12 else ''}"
