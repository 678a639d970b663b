"""A PostgreSQL cluster of its own for a test, from the machine's packages (Debian's `postgresql`)."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg

from tests.support.stack import free_port


def postgres_bin() -> Path | None:
    """Folder of `initdb` and `postgres`; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    candidates = [Path(found).parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").is_file() and (folder / "postgres").is_file()), None)


@contextmanager
def running_postgres(folder: Path, *, superuser: str = "prefect") -> Iterator[str]:
    """Start a cluster on 127.0.0.1 and yield the address that Prefect wants; stop it at the end.

    PostgreSQL refuses to run as root, so root runs it as the user `postgres`, in a folder that this user can reach.
    """
    binaries = postgres_bin()
    assert binaries is not None
    data, port, user = folder / "data", free_port(), None
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres").pw_name
        shutil.chown(folder, user)
    for parent in folder.parents[:3]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):  # noqa: S108 - never that folder's own rights
            parent.chmod(0o755)
    make = [binaries / "initdb", "-D", data, "-A", "trust", "-U", superuser, "--no-sync"]
    done = subprocess.run(make, user=user, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    command = [
        binaries / "postgres",
        "-D",
        data,
        "-p",
        str(port),
        "-c",
        "listen_addresses=127.0.0.1",
        "-c",
        "fsync=off",
        "-k",
        str(folder),
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
    try:
        while not asyncio.run(_answers(port, superuser)):
            try:
                server.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError((folder / "log").read_text())
        yield f"postgresql+asyncpg://{superuser}@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(60)


async def _answers(port: int, user: str) -> bool:
    try:
        connection = await asyncpg.connect(host="127.0.0.1", port=port, user=user, database="postgres")
    except (OSError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True
