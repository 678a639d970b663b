"""What determines a data set's content, as hashes: equal fingerprints mean that nothing needs to be built again.

Files count by name and content, synthetic conversations by the text that the generator really gives, so neither a moved
folder nor an edited generator is mistaken. What changes only speed (`answers.batch_size`) does not count.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.config import Config, DataConfig
from dflash.data.conversations import configured_conversations
from dflash.data.journal import JOURNAL_SCHEMA_VERSION
from dflash.data.tokenizer import template_sha256, tokenizer_sha256
from dflash.records import to_json
from dflash.records.data import DATA_SCHEMA_VERSION
from dflash.storage import get_bytes


def data_fingerprint(config: Config, *, tokenizer: PreTrainedTokenizerBase, target_fingerprint: str) -> str:
    """SHA-256 (hex) over everything that determines a data set's samples.

    Raises:
        StorageError: a source file is missing.
    """
    source = source_description(config.data)
    return described_fingerprint(config, source, tokenizer=tokenizer, target_fingerprint=target_fingerprint)


def described_fingerprint(
    config: Config, source: dict[str, Any], *, tokenizer: PreTrainedTokenizerBase, target_fingerprint: str
) -> str:
    """Like `data_fingerprint`, for a source that is described already (see `source_description`)."""
    return _sha256(
        {
            "version": DATA_SCHEMA_VERSION,
            "data": config.data.model_dump(mode="json", exclude={"files": True, "answers": {"batch_size"}}),
            "source": source,
            "target": target_fingerprint,
            "tokenizer": tokenizer_sha256(tokenizer),
            "template": template_sha256(tokenizer),
            "mask": [config.target.mask_token, config.target.mask_token_id],
        }
    )


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


def source_description(data: DataConfig) -> dict[str, Any]:
    """Where the conversations come from, with hashes of their content.

    Raises:
        StorageError: a source file is missing.
    """
    if data.source == "files":
        files = [{"name": PurePosixPath(uri).name, "sha256": hashlib.sha256(get_bytes(uri)).hexdigest()} for uri in data.files]
        return {"kind": "files", "files": files}
    digest = hashlib.sha256()
    for conversation in configured_conversations(data):
        digest.update(to_json(conversation).encode())
    return {
        "kind": "synthetic",
        "seed": data.seed,
        "conversations": data.num_conversations,
        "sha256": digest.hexdigest(),
    }


def _sha256(payload: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
