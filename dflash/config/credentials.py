"""Credentials have no place in a configuration: it is copied into the run's folder, into MLflow and into Prefect's database.

Invariant: a configuration that was accepted holds no password in an address, no signed query and no value under a key that names a
secret, so no file that is made from one can tell it. Hard decision: refused, not masked. A masked address would be written into
`config.yaml` and fail at the resume; the environment carries secrets to every process already. A message never repeats the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dflash.errors import ConfigError


def _any_case(pattern: str) -> str:
    """A pattern whose lower-case letters stand for themselves alone, in either case: a schema has no flag for that."""
    return re.sub("[a-z]", lambda letter: f"[{letter[0].upper()}{letter[0]}]", pattern)


_NAMES_A_VARIABLE = "_env"
_SECRET_NAME = _any_case(
    "(password|passwd|passphrase|authorization|auth[ _-]?string|(client[ _-]?)?secret|credentials?"
    "|(api|access|auth|secret|private|session|security|bearer|refresh|hf)[ _-]?(key|token))"
)
_TOKEN = _any_case("token")  # alone: `mask_token` is a word of the vocabulary
SECRET_KEY = re.compile(rf"(^|[._-]){_SECRET_NAME}($|[._-])|(^|\.){_TOKEN}$")
"""Keys that name a secret; `api_key_env`, the name of a variable, is none of them (see `_NAMES_A_VARIABLE`)."""

# `scheme://user:password@host`, also where the password holds a slash or an @ (a port is none), `https://token@host`,
# `...?signature=...`
_IN_ADDRESS = (
    r"://[^/@\s]*:[^/@\s]*@",
    r"://[^/@:\[\s]*:(?![0-9]*/)[^\s\"',]*@",
    rf"{_any_case('https?')}://[^/@\s]+@",
    rf"://[^?#\s]*[?#][^\s]*{_any_case('(sig|signature|token|key|password|passwd|pwd|auth|secret)')}=[^\s]",
)
# `data.my_password=x`, `data.template_flags={my_password: x}`
_UNDER_SECRET_KEY = (
    rf"^[^=]*[._-]{_SECRET_NAME}([._-][^=]*)?(?<!{_NAMES_A_VARIABLE})=",
    rf"[{{,\n]\s*[\"']?([\w.-]*[._-])?{_SECRET_NAME}([._-][\w.-]*)?(?<!{_NAMES_A_VARIABLE})[\"']?\s*:",
    rf"^[^=]*\.{_TOKEN}=",
    rf"[{{,\n]\s*[\"']?{_TOKEN}[\"']?\s*:",
)
CREDENTIAL_PATTERNS = (*_IN_ADDRESS, *_UNDER_SECRET_KEY)
"""What no `section.key=value` may match, for a schema that refuses it before it is stored anywhere."""

_CREDENTIALS = re.compile("|".join(_IN_ADDRESS))
# A password may hold a slash, an @ or a quote: everything up to the last @ is taken for it. `host:5000/` is no user.
_USER_OF_ADDRESS = re.compile(r"(?<=//)([^/@:\[\s]*:(?!\d*/)\S*|[^/@\s\"']+)@")
_REMEDY = (
    "take it out of the file and give it in the environment: MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and _PASSWORD; "
    "the variable that api_key_env names; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. See docs/security.md"
)


def require_no_credentials(tree: Any, *, origin: str) -> None:
    """Refuse plain values, as YAML gives them, that hold a credential.

    Raises:
        ConfigError: names the key, never the value.
    """
    for key, what in _found("", tree, set()):
        raise ConfigError(f"{origin}: {key} holds {what}, which a configuration must not", remedy=_REMEDY)


def hide_credentials(text: str) -> str:
    """`text`, or a word in its place if it holds a credential."""
    return "(hidden)" if _CREDENTIALS.search(text) else text


def hide_users(text: str) -> str:
    """`text` with `***` for users and passwords in its addresses: for words of others, where `(hidden)` would hide too much."""
    return _USER_OF_ADDRESS.sub("***@", text)


def _found(path: str, value: Any, above: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if _CREDENTIALS.search(value):
            yield path, "a password, a token or a signature in an address"
        return
    if not isinstance(value, dict | list) or id(value) in above:
        return
    above.add(id(value))  # an alias of YAML makes one object stand at many places; once is enough
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, str) and _CREDENTIALS.search(key):
            yield path or "its top", "a key that is an address with a password, a token or a signature"
        name = f"{path}.{key}" if path else str(key)
        names_secret = isinstance(key, str) and SECRET_KEY.search(key) and not key.endswith(_NAMES_A_VARIABLE)
        if names_secret and inner is not None and not isinstance(inner, bool):
            yield name, "a value under a key that names a secret"
        yield from _found(name, inner, above)
