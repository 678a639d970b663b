"""The local servers with everything on: PostgreSQL, S3, passwords. Without a secret nobody gets in; with it a training runs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import psutil
import pytest

from dflash.records import RunPaths, RunSummary, from_json
from tests.support.env_files import values_of
from tests.support.postgres import postgres_bin
from tests.support.stack import BIN, ROOT, Stack, awaited, client_of, ended, free_port, running_stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(postgres_bin() is None, reason="PostgreSQL is not installed"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    settings = {"DFLASH_LOCAL_POSTGRES": "1", "DFLASH_LOCAL_S3": "1", "DFLASH_LOCAL_AUTH": "1"}
    ports = {"DFLASH_POSTGRES_PORT": str(free_port()), "DFLASH_S3_PORT": str(free_port())}
    # Not pytest's folder, which every other run of pytest closes to everybody else: the user postgres has to get through.
    with tempfile.TemporaryDirectory(prefix="dflash-stack-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with running_stack(folder, **settings, **ports) as made:
            made.env.update(values_of(folder / "local/client.env"))
            yield made


@pytest.fixture(scope="module")
def trained(stack: Stack) -> RunPaths:
    """A training through the deployment, by worker, server, tracking and store."""
    stack.call(str(BIN / "prefect"), "--no-prompt", "deploy", "--all")
    run_id = stack.submit("train.max_steps=60", "checkpoint.store=s3://dflash-runs/copies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_AUTH_STRING", stack.env["PREFECT_API_AUTH_STRING"])
        with client_of(stack) as client:
            run = awaited(lambda: ended(client, run_id), within_s=400, what="the end of the training flow")
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    return RunPaths(stack.runs / "tiny-001")


def test_without_the_secret_nobody_gets_in(stack: Stack) -> None:
    api, mlflow = stack.env["PREFECT_API_URL"], f"{stack.mlflow}/api/2.0/mlflow"
    wanted = {"experiment_name": "Default"}
    admin = (stack.env["MLFLOW_TRACKING_USERNAME"], stack.env["MLFLOW_TRACKING_PASSWORD"])
    prefect_user = tuple(stack.env["PREFECT_API_AUTH_STRING"].split(":"))
    for wrong in (None, (admin[0], "wrong"), ("admin", "password1234")):
        assert httpx.get(f"{api}/work_pools/dflash-train", auth=wrong).status_code == 401
        assert httpx.get(f"{mlflow}/experiments/get-by-name", params=wanted, auth=wrong).status_code == 401
    assert httpx.get(f"{api}/work_pools/dflash-train", auth=prefect_user).status_code == 200  # type: ignore[arg-type]
    assert httpx.get(f"{mlflow}/experiments/get-by-name", params=wanted, auth=admin).status_code == 200
    assert httpx.get(f"{api}/health").status_code == 200, "health checks need no secret"


def test_a_training_is_tracked_behind_the_password_and_copied_to_the_store(stack: Stack, trained: RunPaths) -> None:
    summary = from_json(RunSummary, trained.summary.read_bytes(), origin="summary.json")
    admin = (stack.env["MLFLOW_TRACKING_USERNAME"], stack.env["MLFLOW_TRACKING_PASSWORD"])
    found = httpx.get(f"{stack.mlflow}/api/2.0/mlflow/runs/get", params={"run_id": summary.mlflow_run_id}, auth=admin).json()["run"]
    assert found["info"]["status"] == "FINISHED"
    assert {"train/loss"} <= {metric["key"] for metric in found["data"]["metrics"]}
    store = boto3.client(
        "s3",
        endpoint_url=stack.env["AWS_ENDPOINT_URL"],
        aws_access_key_id=stack.env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=stack.env["AWS_SECRET_ACCESS_KEY"],
        region_name=stack.env["AWS_DEFAULT_REGION"],
    )
    copies = {item["Key"] for item in store.list_objects_v2(Bucket="dflash-runs", Prefix="copies/tiny-001/")["Contents"]}
    assert "copies/tiny-001/checkpoints/step-60/segment-0/manifest.json" in copies
    assert store.list_objects_v2(Bucket="dflash-mlflow")["KeyCount"] > 0, "artifacts go through MLflow's server into its bucket"


def test_no_secret_is_in_a_run_a_log_or_on_a_command_line(stack: Stack, trained: RunPaths) -> None:
    server = values_of(stack.folder / "local/server.env")
    secrets = [
        value for value in (server | values_of(stack.folder / "local/client.env")).values() if re.fullmatch(r"[0-9a-f]{48}", value)
    ]
    assert len(set(secrets)) >= 7
    files = [path for place in (trained.root, stack.folder / "local/logs") for path in place.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], path
    for process in psutil.process_iter(["cmdline"]):
        assert not [secret for secret in secrets if secret in " ".join(process.info["cmdline"] or [])]


def test_workers_do_not_know_the_databases(stack: Stack) -> None:
    server = values_of(stack.folder / "local/server.env")
    for name in ("worker-train", "worker-health"):
        environment = psutil.Process(stack.pids()[name]).environ().values()
        for secret in ("POSTGRES_PASSWORD", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"):
            assert not [value for value in environment if server[secret] in value], f"{name} knows {secret}"


def test_backed_up_stopped_restored_and_back_in_service(stack: Stack, trained: RunPaths) -> None:
    env = stack.env | values_of(stack.folder / "local/server.env")

    def call(*command: object) -> str:
        return subprocess.run([str(part) for part in command], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout

    kept = call("infra/backup/backup", stack.folder / "backups").strip()
    stack.call("infra/local/down", "worker-health", "worker-train", "mlflow", "prefect-server")
    assert set(stack.pids()) == {"postgres", "s3"}
    assert call("infra/backup/restore", kept, "--replace").count("restored") == 3
    stack.call("infra/local/up")
    summary = from_json(RunSummary, trained.summary.read_bytes(), origin="summary.json")
    admin = (env["MLFLOW_TRACKING_USERNAME"], env["MLFLOW_TRACKING_PASSWORD"])
    answer = httpx.get(f"{stack.mlflow}/api/2.0/mlflow/runs/get", params={"run_id": summary.mlflow_run_id}, auth=admin)
    assert answer.json()["run"]["info"]["status"] == "FINISHED"
    deployed = stack.call(str(BIN / "prefect"), "deployment", "inspect", "train/train-v2")
    assert "train-v2" in deployed
