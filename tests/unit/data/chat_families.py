"""Chat templates that write the public formats of real model families, and one small tokenizer that knows their tokens.

The formats are facts (which tokens and line breaks stand where); the templates and the wording of tool instructions are ours.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash.data.render import ChatRenderer

# ChatML with tools, as Qwen2.5 writes it: a tool's answers share one user turn.
QWEN25 = """\
{%- if tools %}
{{- '<|im_start|>system' ~ '\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n\\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system' ~ '\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system' ~ '\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' ~ m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' ~ '\\n' }}{% endif %}"""

# Qwen3: reasoning is shown only behind the last question, and the last turn shows a block even if it is empty.
QWEN3 = """\
{%- set seen = namespace(question=-1) %}
{%- for m in messages[::-1] %}
{%- if seen.question < 0 and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set seen.question = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n\\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content %}{% set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.question and (loop.last or thought) %}
{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ said.lstrip('\\n') }}
{%- else %}{{ said }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or said %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# Llama 3: contents trimmed, one end-of-turn token with nothing behind it.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\\n\\n' ~ m['content'] | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# SmolLM2: ChatML that puts a system turn of its own first.
SMOLLM2 = """\
{%- for m in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' ~ m['role'] ~ '\\n' ~ m['content'] ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Gemma 2: no system turn, strict alternation, the assistant is called model.
GEMMA2 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set who = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' ~ who ~ '\\n' ~ m['content'] | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Gemma 3: the system turn is put before the first question.
GEMMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set prefix = messages[0]['content'] ~ '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
{%- set who = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' ~ who ~ '\\n' ~ (prefix if loop.first else '') ~ m['content'] | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

TEMPLATES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "smollm2": SMOLLM2,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_BOS = {"llama3": "<|begin_of_text|>", "gemma2": "<bos>", "gemma3": "<bos>"}
_CORPUS = ("the user asks and the model answers that the weather is fine", "2 + 3 = 5, so 7.", "a\n\nb\n\n") * 8
_PIECES = Regex(r"\p{N}|[\n]+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s")


@cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with every family's tokens and the template of one; any text survives it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(_CORPUS, trainer=trainer)
    core.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_BOS.get(family),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATES[family],
    )


def family_renderer(family: str, *, supervise: str = "all", supervise_reasoning: bool = True, **flags: object) -> ChatRenderer:
    """A renderer of one family."""
    return ChatRenderer(
        family_tokenizer(family), supervise=supervise, supervise_reasoning=supervise_reasoning, template_flags=flags
    )
