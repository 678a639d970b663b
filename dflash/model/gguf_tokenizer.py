"""The tokenizer inside a GGUF file as a Hugging Face fast tokenizer.

Invariant: ids are the file's own, control tokens never come out of ordinary text, and the text is cut into pieces as
the file's `tokenizer.ggml.pre` says. The last point is why the generic loader of transformers is not used: it cuts every
vocabulary like GPT-2, and a model whose digits stand alone (SmolLM2) then sees other tokens wherever spaces precede a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflash.errors import TargetError

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of the format: control tokens are special, user-defined ones are matched as a whole but are text."""


def gguf_tokenizer(metadata: Mapping[str, Any], *, origin: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a GGUF file's metadata (field name -> value).

    Raises:
        TargetError: the vocabulary is not byte-level BPE, or its way of cutting text is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TargetError(
            f"{origin} has a {kind!r} vocabulary, only byte-level BPE ('gpt2') is converted",
            remedy="use the model's Hugging Face folder instead",
        )
    cutting = metadata.get("tokenizer.ggml.pre", "default")
    if cutting not in _PRE_TOKENIZERS:
        raise TargetError(
            f"{origin} cuts text by the rule {cutting!r}; known here: {', '.join(sorted(_PRE_TOKENIZERS))}",
            remedy="use the model's Hugging Face folder instead",
        )
    tokens: list[str] = required(metadata, "tokenizer.ggml.tokens", origin)
    merges = [tuple(merge.split(" ")) for merge in required(metadata, "tokenizer.ggml.merges", origin)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = _PRE_TOKENIZERS[cutting](bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    core.decoder = decoders.ByteLevel()
    core.add_tokens(_added_tokens(tokens, required(metadata, "tokenizer.ggml.token_type", origin)))
    bos = token_id(metadata, "bos")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(metadata, key) for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=required(metadata, "llama.context_length", origin),
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Id of a named special token (`bos`, `eos`, `unknown`, `padding`), or None if the file names none."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if value is None else int(value)


def required(metadata: Mapping[str, Any], key: str, origin: Path) -> Any:
    """Value of a metadata field; raises TargetError if the file lacks it."""
    if key not in metadata:
        raise TargetError(f"{origin} lacks the metadata field {key!r}", remedy="convert the model to GGUF again")
    return metadata[key]


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _gpt2(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)


def _digits_alone(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2(add_prefix_space)])


# llama.cpp's names of the rules: `smollm` is one digit at a time, then GPT-2's expression on what stands between.
_PRE_TOKENIZERS: dict[str, Callable[[bool], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_alone,
    "starcoder": _digits_alone,
}
