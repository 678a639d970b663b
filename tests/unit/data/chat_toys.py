"""Small real tokenizers with chat templates of several families, and a toy target that answers by rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash.data.render import ChatRenderer
from dflash.records import Conversation, Message

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Puts a system turn of its own first when there is none.
CHATML_DEFAULT_SYSTEM = (
    """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"""
    + CHATML
)

# Contents are trimmed, the end-of-turn token is followed by nothing.
HEADERS = """\
{{- '<|bos|>' }}
{%- for m in messages %}{{ '<|head|>' ~ m.role ~ '<|/head|>\\n\\n' ~ m.content | trim ~ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# No system turn, the assistant is called model.
TURNS = """\
{{- '<|bos|>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}
{%- for m in messages %}{% set who = 'model' if m.role == 'assistant' else m.role %}
{{- '<|turn|>' ~ who ~ '\\n' ~ m.content | trim ~ '<|/turn|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>model\\n' }}{% endif %}"""

# Drops the reasoning of all but the last answer; can put an empty reasoning block into the prompt.
THINKING = """\
{%- for m in messages %}
{%- set said = m.content %}
{%- if m.role == 'assistant' and not loop.last %}{% set said = said.split('</think>')[-1].lstrip() %}{% endif %}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' and loop.last and '</think>' not in said %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- said ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# Ordinary text only: no token marks the end of a turn.
PLAIN = """\
{%- for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

SPECIAL = (
    "<|pad|>",
    "<|mask|>",
    "<|bos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|turn|>",
    "<|/turn|>",
)
MASK_ID = SPECIAL.index("<|mask|>")

_CORPUS = ("the assistant and the user talk about numbers and the weather", "What is 2 + 3? 2 + 3 = 5.", "a\n\nb\n\nc\n\n") * 8


# A digit, line breaks together, a word or other signs with the space before them, spaces.
_PIECES = Regex(r"\p{N}|[\n]+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s")


@cache
def toy_tokenizer(template: str, end: str = "<|im_end|>", *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 rows; any text survives it; `\\n\\n` is one token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer=trainer)
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token="<|pad|>", clean_up_tokenization_spaces=False, chat_template=template
    )


def renderer(template: str, *, supervise: str = "all", supervise_reasoning: bool = True, **flags: object) -> ChatRenderer:
    """A renderer over a toy tokenizer."""
    return ChatRenderer(toy_tokenizer(template), supervise=supervise, supervise_reasoning=supervise_reasoning, template_flags=flags)


def talk(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    """Messages that alternate user, assistant, ..., after an optional system turn."""
    turns = tuple(Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents))
    return turns if system is None else (Message("system", system), *turns)


def conversation(identifier: str, *contents: str) -> Conversation:
    """A conversation of alternating turns."""
    return Conversation(id=identifier, messages=talk(*contents), origin=f"toy:{identifier}", kind="toy")


@dataclass
class ToyTarget:
    """Answers a prompt by a rule on its last user turn, and remembers what it was asked.

    `N words` is answered with N words; `loop` never stops; `mute` stops at once; anything else is answered by its length.
    """

    tokenizer: PreTrainedTokenizerFast
    max_new_tokens: int = 24
    asked: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def answer(self, prompt: str) -> str:
        question = prompt.rsplit("<|im_start|>user\n", 1)[1].partition("<|im_end|>")[0]
        count, _, unit = question.partition(" ")
        if unit == "words" and count.isdigit():
            return " ".join(["yes"] * int(count))
        return "" if question == "mute" else f"{len(prompt)} characters"

    def __call__(self, prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        self.batches.append(len(prompts))
        self.keys += keys
        return [self._ids(self.tokenizer.decode(ids)) for ids in prompts]

    def _ids(self, prompt: str) -> list[int]:
        self.asked.append(prompt)
        if "<|im_start|>user\nloop<|im_end|>" in prompt:
            return self.tokenizer(" and" * self.max_new_tokens)["input_ids"][: self.max_new_tokens]
        return self.tokenizer(self.answer(prompt) + "<|im_end|>")["input_ids"][: self.max_new_tokens]


def supervised_texts(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """The decoded runs of supervised tokens."""
    runs: list[list[int]] = []
    for place, token in enumerate(ids):
        if not mask[place]:
            continue
        if place == 0 or not mask[place - 1]:
            runs.append([])
        runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]
