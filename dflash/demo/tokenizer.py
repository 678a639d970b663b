"""The demo target's tokenizer: byte-level BPE of 512 rows, digits alone, ChatML turns.

Invariant: special tokens are never produced from ordinary text of the corpus, so `<|mask|>` is an existing embedding row
that no training text uses; it is the drafter's mask token. All 256 bytes are in the vocabulary: any text round-trips.
Hard decision: no merge crosses a digit, a line break or a word border, and no word carries the space before it. A word is
then one token wherever it stands, and a tiny target copies it from its prompt by copying that token (with "Ana" and
" Ana" as different tokens it would have to learn a translation). The price is one token for every space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash.data.synthetic import SyntheticConversation

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

VOCAB_SIZE = 512
MAX_POSITIONS = 1024
"""Longest sequence that the target's configuration admits; it is trained on sequences of up to 256 tokens."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# One digit; a word, always without the space before it, so that a word is the same token wherever it stands; line breaks
# with the indentation after them; punctuation with the spaces around it; any other space.
_PIECES = Regex(r"\p{N}|\p{L}+|\n+ *| ?[^\s\p{L}\p{N}]+ ?|\s")


def _training_texts(conversations: Iterable[SyntheticConversation]) -> Iterator[str]:
    """Yield what stands between the special tokens: role lines and contents."""
    for conversation in conversations:
        for role, content in conversation.messages:
            yield f"{role}\n"
            yield content


def train_tokenizer(conversations: Iterable[SyntheticConversation]) -> PreTrainedTokenizerFast:
    """Train the BPE merges on conversations and return a tokenizer with the chat template.

    Returns a tokenizer of exactly `VOCAB_SIZE` rows, or fewer if the corpus runs out of pairs; ids 0..3 are special.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_training_texts(conversations), trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, MASK],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into an existing folder."""
    tokenizer.save_pretrained(str(folder))
