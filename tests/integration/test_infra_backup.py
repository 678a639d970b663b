"""Backup and restore on a real PostgreSQL: what goes in comes out, whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.postgres import postgres_bin, running_postgres

ROOT = Path(__file__).parents[2]
BACKUP = ROOT / "infra/backup"
DATABASES = ("prefect", "mlflow", "mlflow_auth")

pytestmark = pytest.mark.skipif(postgres_bin() is None, reason="PostgreSQL is not installed")


@dataclass
class Server:
    """A PostgreSQL with the three databases."""

    folder: Path
    port: int
    env: dict[str, str] = field(default_factory=dict)

    def call(self, *command: str | Path, said: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env=self.env | environment,
            input=said,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ask(self, database: str, query: str, *, user: str = "admin", rows: int = 0) -> str:
        """Answer to SQL; `:rows` in it is replaced."""
        place = ["-h", "127.0.0.1", "-p", str(self.port), "-U", user, "-d", database]
        done = self.call("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-v", f"rows={rows}", *place, said=query)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def backup(self) -> Path:
        done = self.call(BACKUP / "backup", self.folder / "backups")
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def restore(self, backup: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call(BACKUP / "restore", backup, *arguments)

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "backups").iterdir() if not path.name.startswith("."))


EMPTY = "DROP SCHEMA public CASCADE; CREATE SCHEMA public; ALTER SCHEMA public OWNER TO pg_database_owner;"
FLOWS = r"""
    CREATE EXTENSION IF NOT EXISTS pg_trgm;
    CREATE TABLE alembic_version (version_num varchar PRIMARY KEY);
    INSERT INTO alembic_version VALUES ('abc123');
    CREATE TABLE flow (id serial PRIMARY KEY, name text);
    CREATE INDEX ON flow USING gin (name gin_trgm_ops);
    CREATE TABLE run (id serial PRIMARY KEY, flow int REFERENCES flow);
    INSERT INTO flow (name) SELECT E'a\\.\n\t''é' || n FROM generate_series(1, :rows) AS n;
    INSERT INTO run (flow) SELECT id FROM flow;
"""
NUMBERS = "DROP TABLE IF EXISTS t; CREATE TABLE t AS SELECT n FROM generate_series(1, :rows) AS n;"
OWNERS = "SELECT datname, pg_get_userbyid(datdba) FROM pg_database WHERE datname ~ '^(prefect|mlflow)' ORDER BY 1"
MAY_MORE = "SELECT rolsuper OR rolcreatedb OR rolcreaterole FROM pg_roles WHERE rolname = 'prefect'"


def fill(server: Server, *, rows: int) -> None:
    """Tables as the services have them: an extension, a sequence, a foreign key, a schema version, odd characters."""
    server.ask("prefect", EMPTY)
    server.ask("prefect", FLOWS, user="prefect", rows=rows)
    for database in ("mlflow", "mlflow_auth"):
        server.ask(database, NUMBERS, user="mlflow", rows=rows)


def content(server: Server) -> list[str]:
    flows = server.ask("prefect", "SELECT count(*), min(name), max(name), (SELECT count(*) FROM run) FROM flow", user="prefect")
    return [flows, *(server.ask(database, "SELECT sum(n) FROM t", user="mlflow") for database in ("mlflow", "mlflow_auth"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binaries = postgres_bin()
    assert binaries is not None
    cluster = tmp_path_factory.mktemp("postgres")
    with running_postgres(cluster, superuser="admin") as address:
        port = urlsplit(address).port
        assert port is not None
        env = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "DFLASH_POSTGRES_PORT": str(port),
            "PREFECT_DB_PASSWORD": "forprefect",
            "MLFLOW_DB_PASSWORD": "formlflow",
        }
        made = Server(tmp_path_factory.mktemp("kept"), port, env)
        # As on a cluster that logs every statement.
        superuser = {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "admin", "PGOPTIONS": "-c log_statement=all"}
        for _ in range(2):  # the second time brings up to date what is there
            done = made.call(ROOT / "infra/services/create-databases", **superuser)
            assert done.returncode == 0, done.stderr
        log = (cluster / "log").read_text()
        assert "statement: " in log
        assert "forprefect" not in log
        yield made


@pytest.fixture(autouse=True)
def filled(server: Server) -> None:
    fill(server, rows=50)
    shutil.rmtree(server.folder / "backups", ignore_errors=True)


def test_each_role_owns_its_databases_and_no_other(server: Server) -> None:
    owners = server.ask("postgres", OWNERS)
    assert owners.split() == ["mlflow|mlflow", "mlflow_auth|mlflow", "prefect|prefect"]
    assert server.ask("postgres", MAY_MORE) == "f"
    assert server.ask("postgres", "SELECT has_database_privilege('prefect', 'mlflow', 'CONNECT')") == "f"
    stored = server.ask("postgres", "SELECT rolpassword FROM pg_authid WHERE rolname = 'prefect'")
    assert stored.startswith("SCRAM-SHA-256$")


def test_what_was_backed_up_comes_back_and_again(server: Server) -> None:
    before = content(server)
    kept = server.backup()
    assert (kept / "schema-versions").read_text(encoding="utf-8").splitlines()[1:] == ["prefect abc123", "mlflow -"]
    assert kept.stat().st_mode & 0o077 == 0
    assert (kept / "prefect.dump").stat().st_mode & 0o077 == 0
    fill(server, rows=70)
    server.ask("prefect", "CREATE TABLE of_a_newer_version (n int)", user="prefect")
    refused = server.restore(kept)
    assert refused.returncode == 1
    assert "--replace overwrites them" in refused.stderr
    for _ in range(2):
        done = server.restore(kept, "--replace")
        assert done.returncode == 0, done.stderr
        assert content(server) == before
    assert server.ask("prefect", "SELECT to_regclass('of_a_newer_version') IS NULL") == "t"
    assert server.ask("prefect", "SELECT nextval('flow_id_seq') > 50", user="prefect") == "t", "new rows get new numbers"
    assert server.ask("prefect", "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE relname = 'flow'") == "prefect"
    assert (server.backup() / "SHA256SUMS").is_file(), "and it can be backed up again"


@pytest.mark.full
def test_one_database_alone(server: Server) -> None:
    kept = server.backup()
    fill(server, rows=70)
    after = content(server)
    assert server.restore(kept, "--replace", "mlflow").returncode == 0
    assert content(server) == [after[0], "1275", after[2]]


def test_a_damaged_backup_touches_nothing(server: Server) -> None:
    kept = server.backup()
    fill(server, rows=70)
    before = content(server)
    dump = kept / "mlflow.dump"
    data = bytearray(dump.read_bytes())
    data[len(data) // 2] ^= 1
    dump.write_bytes(data)
    refused = server.restore(kept, "--replace")
    assert refused.returncode == 1
    assert "damaged: nothing was touched" in refused.stderr
    (kept / "SHA256SUMS").unlink()
    assert "no finished backup" in server.restore(kept, "--replace").stderr
    assert content(server) == before


def test_a_restore_that_fails_leaves_the_database_as_it_was(server: Server) -> None:
    kept = server.backup()
    fill(server, rows=70)
    before = content(server)
    broken = server.folder / "bin" / "pg_restore"
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("#!/bin/sh\necho 'CREATE TABLE half (n int); SELECT 1/0;'\n", encoding="utf-8")
    broken.chmod(0o755)
    done = server.call(BACKUP / "restore", kept, "--replace", PATH=f"{broken.parent}:{server.env['PATH']}")
    broken.unlink()
    assert done.returncode != 0
    assert content(server) == before
    assert server.ask("prefect", "SELECT to_regclass('half') IS NULL") == "t"


@pytest.mark.full
def test_a_database_in_use_is_not_replaced(server: Server) -> None:
    kept = server.backup()
    command = ["psql", "-X", "-q", "-h", "127.0.0.1", "-p", str(server.port), "-U", "mlflow", "-d", "mlflow"]
    user = subprocess.Popen(command, env=server.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdin is not None
    assert user.stdout is not None
    try:
        user.stdin.write("\\echo connected\n")
        user.stdin.flush()
        assert user.stdout.readline() == "connected\n"
        refused = server.restore(kept, "--replace")
        assert refused.returncode == 1
        assert "mlflow has 1 connections: stop the servers first" in refused.stderr
    finally:
        user.communicate("\\q\n")


@pytest.mark.full
def test_only_whole_backups_have_a_name_and_the_newest_are_kept(server: Server) -> None:
    server.env["DFLASH_BACKUPS_KEEP"] = "2"
    try:
        names = [server.backup().name for _ in range(3)]
    finally:
        del server.env["DFLASH_BACKUPS_KEEP"]
    assert len(server.kept()) == 2
    assert names[-1] in server.kept()
    failed = server.call(BACKUP / "backup", server.folder / "backups", DFLASH_POSTGRES_PORT="1")
    assert failed.returncode != 0
    assert len(server.kept()) == 2
    assert not list((server.folder / "backups").glob(".unfinished.*"))
