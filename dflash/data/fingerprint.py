"""What determines a data set's content, as hashes: equal fingerprints mean that nothing needs to be built again.

The **recipe** is everything that determines the samples except which sources they come from; it names a data set's folder.
A **unit** is one source built by one recipe. A data set is a recipe, its bucket edges and a list of units.

Files count by name and content, synthetic conversations by the text that the generator really gives, so neither a moved
folder nor an edited generator is mistaken. What only schedules, observes or forbids (workers, stores, `answers.batch_size`,
how many bad rows are tolerated) does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.config import Config, TargetConfig
from dflash.data.journal import JOURNAL_SCHEMA_VERSION
from dflash.data.tokenizer import template_sha256, tokenizer_sha256
from dflash.records.data import DATA_SCHEMA_VERSION

_WITHOUT_CONTENT = frozenset(
    {
        "source", "files", "num_conversations", "seed", "store", "runner", "runner_address", "workers", "reader", "bad_rows",
        "max_bad_frac", "answers", "num_buckets",
    }
)  # fmt: skip
"""Keys of the data section that do not count, or that count only in part (see `_settings`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the samples of any source; small and free of places, so it can travel.

    Attributes:
        fingerprint: SHA-256 (hex) over all of it.
        target_id: for people; not part of the fingerprint, which has the target's own.
    """

    fingerprint: str
    target_id: str
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    vocab_size: int
    mask_token_id: int


def make_recipe(
    config: Config, *, tokenizer: PreTrainedTokenizerBase, target_fingerprint: str, vocab_size: int, mask_token_id: int
) -> Recipe:
    """The recipe that a configuration describes."""
    hashes = {"tokenizer": tokenizer_sha256(tokenizer), "template": template_sha256(tokenizer)}
    fingerprint = _sha256(
        {
            "version": DATA_SCHEMA_VERSION,
            "settings": _settings(config),
            "target": target_fingerprint,
            "vocab_size": vocab_size,
            "mask_token_id": mask_token_id,
            **hashes,
        }
    )
    return Recipe(
        fingerprint=fingerprint,
        target_id=target_id(config.target),
        target_fingerprint=target_fingerprint,
        tokenizer_sha256=hashes["tokenizer"],
        template_sha256=hashes["template"],
        vocab_size=vocab_size,
        mask_token_id=mask_token_id,
    )


def unit_fingerprint(recipe_fingerprint: str, *, label: str, sha256: str, limit: int | None) -> str:
    """SHA-256 (hex) that names the unit of one source: its label, its content, and how many conversations it gives."""
    return _sha256({"recipe": recipe_fingerprint, "label": label, "sha256": sha256, "limit": limit})


def data_set_fingerprint(recipe_fingerprint: str, *, edges: Sequence[int], units: Sequence[str]) -> str:
    """SHA-256 (hex) that names one version of a data set."""
    return _sha256({"recipe": recipe_fingerprint, "edges": list(edges), "units": list(units)})


def answers_fingerprint(config: Config, *, tokenizer: PreTrainedTokenizerBase, target_fingerprint: str) -> str:
    """SHA-256 (hex) over what determines the target's answer to given prompt ids: the identity of a journal.

    Buckets, limits of length and the choice of conversations do not count, so changing them generates nothing anew.
    """
    data = config.data
    return _sha256(
        {
            "version": JOURNAL_SCHEMA_VERSION,
            "target": target_fingerprint,
            "tokenizer": tokenizer_sha256(tokenizer),
            "template": template_sha256(tokenizer),
            "template_flags": data.template_flags,
            "seed": data.seed if data.answers.temperature > 0 else None,
        }
    )


def target_id(target: TargetConfig) -> str:
    """How a manifest names the target: a hub name as it is, a folder by its own name."""
    path = PurePosixPath(target.path)
    return path.name if path.is_absolute() or target.path.startswith(".") else target.path


def _settings(config: Config) -> Mapping[str, Any]:
    data = config.data
    settings: dict[str, Any] = data.model_dump(mode="json", exclude=set(_WITHOUT_CONTENT))
    answers = data.answers
    settings["answers"] = answers.model_dump(mode="json", exclude={"batch_size", "server"}) if answers.regenerate else None
    if answers.regenerate and answers.temperature > 0:
        settings["seed"] = data.seed
    if isinstance(data.bucket_edges_tokens, str):
        settings["num_buckets"] = data.num_buckets
        settings["pad_multiple_tokens"] = config.plan.pad_multiple_tokens
    return settings


def _sha256(payload: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
