"""What must never reach an experiment store: credentials inside URIs, and values of keys that name a secret.

The configuration has no secret keys of its own (credentials come from the environment), so this guards what a
user may put into free text: a store's `user:password@`, a signed URL's query, a template variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "***"

_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s\"']+@", re.IGNORECASE)
_QUERY = re.compile(r"(?P<uri>[a-z][a-z0-9+.-]*://[^?\s\"']*)\?[^\s\"']*", re.IGNORECASE)
_SECRET_KEY = re.compile(
    r"(^|[._-])(password|passwd|secret|credentials?|(api|access|auth|secret|private)[_-]?(key|token))($|[._-])"
)


def redact_text(text: str) -> str:
    """`text` without user names, passwords and queries inside URIs."""
    return _QUERY.sub(rf"\g<uri>?{REDACTED}", _USERINFO.sub(rf"\g<scheme>{REDACTED}@", text))


def redact_params(params: Mapping[str, str]) -> dict[str, str]:
    """Parameters that are safe to publish: URIs cleaned, values of keys that name a secret hidden."""
    return {key: REDACTED if _SECRET_KEY.search(key.lower()) else redact_text(value) for key, value in params.items()}
