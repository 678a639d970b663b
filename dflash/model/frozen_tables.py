"""The target's embedding and head, read from its folder without loading the model.

Invariant: each table is found under exactly one name, whatever it is nested in (`model.embed_tokens`,
`model.language_model.embed_tokens`, ...); a tied target has no head of its own and its embedding stands for it.
The price: two tables of the vocabulary (2.5 GB each in bfloat16 at 248,320 x 5,120), read by memory map.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dflash.errors import DrafterError
from dflash.model.export_files import CONFIG_NAME, StoredTensor, read_json, read_tensor, stored_tensors

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_FOREIGN_PARTS = ("visual", "vision", "audio", "mtp")


def frozen_tables(folder: Path) -> dict[str, Tensor]:
    """The embedding and the head of a target.

    Args:
        folder: the target's Hugging Face folder, safetensors.

    Returns:
        `embed_tokens.weight` and `lm_head.weight`, each [V, D], in the target's own dtype.

    Raises:
        DrafterError: a table is missing, or there are several of them.
    """
    stored = stored_tensors(folder)
    embedding = _only(stored, EMBEDDING, folder)
    if embedding is None:
        raise DrafterError(
            f"{folder} holds no {EMBEDDING}",
            remedy="give the target as a Hugging Face folder of safetensors, or export another layout",
        )
    head = _only(stored, HEAD, folder)
    if head is None and not _tied(folder):
        raise DrafterError(
            f"{folder} holds no {HEAD} and its config does not tie it to the embedding", remedy="download the target again"
        )
    table = read_tensor(*embedding)
    return {EMBEDDING: table, HEAD: table if head is None else read_tensor(*head)}


def _only(stored: dict[str, StoredTensor], ending: str, folder: Path) -> tuple[str, StoredTensor] | None:
    found = [
        name
        for name in stored
        if (name == ending or name.endswith(f".{ending}")) and not any(part in _FOREIGN_PARTS for part in name.split("."))
    ]
    if len(found) > 1:
        raise DrafterError(f"{folder} holds several {ending}: {', '.join(found)}", remedy="report this target's names")
    return (found[0], stored[found[0]]) if found else None


def _tied(folder: Path) -> bool:
    raw = read_json(folder / CONFIG_NAME)
    inner = raw.get("text_config") or {}
    # Absent means tied: that is the library's own default.
    return bool(raw.get("tie_word_embeddings", inner.get("tie_word_embeddings", True)))
