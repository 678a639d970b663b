"""What must never reach an experiment store: credentials inside URIs, and values of keys that name a secret.

A configuration with credentials is refused (`config.credentials`), so this guards what comes from elsewhere: a store's
`user:password@` in the environment, a signed URL's query in an error, a tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflash.config.credentials import SECRET_KEY, hide_users

REDACTED = "***"

_QUERY = re.compile(r"(?P<uri>[a-z][a-z0-9+.-]*://[^?\s\"']*)\?[^\s\"']*", re.IGNORECASE)


def redact_text(text: str) -> str:
    """`text` without user names, passwords and queries inside URIs."""
    return _QUERY.sub(rf"\g<uri>?{REDACTED}", hide_users(text))


def redact_params(params: Mapping[str, str]) -> dict[str, str]:
    """Parameters that are safe to publish: URIs cleaned, values of keys that name a secret hidden."""
    return {key: REDACTED if SECRET_KEY.search(key) else redact_text(value) for key, value in params.items()}
