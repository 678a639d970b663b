"""Text of a model card: Markdown and YAML in which no name from a configuration, a file or a data set can do anything.

Invariant: whatever comes from outside goes through `md` or `yaml_text`: no line break, no markup, no link, no HTML, no new key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from dflash.evaluate.text import clean_text

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~$&])")


def md(text: object) -> str:
    """A value as plain text inside Markdown, table cells included."""
    escaped = _MARKUP.sub(r"\\\1", clean_text(str(text)))
    return escaped.replace("://", r":\/\/").replace("www.", r"www\.")


def yaml_text(value: str) -> str:
    """A value as a double-quoted YAML scalar, which JSON's strings are."""
    return json.dumps(clean_text(value), ensure_ascii=False)


def front_matter(fields: Mapping[str, str | Sequence[str]]) -> str:
    """The card's YAML header, with its fences."""
    lines = ["---"]
    for key, value in fields.items():
        if isinstance(value, str):
            lines.append(f"{key}: {yaml_text(value)}")
        else:
            lines += [f"{key}:", *(f"- {yaml_text(item)}" for item in value)]
    return "\n".join([*lines, "---"])


def md_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; its header is our own text, its cells are escaped."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(md(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def md_list(facts: Mapping[str, object]) -> str:
    """Facts as a two-column table without a header of its own."""
    return md_table(("", ""), list(facts.items()))
