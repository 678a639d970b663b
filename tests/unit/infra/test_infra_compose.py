"""`infra/compose.yaml`: what must hold of it whoever edits it; and its schema, where Docker's own tool can check it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
TEXT = (INFRA / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = {"postgres", "prefect", "mlflow", "s3"}
"""Services that stay; the others do one thing and end."""

PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line)


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        dockerfile = (INFRA / "image/Dockerfile").read_text(encoding="utf-8")
        assert (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == INFRA / "image/Dockerfile"
        (base,) = re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)
    else:
        base = service["image"]
    assert re.fullmatch(r"[a-z/]+:[0-9][a-z0-9.-]*@sha256:[0-9a-f]{64}", base), base


@pytest.mark.parametrize("name", SERVICES)
def test_published_ports_are_on_loopback_and_databases_have_none(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:"), port
    assert name != "postgres" or "ports" not in SERVICES[name]


@pytest.mark.parametrize("name", SERVICES)
def test_every_secret_is_required_and_none_is_written_down(name: str) -> None:
    for key, value in SERVICES[name].get("environment", {}).items():
        if re.search(r"PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY|CONNECTION_URL|_URI$", key):
            assert re.search(r"\$\{[A-Z_]+:\?", value), key
    command = " ".join(SERVICES[name].get("command", []))
    assert not re.search(r"PASSWORD|SECRET|AUTH", command), "a command line can be read by every user of the host"


def test_every_variable_has_a_line_in_the_example() -> None:
    example = {line.split("=")[0] for line in (INFRA / ".env.example").read_text(encoding="utf-8").splitlines() if "=" in line}
    assert set(re.findall(r"\$\{([A-Z0-9_]+)", TEXT)) <= example


@pytest.mark.parametrize("name", SERVICES)
def test_what_stays_is_watched_restarted_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["logging"]["options"]["max-size"]
    assert "no-new-privileges:true" in service["security_opt"]
    if name not in LASTING:
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    assert set(service["healthcheck"]) >= {"test", "interval", "timeout", "retries", "start_period"}
    assert service["healthcheck"]["test"][0] == "CMD"
    assert "stop_grace_period" in service


def test_nothing_starts_before_what_it_needs_is_ready() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_healthy" if needed in LASTING else "service_completed_successfully"
            assert how["condition"] == expected, f"{name} on {needed}"
    assert set(SERVICES["mlflow"]["depends_on"]) == {"databases", "buckets"}


def test_data_lie_in_named_volumes_and_networks_have_no_way_out() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {item for item in used if not item.startswith(".")} == set(COMPOSE["volumes"])
    for mount in (item for item in used if item.startswith("./") and item != "./backups"):
        assert (INFRA / mount).is_dir()
    assert COMPOSE["networks"]["databases"] == {"internal": True}
    assert SERVICES["postgres"]["networks"] == ["databases"]
    for service in SERVICES.values():
        assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_the_image_has_the_versions_that_the_tests_run_against() -> None:
    wanted = (INFRA / "image/requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [re.sub(r"\[.*", "", line) for line in wanted if line and not line.startswith("#")]
    assert {"mlflow", "prefect"} <= set(names)
    assert set(names) <= set(PINS), "every one of them is pinned"
    assert {"psycopg-binary", "Flask-WTF"} <= set(PINS), "and what their extras bring"
    sent = (INFRA / "image/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert sent[0] == "*", "nothing goes into the build that is not named"


def test_the_object_store_shows_its_s3_door_only() -> None:
    flags = SERVICES["s3"]["command"]
    assert "-ip.bind=127.0.0.1" in flags
    assert "-s3.ip.bind=0.0.0.0" in flags
    assert "-master.telemetry=false" in flags


def test_the_schema_by_dockers_own_tool(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    subprocess.run([INFRA / "make-secrets", env, tmp_path / "client.env"], check=True)
    known = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False) if shutil.which("docker") else None
    if known is not None and known.returncode == 0:
        command, file = ["docker", "compose"], INFRA / "compose.yaml"
    elif shutil.which("docker-compose"):  # the older tool knows no `name`
        command, file = ["docker-compose"], tmp_path / "compose.yaml"
        file.write_text(re.sub(r"^name: .*\n", "", TEXT, flags=re.MULTILINE), encoding="utf-8")
    else:
        pytest.skip("neither docker compose nor docker-compose is installed")
    call = [*command, "--project-directory", str(INFRA), "--env-file", str(env), "--file", str(file), "config"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    resolved = yaml.safe_load(done.stdout)
    assert set(resolved["services"]) >= LASTING
    assert "${" not in done.stdout
