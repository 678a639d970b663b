"""Secrets to plant into an environment, and a search for them in everything that a run has left behind."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq

PLANTED = {
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDKEY0001",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret/0002",
    "AWS_SESSION_TOKEN": "planted-aws-session-0003",
    "PREFECT_API_AUTH_STRING": "admin:planted-prefect-0004",
    "MLFLOW_TRACKING_USERNAME": "planted-mlflow-user-0005",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password-0006",
    "HF_TOKEN": "hf_planted0007token",
    "OPENAI_API_KEY": "sk-planted-0008",
}
"""One of each kind that the documents tell people to put into the environment."""


def spellings(secret: str) -> set[bytes]:
    """A secret as it may stand in a file: plain, in an address, in a header, escaped in JSON."""
    parts = {secret, secret.rpartition(":")[2]}
    return {
        spelt.encode()
        for part in parts
        for spelt in (part, quote(part, safe=""), part.replace("/", "\\/"), base64.b64encode(part.encode()).decode().rstrip("="))
    }


def find_planted(root: Path, *, secrets: dict[str, str]) -> list[str]:
    """`file: variable` of every secret that a file below `root` holds, or that its name holds."""
    wanted = {name: spellings(secret) for name, secret in secrets.items()}
    found = []
    for file in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        contents = [str(file).encode(), *_contents(file)]
        found += [f"{file}: {name}" for name, forms in wanted.items() if any(form in data for form in forms for data in contents)]
    return found


def _contents(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        table = pq.read_table(file)
        yield str(table.schema.metadata).encode()
        for name, column in zip(table.column_names, table.columns, strict=True):
            if "string" in str(column.type):
                yield f"{name}: {column.to_pylist()}".encode()
    if data.startswith(b"\x1f\x8b"):
        yield gzip.decompress(data)
