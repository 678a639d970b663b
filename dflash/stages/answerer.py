"""The configured engine that answers prompts: the target in this process, or a server that runs it.

Invariant: opening costs nothing. The target is loaded, or the server asked, when the first answer is really missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash.config import Config
from dflash.data.answers import Answerer, InProcessAnswerer
from dflash.data.served import ServedAnswerer
from dflash.data.served_check import ServedTarget, probe_prompts
from dflash.data.served_protocol import Sampling
from dflash.data.tokenizer import Tokenizer, stop_token_ids
from dflash.errors import ConfigError
from dflash.model.generate import generate_batch
from dflash.model.target import Target, load_target

logger = logging.getLogger(__name__)


@contextmanager
def open_answerer(config: Config, tokenizer: Tokenizer) -> Iterator[Answerer]:
    """The engine that `data.answers` names; connections are closed at the end.

    Raises:
        ConfigError: a server is meant, but its address is missing.
        TargetError: the target has no stop token, or the server's address or key cannot be used.
    """
    data, answers = config.data, config.data.answers
    stop_ids = stop_token_ids(tokenizer, config.target)
    local = _LazyTarget(config, stop_ids)
    if answers.engine == "in_process":
        yield InProcessAnswerer(local.generate, batch_size=answers.batch_size, stop_ids=stop_ids)
        return
    if answers.server.url is None:
        raise ConfigError("data.answers.engine is `server`, but there is no server", remedy="set data.answers.server.url")
    names = (answers.server.model,) if answers.server.model else tuple(dict.fromkeys((config.target.path, config.target.location)))
    target = ServedTarget(
        names=names,
        needed_tokens=data.max_length_tokens - 2 + answers.max_new_tokens,
        tokenizer=tokenizer,
        probes=probe_prompts(tokenizer, data.template_flags),
        reference=local.generate if answers.server.compare_greedy else None,
    )
    sampling = Sampling(
        model=names[0],
        max_new_tokens=answers.max_new_tokens,
        temperature=answers.temperature,
        seed=data.seed,
        stop_ids=stop_ids,
    )
    with ServedAnswerer(answers.server, target=target, sampling=sampling) as served:
        yield served


class _LazyTarget:
    """Loads the target only when an answer is really missing."""

    def __init__(self, config: Config, stop_ids: tuple[int, ...]) -> None:
        self._config = config
        self._stop_ids = stop_ids
        self._target: Target | None = None

    def generate(self, prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        if self._target is None:
            torch.set_num_threads(self._config.cluster.torch_threads)
            device = torch.device(self._config.cluster.device)
            layers = self._config.drafter.target_layer_ids
            self._target = load_target(self._config.target, target_layer_ids=layers, device=device)
            logger.info("the target writes answers in this process (%d at a time)", self._config.data.answers.batch_size)
        answers = self._config.data.answers
        return generate_batch(
            self._target,
            prompts,
            keys=keys,
            max_new_tokens=answers.max_new_tokens,
            temperature=answers.temperature,
            seed=self._config.data.seed,
            stop_ids=self._stop_ids,
        )
