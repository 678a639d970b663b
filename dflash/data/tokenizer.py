"""The target's tokenizer: loading, identity, the mask token and the stop tokens.

Invariant: the mask token is an existing row of the target's embedding and never the pad, eos or unknown token; there is no
fallback, because a silent one gives correct text and useless drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from dflash.config import TargetConfig
from dflash.errors import TargetError

Tokenizer = PreTrainedTokenizerBase
"""The type, for rooms that only pass one on."""

_GENERATION_REMEDY = "mend or remove its generation_config.json; without its eos ids answers might never end"


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        TargetError: it cannot be loaded, knows no character offsets, or has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.location,
            revision=target.revision,
            trust_remote_code=target.trust_remote_code,
            local_files_only=target.local_files_only,
        )
    except Exception as error:  # of any kind: the libraries check no file before they use it, and one raises nothing more special
        first_line = str(error).strip().split("\n")[0]
        raise TargetError(
            f"the tokenizer of target {target.location!r} cannot be loaded: {first_line or type(error).__name__}",
            remedy="check target.path: `demo`, a Hugging Face folder with tokenizer.json, or a hub name within reach",
        ) from error
    if not tokenizer.is_fast:
        raise TargetError(
            f"the tokenizer of target {target.location!r} gives no character offsets, which the loss masks are made from",
            remedy="convert it to tokenizer.json (a `fast` tokenizer)",
        )
    if not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer of target {target.location!r} has no chat template",
            remedy="use a chat model, or put its chat_template.jinja beside the tokenizer",
        )
    return tokenizer


def resolve_mask_token_id(target: TargetConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> int:
    """The id of the configured mask token.

    Args:
        target: names the token by text or by id.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding (may exceed the tokenizer's vocabulary).

    Returns:
        An id in 0..vocab_size-1. That the corpus never uses it is proven when the data is built.

    Raises:
        TargetError: no such token, or it is the pad, eos or unknown token.
    """
    if target.mask_token is not None:
        mask_id = tokenizer.get_vocab().get(target.mask_token)
        named = f"target.mask_token {target.mask_token!r}"
        if mask_id is None:
            raise TargetError(
                f"{named} is not in the vocabulary of {target.location!r}",
                remedy="name an existing token that the corpus never uses, or give target.mask_token_id",
            )
    else:
        mask_id = target.mask_token_id
        named = f"target.mask_token_id {mask_id}"
    if mask_id is None or not 0 <= mask_id < vocab_size:
        raise TargetError(
            f"{named} (id {mask_id}) is outside the target's {vocab_size} embedding rows",
            remedy=f"choose an existing row, 0..{vocab_size - 1}, that the corpus never uses",
        )
    for role in ("pad", "eos", "unk"):
        if getattr(tokenizer, f"{role}_token_id") == mask_id:
            raise TargetError(
                f"{named} (id {mask_id}) is the target's {role} token",
                remedy="choose another existing token that the corpus never uses: never pad, eos or unk",
            )
    return int(mask_id)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's eos and those of the target's generation configuration, sorted.

    Raises:
        TargetError: there is none, or the generation configuration cannot be read.
    """
    ids = {*token_ids(tokenizer.eos_token_id), *token_ids(_generation_eos(target))}
    if not ids:
        raise TargetError(
            f"target {target.location!r} names no eos token, so no answer would ever end",
            remedy="set eos_token_id in its generation_config.json",
        )
    return tuple(sorted(ids))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of everything that turns text into ids."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call with padding or truncation leaves these two behind: state of the last caller, not identity.
    tree.pop("padding", None)
    tree.pop("truncation", None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of the chat template's text."""
    return hashlib.sha256(str(tokenizer.get_chat_template()).encode()).hexdigest()


def _generation_eos(target: TargetConfig) -> int | list[int] | None:
    folder = Path(target.location)
    if folder.is_dir() and not (folder / "generation_config.json").is_file():
        return None
    try:
        generation = GenerationConfig.from_pretrained(
            target.location, revision=target.revision, local_files_only=target.local_files_only
        )
    except Exception as error:  # as above
        if isinstance(error.__cause__, EntryNotFoundError):  # the hub was asked and has no such file
            return None
        raise TargetError(
            f"the generation configuration of target {target.location!r} cannot be read: {error}", remedy=_GENERATION_REMEDY
        ) from error
    eos = generation.eos_token_id
    if eos is None or isinstance(eos, int) or (isinstance(eos, list) and all(isinstance(each, int) for each in eos)):
        return eos
    raise TargetError(
        f"the generation configuration of target {target.location!r} has the eos_token_id {eos!r}, neither a number nor several",
        remedy=_GENERATION_REMEDY,
    )


def token_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """Ids of a field that holds one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
