"""Benchmarks that are known by name: where they lie on the hub, and which of their columns hold what.

Invariant: a set is read at one commit of its hub repository, so that everybody reads the same bytes; what was read is hashed in
any case. Local files are read by the same columns, so a copy of the hub's file and one in the project's own shape both do.
The hard decision: prompts are given to the target as they stand, without an instruction around them ("reason step by step").
Published figures often come from instructed prompts; `template` of a set's configuration puts one around.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ID_COLUMNS = ("id", "task_id", "unique_id", "question_id", "prompt_id")
KIND_COLUMNS = ("kind", "source", "category", "subject")


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A benchmark on the hub.

    Attributes:
        repository: data set of the hub; `path`: the file in it; `revision`: the commit it is read at.
        texts: columns of which the first that is there holds the prompt, or its turns as a list.
        appended: column whose text (or lines) belongs behind the prompt; None if there is none.
        language: natural language of the prompts.
        domain: what they are about; None where each row tells by its category.
    """

    repository: str
    path: str
    revision: str
    texts: tuple[str, ...]
    appended: str | None
    language: str
    domain: str | None


KNOWN: Mapping[str, KnownSet] = {
    "gsm8k": KnownSet(
        "openai/gsm8k", "main/test-00000-of-00001.parquet", "740312add88f781978c0658806c59bc2815b9866",
        ("question", "prompt"), None, "en", "math",
    ),
    "math500": KnownSet(
        "HuggingFaceH4/MATH-500", "test.jsonl", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        ("problem", "prompt"), None, "en", "math",
    ),
    "humaneval": KnownSet(
        "openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        ("prompt",), None, "en", "code",
    ),
    "mbpp": KnownSet(
        "google-research-datasets/mbpp", "sanitized/test-00000-of-00001.parquet", "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        ("prompt", "text"), "test_list", "en", "code",
    ),
    "mt-bench": KnownSet(
        "HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", "e3a795c5e9a82ee40611c416b8a7786c73198991",
        ("turns", "prompt"), None, "en", None,
    ),
    "alpaca": KnownSet(
        "tatsu-lab/alpaca", "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet", "dce01c9b08f87459cf36a430d809084718273017",
        ("instruction", "prompt"), "input", "en", "instructions",
    ),
}  # fmt: skip
"""By name; commits and columns as their repositories' users publish them (no file was fetched where this was written)."""


def turns_of(row: Mapping[str, Any], known: KnownSet | None) -> list[str] | None:
    """User turns of a row that holds prompts without answers; None if it is a conversation of another shape.

    A row of any set may list its turns under `turns` (or, as texts, under `prompt`).
    """
    columns = ("turns", "prompt") if known is None else ("turns", *known.texts)
    value = next((row[column] for column in columns if row.get(column) is not None), None)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
        return None
    behind = None if known is None or known.appended is None else row.get(known.appended)
    lines = behind if isinstance(behind, list) else [behind]
    extra = "\n".join(line for line in lines if isinstance(line, str) and line.strip())
    return [f"{value[0].rstrip()}\n\n{extra}", *value[1:]] if extra else list(value)


def first_text(row: Mapping[str, Any], columns: tuple[str, ...]) -> str | None:
    """The first of the columns that holds a text or a number, as text."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return None
