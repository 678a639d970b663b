"""A further MLflow account: `add_mlflow_user.py NAME`, the password on standard input; MLFLOW_TRACKING_* say where and as whom.

It may read every experiment and change its own; what else it may do is granted in MLflow's administration pages.
"""

from __future__ import annotations

import getpass
import os
import sys

import httpx

TIMEOUT_S = 30
NEEDED = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def add_user(server: str, *, admin: tuple[str, str], name: str, password: str) -> str | None:
    """Make an account on an MLflow server with basic auth; returns None, or why the server refused."""
    wanted = {"username": name, "password": password}
    try:
        answer = httpx.post(f"{server}/api/2.0/mlflow/users/create", json=wanted, auth=admin, timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        return f"the server at MLFLOW_TRACKING_URI does not answer ({type(error).__name__})"
    if answer.is_success:
        return None
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    # Only the first line: the server may append its whole SQL statement, with the password's hash.
    return str(answer.json().get("message")).partition("\n")[0] if is_json else f"HTTP status {answer.status_code}"


def main() -> int:
    """Command line; returns the exit code."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} NAME  (the password on standard input)", file=sys.stderr)
        return 2
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        print(f"{', '.join(missing)}: load the client.env that infra/make-secrets wrote", file=sys.stderr)
        return 2
    admin = (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"])
    # A person's typing is not shown; a pipe's line is read as it is.
    password = getpass.getpass("password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    refused = add_user(os.environ["MLFLOW_TRACKING_URI"], admin=admin, name=sys.argv[1], password=password)
    if refused is not None:
        print(f"no account {sys.argv[1]}: {refused}", file=sys.stderr)
        return 1
    print(f"made account {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
