"""Data sets built by real Dask and Ray workers on this machine, from and into a live S3 server: the bytes of the local build."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from dflash.config import Config, TargetConfig
from dflash.data.prepare import PreparedData
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.stages import build_data
from dflash.storage import open_store
from tests.support.answer_server import AnswerServer, Behaviour
from tests.support.s3_server import BUCKET, environment, s3_server
from tests.support.spread_flow import build

QUIET: Any = lambda *_: None  # noqa: E731
FILES, ROWS = 5, 60

pytestmark = pytest.mark.slow


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"the extra [{extra}] is not installed")


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """A place on a live S3 server, which child processes know too, and a Prefect server."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        # Brings the server's packages, seconds that only the process that runs these tests has to pay.
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            yield f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture(scope="module")
def sources(remote: str) -> str:
    store = open_store(f"{remote}/corpus")
    for file in range(FILES):
        rows = [{"prompt": f"{file} {row} " + "why " * (row % 9), "completion": "because " * (1 + row % 23)} for row in range(ROWS)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows) + "{oops\n"
        store.put(f"part-{file}.jsonl", text.encode(), only_if_absent=True)
    return f"{remote}/corpus/*.jsonl"


@pytest.fixture(scope="module")
def local(sources: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same data set, built by this process on local disk."""
    return content(build_data(config(sources, tmp_path_factory.mktemp("local"), store=None, runner="local"), progress=QUIET))


def config(files: str, root: Path, **data: Any) -> Config:
    given = {
        "source": "files", "files": [files], "answers": {"regenerate": False}, "bad_rows": "quarantine",
        "bucket_edges_tokens": "auto", "workers": 2, **data,
    }  # fmt: skip
    tree = {"run": {"root": str(root)}, "target": {"path": "demo", "mask_token": "<|mask|>"}, "data": given}
    return Config.model_validate(tree)


def content(data: PreparedData) -> dict[str, bytes]:
    """Every file of a data set but the note that tells when and where it was built."""
    names = [name for name in data.store.names("") if name != "build.json"]
    return {name: data.store.read(name) for name in names}


def family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def addresses(processes: list[psutil.Process]) -> set[str]:
    """Addresses that the processes listen on."""
    found = set()
    for process in processes:
        try:
            found |= {item.laddr.ip for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("dask", marks=needs("prefect_dask", "dask")),
        pytest.param("ray", marks=[needs("prefect_ray", "ray"), pytest.mark.full]),
    ],
)
def test_two_workers_and_s3_give_the_bytes_of_the_local_build(
    runner: str, remote: str, sources: str, local: dict[str, bytes], tmp_path: Path
) -> None:
    before, listened, steps = family(), set(), []

    def progress(label: str, done: int, total: int) -> None:
        steps.append((label, done, total))
        if label == "tokenize" and done == 0:
            listened.update(addresses([psutil.Process(), *family()]))

    settings = config(sources, tmp_path, store=f"{remote}/{runner}", runner=runner)
    data = build(settings, progress)
    assert data.location.startswith(f"{remote}/{runner}/")
    assert content(data) == local
    assert not any(name.startswith("staging/") for name in local)
    assert {name for name in local if name.startswith("units/")}
    assert steps[-1] == ("bucket", FILES * (ROWS + 1), FILES * (ROWS + 1))
    assert listened <= {"127.0.0.1", "::ffff:127.0.0.1"}
    left = [process for process in family() if process not in before and process.is_running() and process.status() != "zombie"]
    psutil.wait_procs(left, timeout=60)
    assert not [process for process in left if process.is_running()], "the cluster has ended with the data set"
    assert build_data(settings, progress=QUIET).reused, "without a cluster, what is built is found"


@pytest.fixture(scope="module")
def cluster(remote: str) -> Iterator[Any]:
    """A Dask cluster of two processes that is named by its address."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@needs("prefect_dask", "dask")
@pytest.mark.full
def test_a_worker_that_is_killed_midway_costs_nothing_but_time(
    remote: str, sources: str, local: dict[str, bytes], tmp_path: Path, cluster: Any
) -> None:
    from distributed import Client

    killed: list[int] = []
    with Client(cluster, set_as_default=False) as client:

        def progress(label: str, done: int, total: int) -> None:
            if label == "tokenize" and 0 < done < total and not killed:
                busy = [worker for worker, tasks in client.processing().items() if tasks]
                killed.append(client.run(os.getpid, workers=busy[:1])[busy[0]])
                os.kill(killed[0], signal.SIGKILL)

        settings = config(sources, tmp_path, store=f"{remote}/killed", runner="dask", runner_address=cluster.scheduler_address)
        data = build(settings, progress)
        assert content(data) == local
        assert build(settings, QUIET).reused, "a cluster that was named by its address is still there"
        client.wait_for_workers(2)
        assert killed[0] not in client.run(os.getpid).values()


@needs("prefect_dask", "dask")
@pytest.mark.full
def test_workers_let_a_server_answer(sources: str, tmp_path: Path, cluster: Any) -> None:
    target = TargetConfig(mask_token="<|mask|>")
    tokenizer = load_tokenizer(target)
    stop = stop_token_ids(tokenizer, target)

    def say(prompt: list[int], body: dict[str, Any]) -> list[int]:
        return [*tokenizer(f"so {sum(prompt) % 97}", add_special_tokens=False)["input_ids"], stop[0]]

    with AnswerServer(say, tokenizer, stop_ids=set(stop), behaviour=Behaviour()) as server:
        served = {"regenerate": True, "engine": "server", "server": {"url": server.url, "model": "target"}}
        spread = {"runner": "dask", "runner_address": cluster.scheduler_address}
        data = build(config(sources, tmp_path / "workers", answers=served, **spread), QUIET)
        again = build_data(config(sources, tmp_path / "here", answers=served), progress=QUIET)
    assert content(data) == content(again)
    assert data.manifest.on_policy
    assert data.manifest.samples == FILES * ROWS
