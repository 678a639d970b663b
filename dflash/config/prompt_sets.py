"""Prompt sets of an evaluation: sets known by name, and any file of prompts."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from dflash.config.base import Section

KnownSetName = Literal["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"]
KNOWN_SETS: tuple[str, ...] = get_args(KnownSetName)

PROMPT_PLACE = "{prompt}"


class PromptSetConfig(Section):
    """One set of held-out prompts; written as a bare name where only the name is set."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description=f"Label in the results; {', '.join(KNOWN_SETS)} are known by name and need no file.",
    )
    file: str | None = Field(
        None, description="Prompts (JSON lines, JSON or Parquet; local or `s3://`); from the hub if absent, for known sets."
    )
    revision: str | None = Field(None, min_length=1, description="Commit of the hub's data set; the one recorded here if absent.")
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="Expected SHA-256 of the file; another one is refused, none is only recorded."
    )
    template: str = Field(
        PROMPT_PLACE,
        description="Text of the first user turn; the prompt takes the place of `{prompt}` (an instruction around it).",
    )
    language: str | None = Field(None, min_length=1, description="Language of rows that name none; the known set's if absent.")
    domain: str | None = Field(None, min_length=1, description="Domain of rows that name none; the known set's if absent.")

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.file is None and self.name not in KNOWN_SETS:
            raise ValueError(f"prompt set {self.name!r} has no file and is none of {', '.join(KNOWN_SETS)}")
        if self.file is not None and self.revision is not None:
            raise ValueError(f"prompt set {self.name!r} has a file: its revision would be ignored")
        if PROMPT_PLACE not in self.template:
            raise ValueError(f"template of prompt set {self.name!r} lacks {PROMPT_PLACE}")
        return self
