"""Reading, overriding, validating and writing configurations.

Errors name the offending key, its value and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dflash.config.credentials import hide_credentials, require_no_credentials
from dflash.config.tree import CONFIG_SCHEMA_VERSION, Config
from dflash.config.yaml_text import UnreadableYamlError, read_yaml
from dflash.errors import ConfigError

_DEEPEST_KEY = 16

_SHORT = reprlib.Repr()
"""Values in messages: a few lines of aliases can stand for a value larger than any memory."""
_SHORT.maxstring = _SHORT.maxother = 120


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides and validate.

    Args:
        path: YAML file.
        overrides: dotted assignments; values are parsed as YAML.

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown or a value is not allowed.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"configuration file {file} does not exist", remedy="give the path of a YAML file, e.g. configs/demo.yaml"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}", remedy="save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}", remedy="check its permissions") from error
    return parse_config(text, origin=str(file), overrides=overrides)


def parse_config(text: str, *, origin: str, overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, for text that is already in memory; `origin` names it in errors."""
    try:
        tree = read_yaml(text)
    except UnreadableYamlError as error:
        raise ConfigError(f"{origin} is not valid YAML: {error}", remedy="mend the line that the message names") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} holds no mapping at the top", remedy="start with `target:` and `data:` sections")
    version = tree.get("schema_version", CONFIG_SCHEMA_VERSION)
    if version != CONFIG_SCHEMA_VERSION:
        raise ConfigError(
            f"{origin} has schema_version {version!r}, this code reads {CONFIG_SCHEMA_VERSION}",
            remedy="see CHANGELOG.md for what changed and set the version after adapting the file",
        )
    for override in overrides:
        _apply_override(tree, override)
    require_no_credentials(tree, origin=origin)
    return _validated(tree, origin)


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def section_hash(*sections: BaseModel) -> str:
    """SHA-256 (hex) of sections' values: the identity of what they determine."""
    payload = json.dumps([section.model_dump(mode="json") for section in sections], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(payload.encode()).hexdigest()


def flat_params(config: Config) -> dict[str, str]:
    """The configuration as flat `section.key -> text`, for experiment tracking."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = json.dumps(value) if isinstance(value, list | dict) else str(value)

    walk("", config.model_dump(mode="json"))
    return flat


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts) or len(parts) > _DEEPEST_KEY:
        shown = hide_credentials(override)
        raise ConfigError(f"override {shown!r} is not of the form section.key=value", remedy="write e.g. train.epochs=2")
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"override {hide_credentials(override)!r}: {part!r} is a value, not a section",
                remedy="see docs/configuration.md for the keys",
            )
        node = child
    try:
        node[parts[-1]] = read_yaml(raw)
    except UnreadableYamlError as error:
        raise ConfigError(
            f"override {hide_credentials(key)!r} has a value that is not YAML: {error}", remedy="quote the value"
        ) from error


def _validated(tree: dict[str, Any], origin: str) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(item) for item in error.errors(include_url=False)]
        raise ConfigError(
            f"{origin} is not a valid configuration:\n  " + "\n  ".join(lines),
            remedy="mend the keys named above; docs/configuration.md lists all of them",
        ) from error


def _describe(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    dotted = ".".join(location) or "(top)"
    if item["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
        return f"{dotted}: unknown key; {hint}"
    message = item["msg"].removeprefix("Value error, ")
    shown = item.get("input")
    value = "" if isinstance(shown, dict) else f" (got {_SHORT.repr(shown)})"
    return f"{dotted}: {message}{value}"


def _keys_at(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in (each for each in path if not each.isdigit()):  # the place in a list of sections names no key
        field = model.model_fields.get(part)
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        nested = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)
