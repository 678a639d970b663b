"""`infra/backup` with programs that only pretend to be PostgreSQL's: what it promises of its own folder and command lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BACKUP = Path(__file__).parents[3] / "infra/backup"

FAKES = {
    "pg_dump": 'test "$PGDATABASE" != "$BROKEN" || exit 1\n'
    'for each; do case $each in --file=*) echo rows >"${each#--file=}" ;; esac; done',
    "pg_restore": 'case "$*" in --list*) grep -q rows "$2" ;; *) echo "SELECT 1;" ;; esac',
    "psql": 'case "$*" in *count*) echo 0 ;; *alembic*) exit 1 ;; esac',
}


class Programs:
    """Fake programs that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in FAKES.items():
            program = folder / name
            program.write_text(f'#!/bin/sh\necho "{name} as $PGUSER:$PGPASSWORD: $*" >>"$0.calls"\n{body}\n', encoding="utf-8")
            program.chmod(0o755)

    def call(self, program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "PREFECT_DB_PASSWORD": "hidden1", "MLFLOW_DB_PASSWORD": "hidden2"}
        command = [str(BACKUP / program), *map(str, arguments)]
        return subprocess.run(command, env=env | environment, capture_output=True, text=True, check=False)

    def calls(self, name: str) -> list[str]:
        file = self.folder / f"{name}.calls"
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "bin").mkdir()
    return Programs(tmp_path / "bin")


def test_a_backup_that_fails_has_no_name_and_takes_no_older_one_with_it(programs: Programs, tmp_path: Path) -> None:
    kept = tmp_path / "backups"
    whole = Path(programs.call("backup", kept, DFLASH_BACKUPS_KEEP="1").stdout.strip())
    assert {path.name for path in whole.iterdir()} == {
        "prefect.dump", "mlflow.dump", "mlflow_auth.dump", "schema-versions", "SHA256SUMS",
    }  # fmt: skip
    assert programs.call("backup", kept, DFLASH_BACKUPS_KEEP="1", BROKEN="mlflow_auth").returncode != 0
    assert [path.name for path in kept.iterdir() if path.name != ".lock"] == [whole.name]
    newer = Path(programs.call("backup", kept, DFLASH_BACKUPS_KEEP="1").stdout.strip())
    assert [path.name for path in kept.iterdir() if path.name != ".lock"] == [newer.name]


def test_passwords_go_by_the_environment_and_to_their_owner_alone(programs: Programs, tmp_path: Path) -> None:
    programs.call("backup", tmp_path / "backups")
    owners = [line.split(": ")[0] for line in programs.calls("pg_dump")]
    assert owners == ["pg_dump as prefect:hidden1", "pg_dump as mlflow:hidden2", "pg_dump as mlflow:hidden2"]
    assert not [line for name in FAKES for line in programs.calls(name) if "hidden" in line.split(": ", 1)[1]]


def test_a_damaged_or_unfinished_backup_reaches_no_database(programs: Programs, tmp_path: Path) -> None:
    whole = Path(programs.call("backup", tmp_path / "backups").stdout.strip())
    before = programs.calls("psql")
    (whole / "mlflow.dump").write_text("other rows\n", encoding="utf-8")
    damaged = programs.call("restore", whole, "--replace")
    assert (damaged.returncode, "damaged: nothing was touched" in damaged.stderr) == (1, True)
    (whole / "SHA256SUMS").unlink()
    assert "no finished backup" in programs.call("restore", whole, "--replace").stderr
    assert programs.calls("psql") == before


def test_a_database_is_restored_in_one_transaction(programs: Programs, tmp_path: Path) -> None:
    whole = programs.call("backup", tmp_path / "backups").stdout.strip()
    done = programs.call("restore", whole, "mlflow")
    assert (done.returncode, done.stdout) == (0, f"restored mlflow from {whole}\n"), done.stderr
    last = programs.calls("psql")[-1]
    assert last.startswith("psql as mlflow:hidden2: ")
    assert "--single-transaction" in last
    assert "ON_ERROR_STOP=1" in last
