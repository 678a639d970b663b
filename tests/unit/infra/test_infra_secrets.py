"""`infra/make-secrets`: random where nothing is given, the same for ever after, for nobody else to read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.env_files import values_of

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"


def make(folder: Path, **environment: str) -> tuple[dict[str, str], dict[str, str]]:
    server, client = folder / "server.env", folder / "client.env"
    command = [INFRA / "make-secrets", server, client]
    subprocess.run(command, env={"PATH": "/usr/bin:/bin"} | environment, check=True)
    assert [path.stat().st_mode & 0o777 for path in (server, client)] == [0o600, 0o600]
    return values_of(server), values_of(client)


def secret_names() -> set[str]:
    return {name for name, value in values_of(INFRA / ".env.example").items() if not value}


def test_every_empty_value_becomes_a_secret_of_its_own(tmp_path: Path) -> None:
    server, _ = make(tmp_path)
    secrets = {name: server[name] for name in secret_names()}
    assert len(secrets) >= 7
    assert len(set(secrets.values())) == len(secrets)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in secrets.values())
    (tmp_path / "other").mkdir()
    other, _ = make(tmp_path / "other")
    assert not {server[name] for name in secrets} & {other[name] for name in secrets}


def test_clients_get_what_the_servers_ask_for_and_no_database(tmp_path: Path) -> None:
    server, client = make(tmp_path)
    assert client["PREFECT_API_AUTH_STRING"] == server["PREFECT_SERVER_API_AUTH_STRING"]
    assert client["MLFLOW_TRACKING_PASSWORD"] == server["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert client["AWS_SECRET_ACCESS_KEY"] == server["AWS_SECRET_ACCESS_KEY"]
    for database in ("POSTGRES_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"):
        assert server[database] not in (tmp_path / "client.env").read_text(encoding="utf-8")


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    before = [(tmp_path / name).read_bytes() for name in ("server.env", "client.env")]
    make(tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("server.env", "client.env")] == before


def test_a_persons_own_values_stay_and_reach_what_is_derived_from_them(tmp_path: Path) -> None:
    first, _ = make(tmp_path)
    file = tmp_path / "server.env"
    edited = file.read_text(encoding="utf-8").replace("DFLASH_DB_HOST=127.0.0.1", "DFLASH_DB_HOST=db.example.org")
    file.write_text(
        edited.replace(f"MLFLOW_DB_PASSWORD={first['MLFLOW_DB_PASSWORD']}", "MLFLOW_DB_PASSWORD=mine") + "OF_MY_OWN=1\n"
    )
    second, _ = make(tmp_path)
    assert second["OF_MY_OWN"] == "1"
    assert second["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg://mlflow:mine@db.example.org:5432/mlflow"
    assert second["PREFECT_DB_PASSWORD"] == first["PREFECT_DB_PASSWORD"]


def test_a_secret_that_is_taken_out_is_made_anew_everywhere(tmp_path: Path) -> None:
    first, _ = make(tmp_path)
    file = tmp_path / "server.env"
    file.write_text(
        re.sub(r"^PREFECT_API_PASSWORD=.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8"
    )
    second, client = make(tmp_path)
    assert second["PREFECT_API_PASSWORD"] != first["PREFECT_API_PASSWORD"]
    assert client["PREFECT_API_AUTH_STRING"] == f"dflash:{second['PREFECT_API_PASSWORD']}"


def test_ports_come_from_the_environment_and_secrets_do_not(tmp_path: Path) -> None:
    server, client = make(tmp_path, DFLASH_PREFECT_PORT="4299", AWS_ACCESS_KEY_ID="somebody-elses")
    assert client["PREFECT_API_URL"] == "http://127.0.0.1:4299/api"
    assert "somebody-elses" not in (*server.values(), *client.values())
    _, client = make(tmp_path, DFLASH_PREFECT_PORT="4300")
    assert client["PREFECT_API_URL"] == "http://127.0.0.1:4300/api"


def test_real_files_are_never_committed() -> None:
    ignored = (INFRA / ".gitignore").read_text(encoding="utf-8").split()
    assert {".env", "client.env", "backups/"} <= set(ignored)
    for name in (".env.example", "client.env.example"):
        assert not re.search(r"=[0-9a-f]{16,}", (INFRA / name).read_text(encoding="utf-8"))
