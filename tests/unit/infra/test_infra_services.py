"""The small programs of `infra/services` and `infra/host`, each on its own, without a server."""

from __future__ import annotations

import configparser
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from infra.host.p2p_check import check_copies, pattern, wrong_bytes
from infra.host.p2p_check import main as p2p_main
from infra.services import add_mlflow_user
from infra.services.add_mlflow_user import add_user
from infra.services.add_mlflow_user import main as add_user_main
from infra.services.make_buckets import make_buckets
from tests.support.s3_server import BUCKET, point_to, s3_server

ROOT = Path(__file__).parents[3]
SERVICES = ROOT / "infra/services"

OBEDIENT = """
import signal, sys
def save(*_):
    open(sys.argv[1], "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
PARENT = """
import os, subprocess, sys
env = os.environ | {{"PREFECT__FLOW_RUN_ID": "1"}}
commands = [[sys.executable, "-c", *call] for call in {calls!r}]
children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True) for command in commands]
for child in children: child.stdout.readline()
print(*(child.pid for child in children), flush=True)
for child in children: child.wait()
sys.stdin.read()
"""


class Family:
    """A parent with children in sessions of their own, as a worker has its flow runs."""

    def __init__(self, *calls: list[str], **variables: str) -> None:
        program = [sys.executable, "-c", PARENT.format(calls=list(calls))]
        self.parent = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        assert self.parent.stdout is not None
        self.children = [int(pid) for pid in self.parent.stdout.readline().split()]

    def end(self) -> None:
        for pid in self.children:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, 9)
        self.parent.kill()
        self.parent.communicate()


def end_flow_runs(family: Family, limit_s: int) -> str:
    command = [SERVICES / "end-flow-runs", str(family.parent.pid), str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_flow_runs_are_asked_once_and_waited_for_and_the_worker_is_left(tmp_path: Path) -> None:
    family = Family([OBEDIENT, str(tmp_path / "a")], [OBEDIENT, str(tmp_path / "b")])
    try:
        said = end_flow_runs(family, 30)
        assert sorted(int(line.split()[4]) for line in said.splitlines()) == sorted(family.children)
        assert [(tmp_path / name).read_text(encoding="utf-8") for name in "ab"] == ["saved", "saved"]
        assert family.parent.poll() is None, "the worker still has to record how they ended"
    finally:
        family.end()


def test_a_flow_run_that_will_not_end_is_left_to_the_caller_after_the_limit() -> None:
    family = Family([STUBBORN])
    try:
        end_flow_runs(family, 1)
        assert Path(f"/proc/{family.children[0]}").exists(), "killing is systemd's business"
    finally:
        family.end()


def test_a_worker_that_died_by_itself_has_no_pid_and_nobody_elses_children_are_asked() -> None:
    done = subprocess.run([SERVICES / "end-flow-runs", "", "60"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def mlflow(tmp_path: Path) -> Path:
    """A folder with a `mlflow` that only says how it was called."""
    fake = tmp_path / "mlflow"
    fake.write_text('#!/bin/sh\nenv >"$0.env"; echo "$@"\n', encoding="utf-8")
    fake.chmod(0o755)
    return tmp_path


def start_mlflow(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "DFLASH_BIN": str(folder), "DFLASH_MLFLOW_STATE": str(folder)} | environment
    return subprocess.run([SERVICES / "mlflow"], env=env, capture_output=True, text=True, check=False)


def test_mlflow_listens_on_loopback_and_has_no_secret_on_its_command_line(mlflow: Path) -> None:
    secrets = {
        "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://mlflow:hidden1@db/mlflow",
        "MLFLOW_AUTH_DATABASE_URI": "postgresql+psycopg://mlflow:hid%20den2@db/mlflow_auth",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "hidden3-and-longer",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "hidden4",
    }
    said = start_mlflow(mlflow, **secrets).stdout
    assert said.split() == ["server", "--host", "127.0.0.1", "--port", "5000", "--workers", "1", "--app-name", "basic-auth"]
    file = mlflow / "basic_auth.ini"
    assert file.stat().st_mode & 0o777 == 0o600
    read = configparser.ConfigParser()
    read.read(file)
    assert read["mlflow"]["database_uri"] == secrets["MLFLOW_AUTH_DATABASE_URI"]
    assert "hidden3" not in file.read_text(encoding="utf-8")
    assert f"MLFLOW_AUTH_CONFIG_PATH={file}" in (mlflow / "mlflow.env").read_text(encoding="utf-8")


def test_mlflow_without_a_password_has_no_auth_and_half_an_auth_is_refused(mlflow: Path) -> None:
    assert "basic-auth" not in start_mlflow(mlflow).stdout
    half = start_mlflow(mlflow, MLFLOW_AUTH_ADMIN_PASSWORD="hidden-and-longer")
    assert half.returncode != 0
    assert "needed by basic auth" in half.stderr


def test_a_unit_without_an_s3_store_keeps_artifacts_in_a_folder(mlflow: Path) -> None:
    bucket = "s3://dflash-mlflow"
    for said, kept in (("", bucket), ("/var/lib/dflash-mlflow/artifacts", "/var/lib/dflash-mlflow/artifacts")):
        start_mlflow(mlflow, MLFLOW_ARTIFACTS_DESTINATION=bucket, DFLASH_MLFLOW_ARTIFACTS=said)
        assert f"MLFLOW_ARTIFACTS_DESTINATION={kept}\n" in (mlflow / "mlflow.env").read_text(encoding="utf-8")


class _Mlflow(BaseHTTPRequestHandler):
    answer: tuple[int, dict[str, Any]] = (200, {})
    asked: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        status, answer = self.answer
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def accounts() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Mlflow)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_further_account_is_asked_for_as_the_administrator(accounts: str) -> None:
    _Mlflow.answer = (200, {"user": {"username": "ada"}})
    assert add_user(accounts, admin=("boss", "secret"), name="ada", password="long-enough-one") is None
    path, authorization, body = _Mlflow.asked[-1]
    assert path == "/api/2.0/mlflow/users/create"
    assert authorization == "Basic Ym9zczpzZWNyZXQ="
    assert body == {"username": "ada", "password": "long-enough-one"}


def test_a_refusal_is_one_line_without_the_servers_inside(accounts: str) -> None:
    _Mlflow.answer = (400, {"message": "User exists\n[parameters: {'password_hash': 'scrypt:...'}]"})
    assert add_user(accounts, admin=("boss", "secret"), name="ada", password="long-enough-one") == "User exists"


def test_no_server_and_no_variables_are_said_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = add_user("http://127.0.0.1:9", admin=("boss", "secret"), name="ada", password="long-enough-one")
    assert said == "the server at MLFLOW_TRACKING_URI does not answer (ConnectError)"
    monkeypatch.setattr(sys, "argv", ["add_mlflow_user.py", "ada"])
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert add_user_main() == 2
    assert "client.env" in capsys.readouterr().err


def test_buckets_are_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as endpoint:
        point_to(monkeypatch, endpoint)
        assert make_buckets([BUCKET, "fresh"]) == [f"bucket {BUCKET} is there", "bucket fresh made"]
        assert make_buckets([BUCKET, "fresh"]) == [f"bucket {BUCKET} is there", "bucket fresh is there"]


def test_copies_between_devices_are_compared_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert check_copies([cpu, cpu, cpu], nbytes=4096) == []
    real = torch.Tensor.to

    def zeros_arrive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        arrived = real(tensor, *args, **kwargs)
        return torch.zeros_like(arrived) if kwargs.get("copy") else arrived

    monkeypatch.setattr(torch.Tensor, "to", zeros_arrive)
    expected = int((pattern(4096, cpu, seed=20) != 0).sum())
    assert wrong_bytes(cpu, cpu, nbytes=4096) == expected
    assert len(check_copies([cpu, cpu], nbytes=4096)) == 2


def test_one_device_has_nothing_to_copy_between(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["p2p_check.py", "--device", "cpu", "--count", "1"])
    assert p2p_main() == 0
    assert "nothing to copy" in capsys.readouterr().out


@pytest.mark.full
def test_the_sum_over_processes_arrives() -> None:
    command = [sys.executable, ROOT / "infra/host/p2p_check.py", "--device", "cpu", "--count", "2", "--bytes", "65536"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every byte arrived" in done.stdout


@pytest.mark.parametrize("service", ["prefect", "mlflow"])
def test_a_port_that_another_program_holds_is_named_and_nothing_is_started(service: str, accounts: str, tmp_path: Path) -> None:
    taken, variable = accounts.rpartition(":")[2], f"DFLASH_{service.upper()}_PORT"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # bound, and nobody listens: as good as free
        ports = dict.fromkeys(("DFLASH_PREFECT_PORT", "DFLASH_MLFLOW_PORT"), str(other.getsockname()[1])) | {variable: taken}
        env = os.environ | ports | {"DFLASH_LOCAL_DIR": str(tmp_path / "local"), "DFLASH_BIN": str(Path(sys.executable).parent)}
        done = subprocess.run([ROOT / "infra/local/up"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"port {taken}" in done.stderr
    assert variable in done.stderr
    assert not (tmp_path / "local").exists()


def test_a_service_carries_the_mark_by_which_what_it_leaves_is_known(tmp_path: Path) -> None:
    fake = tmp_path / "prefect"
    fake.write_text('#!/bin/sh\nenv >"$0.env"\n', encoding="utf-8")
    fake.chmod(0o755)
    places = {"DFLASH_LOCAL_DIR": str(tmp_path / "local"), "DFLASH_RUNS_DIR": str(tmp_path / "runs"), "DFLASH_BIN": str(tmp_path)}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ports = dict.fromkeys(("DFLASH_PREFECT_PORT", "DFLASH_MLFLOW_PORT"), str(other.getsockname()[1]))
        done = subprocess.run(
            [ROOT / "infra/local/up"], env=os.environ | ports | places, capture_output=True, text=True, check=False
        )
    assert "prefect-server does not answer" in done.stderr
    assert f"DFLASH_LOCAL_SERVICE={tmp_path}/local/prefect-server" in (tmp_path / "prefect.env").read_text().splitlines()


def told(folder: Path, **environment: str) -> list[str]:
    """What `up` would go by in this environment: passwords or none, and Prefect's port."""
    script = f'source {ROOT}/infra/local/common.sh; echo "${{DFLASH_LOCAL_AUTH:-}}"; echo "$PREFECT_PORT"'
    env = {"PATH": "/usr/bin:/bin", "DFLASH_LOCAL_DIR": str(folder)} | environment
    return subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_stack_that_is_brought_back_in_a_new_shell_is_the_one_that_went_down(tmp_path: Path) -> None:
    fake, folder = tmp_path / "prefect", tmp_path / "local"
    fake.write_text("#!/bin/sh\n", encoding="utf-8")
    fake.chmod(0o755)
    places = {"PATH": "/usr/bin:/bin", "DFLASH_LOCAL_DIR": str(folder), "DFLASH_BIN": str(tmp_path)}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        asked = dict.fromkeys(("DFLASH_PREFECT_PORT", "DFLASH_MLFLOW_PORT"), port) | {"DFLASH_LOCAL_AUTH": "1"}
        asked["DFLASH_RUNS_DIR"] = str(tmp_path / "runs")
        first = subprocess.run([ROOT / "infra/local/up"], env=places | asked, capture_output=True, text=True, check=False)
        again = subprocess.run([ROOT / "infra/local/up"], env=places, capture_output=True, text=True, check=False)
    assert "as last time" not in first.stdout
    assert "DFLASH_LOCAL_AUTH DFLASH_PREFECT_PORT DFLASH_MLFLOW_PORT DFLASH_RUNS_DIR" in again.stdout
    assert (folder / "settings").stat().st_mode & 0o777 == 0o600, "an address may hold a password"
    assert told(folder) == ["1", port]
    assert told(folder, DFLASH_LOCAL_AUTH="", DFLASH_PREFECT_PORT="4299") == ["", "4299"]
    assert told(tmp_path / "another") == ["", "4200"]


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize(
    ("name", "mark", "lives"),
    [("mlflow", "mlflow", False), ("mlflow", "prefect-server", True), ("mlflow", "", True), ("worker-train", "worker-train", True)],
)
def test_what_a_killed_server_has_left_is_ended_and_a_training_or_a_strangers_process_is_not(
    name: str, mark: str, lives: bool, tmp_path: Path
) -> None:
    family = Family([OBEDIENT, str(tmp_path / "saved")], **({"DFLASH_LOCAL_SERVICE": f"{tmp_path}/{mark}"} if mark else {}))
    try:
        (tmp_path / f"{name}.pid").write_text(f"{family.parent.pid} {start_of(family.parent.pid)}\n")
        end_left_behind(name, tmp_path)
        assert all(map(alive, family.children)), "its service is not dead"
        family.parent.kill()
        family.parent.wait()
        end_left_behind(name, tmp_path)
        assert [alive(pid) for pid in family.children] == [lives]
    finally:
        family.end()


def test_stopping_also_asks_what_a_dead_worker_has_left_to_stop_and_save(tmp_path: Path) -> None:
    family = Family([OBEDIENT, str(tmp_path / "saved")], DFLASH_LOCAL_SERVICE=f"{tmp_path}/worker-train")
    try:
        for started in (start_of(family.parent.pid), "1"):  # a pid file that tells of somebody else makes no worker a stranger's
            (tmp_path / "worker-train.pid").write_text(f"{family.parent.pid} {started}\n")
            shared_function("end_abandoned worker-train", tmp_path)
            assert all(map(alive, [family.parent.pid, *family.children])), "its worker lives: end-flow-runs asks it"
        family.parent.kill()
        family.parent.wait()
        env = os.environ | {"DFLASH_LOCAL_DIR": str(tmp_path)}
        said = subprocess.run([ROOT / "infra/local/down"], env=env, capture_output=True, text=True, check=True).stdout
        assert f"({family.children[0]}) to stop and save" in said
        assert (tmp_path / "saved").read_text(encoding="utf-8") == "saved"
    finally:
        family.end()


def end_left_behind(name: str, folder: Path) -> None:
    shared_function(f"end_left_behind {name}", folder)


def shared_function(call: str, folder: Path) -> None:
    script = f"source {ROOT}/infra/local/common.sh; {call}"
    subprocess.run(["bash", "-euc", script], env=os.environ | {"DFLASH_LOCAL_DIR": str(folder)}, capture_output=True, check=True)


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]


def test_a_url_that_does_not_answer_is_not_waited_for_for_ever(accounts: str) -> None:
    gone = subprocess.run([SERVICES / "await-http", f"{accounts}/nothing", "1"], capture_output=True, text=True, check=False)
    assert gone.returncode == 1
    assert "does not answer" in gone.stderr


def test_upgrades_show_no_password_on_a_command_line(tmp_path: Path) -> None:
    for name in ("prefect", "mlflow", "python"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\necho "{name} $@ with $PGPASSWORD"\n', encoding="utf-8")
        fake.chmod(0o755)
    env = {
        "PATH": "/usr/bin:/bin",
        "DFLASH_BIN": str(tmp_path),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://prefect:hidden1@db/prefect",
        "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://mlflow:hidden2@db:5432/mlflow",
        "MLFLOW_AUTH_DATABASE_URI": "sqlite:////state/accounts.db",
    }
    said = subprocess.run([SERVICES / "upgrade-databases"], env=env, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "prefect server database upgrade -y with ",
        "mlflow db upgrade postgresql+psycopg://mlflow@db:5432/mlflow with hidden2",
        "python -m mlflow.server.auth db upgrade --url sqlite:////state/accounts.db with hidden2",
        "databases are up to date",
    ]


def test_a_password_that_a_person_types_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "x")
    taken: list[str] = []
    monkeypatch.setattr(add_mlflow_user, "add_user", lambda *_place, password, **_who: taken.append(password))
    monkeypatch.setattr(sys, "argv", ["add_mlflow_user.py", "ada"])
    monkeypatch.setattr("getpass.getpass", lambda _prompt: "typed")
    for tty in (True, False):
        given = io.StringIO("piped\n")
        monkeypatch.setattr(given, "isatty", lambda tty=tty: tty)
        monkeypatch.setattr(sys, "stdin", given)
        assert add_mlflow_user.main() == 0
    assert taken == ["typed", "piped"]
    assert "typed" not in capsys.readouterr().out
