"""`infra/systemd/`: systemd accepts the units, they stop a training as its supervisor needs, and they are walled in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from dflash.train.processes import STOP_GRACE_S

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra/systemd"
UNITS = sorted(path.name for path in FOLDER.iterdir())
SERVICES = [name for name in UNITS if name.endswith(".service")]
WORKERS = ["dflash-worker-train.service", "dflash-worker-health.service", "dflash-health-served.service"]
SERVERS = ["dflash-prefect-server.service", "dflash-mlflow.service"]
EXPOSURE = dict.fromkeys([*SERVERS, "dflash-backup.service"], 1.5) | dict.fromkeys(WORKERS, 2.5) | {WORKERS[0]: 4.0}
"""Highest exposure that `systemd-analyze security` may give, of 10 (9.6 without hardening). No list of calls fits CUDA."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([A-Za-z]+)=(.*)", line):
            found[match.group(1)].append(match.group(2))
    return found


def seconds(text: str) -> int:
    return int(text.removesuffix("h")) * 3600 if text.endswith("h") else int(text)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as infra/host/setup would install them for this checkout."""
    folder = tmp_path_factory.mktemp("units")
    for name in UNITS:
        text = (FOLDER / name).read_text(encoding="utf-8")
        text = text.replace("/opt/dflash-pipeline/.venv/bin", str(Path(sys.executable).parent)).replace(
            "/opt/dflash-pipeline", str(ROOT)
        )
        # The driver's programs are on GPU hosts only.
        (folder / name).write_text(re.sub(r"/usr/bin/nvidia-\w+", "/usr/bin/true", text), encoding="utf-8")
    return folder


@needs_systemd
def test_systemd_accepts_every_unit(rendered: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *(rendered / name for name in UNITS)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "dflash" in line]
    assert done.returncode == 0, done.stderr
    assert ours == []


@needs_systemd
@pytest.mark.parametrize("name", EXPOSURE)
def test_a_unit_is_walled_in(rendered: Path, name: str) -> None:
    threshold = str(round(EXPOSURE[name] * 10))
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={threshold}", str(rendered / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at files")
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_ends_its_flow_runs_before_itself_and_signals_no_rank(name: str) -> None:
    unit = settings(name)
    (stop,) = unit["ExecStop"]
    assert stop.split()[0].endswith("infra/services/end-flow-runs")
    assert stop.split()[1] == "${MAINPID}", (
        "always one word: empty when the worker died by itself, and no other number in its place"
    )
    assert unit["KillMode"] == ["mixed"], "the first SIGTERM goes to the worker alone"
    assert unit["KillSignal"] == ["SIGTERM"]
    waits_s = int(stop.split()[2])
    assert seconds(unit["TimeoutStopSec"][0]) > waits_s, "systemd must not kill while flow runs are still ending"
    if "train" in name:
        assert waits_s > 2 * STOP_GRACE_S, "saving, and then reporting"


def test_the_training_worker_has_what_gpus_need() -> None:
    unit = settings("dflash-worker-train.service")
    assert unit["LimitMEMLOCK"] == ["infinity"]
    assert int(unit["LimitNOFILE"][0]) >= 1 << 20
    assert unit["TasksMax"] == ["infinity"]
    assert unit["OOMPolicy"] == ["continue"], "a rank that dies of memory must not take the worker with it"
    assert unit["DeviceAllow"] == ["char-nvidia* rw"]
    assert "PrivateDevices" not in unit
    assert "MemoryDenyWriteExecute" not in unit, "kernels are compiled at run time"
    assert "PrivateTmp" not in unit, "device locks are the machine's"
    assert "dflash-gpu.service" in unit["After"][0]


@pytest.mark.parametrize("name", SERVERS)
def test_servers_run_as_nobody_in_particular_on_loopback(name: str) -> None:
    unit = settings(name)
    assert unit["DynamicUser"] == ["yes"]
    assert unit["IPAddressAllow"] == ["localhost"]
    assert unit["IPAddressDeny"] == ["any"]
    assert unit["Restart"] == ["always"]
    assert unit["OOMScoreAdjust"] == ["-500"]
    assert unit["ExecStartPost"][0].split()[0].endswith("await-http"), "started means answering"


def test_no_unit_relies_on_an_s3_store_that_no_unit_is() -> None:
    settings_of_mlflow = settings("dflash-mlflow.service")
    assert "DFLASH_MLFLOW_ARTIFACTS=/var/lib/dflash-mlflow/artifacts" in settings_of_mlflow["Environment"]
    assert settings_of_mlflow["StateDirectory"] == ["dflash-mlflow"]
    for name in WORKERS:
        files = settings(name)["EnvironmentFile"]
        assert files.index("-/etc/dflash/s3.env") > files.index("/etc/dflash/client.env"), "the later one wins"


@pytest.mark.parametrize("name", UNITS)
def test_no_secret_stands_in_a_unit_or_on_a_command_line(name: str) -> None:
    unit = settings(name)
    for line in [*unit["Environment"], *unit["ExecStart"], *unit["ExecStartPost"]]:
        assert not re.search(r"PASSWORD|SECRET|AUTH_STRING|://[^ ]*@", line), line
    for file in unit["EnvironmentFile"]:
        expected = "server.env" if name in (*SERVERS, "dflash-backup.service") else ("client.env", "gpu.env", "s3.env")
        assert file.removeprefix("-").endswith(expected), "workers never see the databases' passwords"


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_forgets_the_other_servers_secrets(name: str) -> None:
    example = (ROOT / "infra/.env.example").read_text(encoding="utf-8")
    secrets = set(re.findall(r"^([A-Z_]+)=$", example, flags=re.MULTILINE))
    derived = set(re.findall(r"^([A-Z_]+)=.*\$\{[A-Z_]*PASSWORD\}", example, flags=re.MULTILINE))
    forgotten = set(settings(name)["UnsetEnvironment"][0].split())
    prefix, others = ("PREFECT_", "MLFLOW_") if "prefect" in name else ("MLFLOW_", "PREFECT_")
    assert {item for item in secrets | derived if item.startswith(others)} <= forgotten
    assert not {item for item in forgotten if item.startswith(prefix)}
    assert "POSTGRES_PASSWORD" in forgotten


def test_the_target_brings_up_everything_and_names_what_exists() -> None:
    wanted = settings("dflash.target")["Wants"][0].split()
    assert set(wanted) <= set(UNITS)
    assert {"dflash-prefect-server.service", "dflash-mlflow.service", "dflash-worker-train.service", "dflash-backup.timer"} <= set(
        wanted
    )
    served, worker = "dflash-health-served.service", "dflash-worker-health.service"
    assert settings(served)["Conflicts"] == [worker]
    assert settings(worker)["Conflicts"] == [served]
    assert not {served, worker} & set(wanted), (
        "the one that is enabled: two that conflict would be stopped by each other at a start"
    )
    assert all(settings(name)["WantedBy"] == ["dflash.target"] for name in (served, worker))
    installed = (ROOT / "infra/host/steps/services.sh").read_text(encoding="utf-8")
    assert all(name in installed for name in UNITS), "infra/host/setup installs every unit"


@pytest.mark.parametrize("name", SERVICES)
def test_programs_of_the_checkout_exist(name: str) -> None:
    for command in (line for key in ("ExecStart", "ExecStop", "ExecStartPost") for line in settings(name)[key]):
        program = command.split()[0]
        if program.startswith("/opt/dflash-pipeline/infra/"):
            file = ROOT / program.removeprefix("/opt/dflash-pipeline/")
            assert file.is_file()
            assert file.stat().st_mode & 0o111
