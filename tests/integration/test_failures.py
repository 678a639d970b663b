"""What breaks around a training: worker, flow process, server, tracking; each ends with a true state, no orphan, nothing lost.

On real servers and workers; every training is the demo's, small. Most are long tests, because each trains once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType

from dflash.config import load_config
from dflash.records import RunPaths
from dflash.stages.revive import dead_attempts
from dflash.tracking import load_state
from dflash.train.attempts import attempts, end_of
from dflash.train.processes import recorded_processes
from dflash.train.runs import run_is_live
from tests.support.stack import (
    BIN,
    ROOT,
    Stack,
    alive,
    awaited,
    client_of,
    continued_by,
    ended,
    flow_process,
    kill_flow,
    records_of,
    running_stack,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]

TRUE_WITHIN_S = 120
CLIENT_PATIENCE_S = 150
"""More than twice the time after which Prefect's own client gives up."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as made:
        made.call(str(BIN / "prefect"), "--no-prompt", "deploy", "--all")
        with client_of(made) as client:
            for name in ("demo", "train-v2"):  # checks are started by hand here
                client.pause_deployment(client.read_deployment_by_name(f"health-check/{name}").id)
        yield made


@pytest.fixture(autouse=True)
def everything_up(stack: Stack) -> Iterator[None]:
    """Whatever a test ended, the next one finds running."""
    yield
    restart_worker(stack)


@pytest.fixture
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with client_of(stack) as made:
        yield made


def training(stack: Stack, name: str, *, at_step: int = 60) -> tuple[UUID, RunPaths]:
    """A training that has come to `at_step`."""
    run_id = stack.submit(f"run.name={name}", "train.max_steps=600")
    paths = RunPaths(stack.runs / f"{name}-001")
    awaited(lambda: records_of(paths) >= at_step or None, within_s=400, what=f"step {at_step} of {name}")
    return run_id, paths


def health_command(stack: Stack, name: str) -> list[str]:
    """The health flow of one run's configuration as a program."""
    command = [str(BIN / "python"), "-m", "flows.health", "--config", "configs/demo.yaml"]
    return [*command, "--set", f"run.root={stack.runs}", "--set", f"run.name={name}"]


def check_health(stack: Stack, name: str) -> None:
    """Run the health flow to its end, on the stack's server."""
    done = subprocess.run(
        health_command(stack, name), cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def restart_worker(stack: Stack) -> None:
    """`up` starts what does not run."""
    stack.call("infra/local/up")


def final_state(client: SyncPrefectClient, run_id: UUID, *, within_s: float = TRUE_WITHIN_S) -> State:
    run: FlowRun = awaited(lambda: ended(client, run_id), within_s=within_s, what=f"the end of flow run {run_id}")
    assert run.state is not None
    return run.state


def await_silence(paths: RunPaths, run_id: UUID) -> None:
    """Wait until a health check would call the flow run dead, or it has said how it ended."""
    config = load_config(paths.config)

    def silent() -> bool | None:
        return end_of(paths, str(run_id)) is not None or bool(dead_attempts(config, paths)) or None

    awaited(silent, within_s=60, what=f"the silence of {paths.root.name}")


def assert_at_rest(paths: RunPaths) -> None:
    assert recorded_processes(paths) == []
    assert not run_is_live(paths)


def test_a_cancelled_training_drains_saves_and_leaves_nobody(stack: Stack, client: SyncPrefectClient) -> None:
    run_id, paths = training(stack, "cancel")
    stack.call(str(BIN / "prefect"), "flow-run", "cancel", str(run_id))
    state = final_state(client, run_id)
    assert state.type == StateType.CANCELLED, state
    assert_at_rest(paths)
    stopped = records_of(paths)
    assert paths.checkpoint(stopped).is_dir(), "it saved its last step"
    check_health(stack, "cancel")
    assert len(attempts(paths)) == 1, "nobody starts again what was cancelled"


def test_a_killed_flow_is_started_again_once_by_two_health_flows_at_once(stack: Stack, client: SyncPrefectClient) -> None:
    run_id, paths = training(stack, "killed")
    kill_flow(paths, run_id)
    await_silence(paths, run_id)
    both = [subprocess.Popen(health_command(stack, "killed"), cwd=ROOT, env=stack.env) for _ in range(2)]
    assert [process.wait(180) for process in both] == [0, 0]
    assert final_state(client, run_id).type == StateType.CRASHED
    successor = continued_by(paths, run_id)
    assert successor is not None
    assert final_state(client, successor, within_s=240).is_completed()
    assert [attempt.flow_run for attempt in attempts(paths)] == [str(run_id), str(successor)]
    assert_at_rest(paths)


def test_a_killed_worker_does_not_end_the_training_and_a_cancellation_still_reaches_it(
    stack: Stack, client: SyncPrefectClient
) -> None:
    run_id, paths = training(stack, "worker")
    worker = stack.pids()["worker-train"]
    os.kill(worker, signal.SIGKILL)
    process = flow_process(paths, run_id)
    before = records_of(paths)
    awaited(lambda: records_of(paths) > before + 20 or None, within_s=60, what="further steps without a worker")
    assert process.is_running()
    client.set_flow_run_state(run_id, State(type=StateType.CANCELLING, name="Cancelling"))
    state = final_state(client, run_id)
    assert state.type == StateType.CANCELLED, state
    psutil.wait_procs([process], timeout=60)
    assert_at_rest(paths)
    restart_worker(stack)


def test_a_worker_that_is_told_to_end_leaves_a_true_state(stack: Stack, client: SyncPrefectClient) -> None:
    run_id, paths = training(stack, "term")
    process = flow_process(paths, run_id)
    worker = stack.pids()["worker-train"]
    os.kill(worker, signal.SIGTERM)
    psutil.wait_procs([process], timeout=TRUE_WITHIN_S)
    awaited(lambda: True if not alive(worker) else None, within_s=TRUE_WITHIN_S, what="the worker's end")
    restart_worker(stack)
    await_silence(paths, run_id)
    check_health(stack, "term")
    state = final_state(client, run_id)
    end = end_of(paths, str(run_id))
    assert end is not None
    assert end.how != "finished"
    assert state.type in (StateType.FAILED, StateType.CRASHED, StateType.CANCELLED), state
    assert_at_rest(paths)


def test_a_server_that_is_away_at_the_end_of_a_training_is_waited_for(stack: Stack, client: SyncPrefectClient) -> None:
    run_id, paths = training(stack, "away")
    server = stack.pids()["prefect-server"]
    os.kill(server, signal.SIGTERM)
    awaited(lambda: True if not alive(server) else None, within_s=60, what="the server's end")
    patient_until_s = time.monotonic() + CLIENT_PATIENCE_S
    awaited(lambda: True if paths.summary.is_file() else None, within_s=240, what="the summary, without a server")
    ended_early, _ = psutil.wait_procs([flow_process(paths, run_id)], timeout=max(0.0, patient_until_s - time.monotonic()))
    assert not ended_early
    restart_worker(stack)
    assert final_state(client, run_id).is_completed()
    assert_at_rest(paths)


def test_mlflow_that_is_away_costs_no_training_and_gets_its_curves_later(stack: Stack, client: SyncPrefectClient) -> None:
    tracking = f"tracking.uri={stack.mlflow}"
    run_id = stack.submit("run.name=untracked", "train.max_steps=600", tracking)
    paths = RunPaths(stack.runs / "untracked-001")
    awaited(lambda: records_of(paths) >= 40 or None, within_s=180, what="step 40")
    mlflow = stack.pids()["mlflow"]
    os.kill(mlflow, signal.SIGKILL)
    before = records_of(paths)
    awaited(lambda: records_of(paths) > before + 100 or None, within_s=90, what="100 steps without MLflow")
    stack.call("infra/local/up")
    assert final_state(client, run_id, within_s=240).is_completed()
    assert paths.summary.is_file()
    from mlflow.tracking import MlflowClient  # seconds, which only this test has to pay

    tracked = load_state(paths.tracking_state)
    assert tracked is not None
    curve = MlflowClient(tracking_uri=stack.mlflow).get_metric_history(tracked.run_id, "train/loss")
    assert {point.step for point in curve} == set(range(records_of(paths)))
    assert_at_rest(paths)


def test_two_trainings_of_one_configuration_wait_for_each_other(stack: Stack, client: SyncPrefectClient) -> None:
    first, paths = training(stack, "one")
    second = stack.submit("run.name=one", "train.max_steps=600")
    waiting = awaited(lambda: client.read_flow_run(second).state, within_s=30, what="a state of the second")
    assert not waiting.is_final()
    assert final_state(client, first, within_s=240).is_completed()
    assert final_state(client, second, within_s=240).is_completed(), "it begins the next run"
    assert (stack.runs / "one-002").is_dir()
    assert_at_rest(paths)


def victim(stack: Stack, paths: RunPaths, run_id: UUID, role: str) -> int:
    """Pid of what is killed next."""
    if role == "worker":
        return stack.pids()["worker-train"]
    if role == "flow":
        return flow_process(paths, run_id).pid
    recorded = awaited(
        lambda: next((process for process in recorded_processes(paths) if process.role == role), None), within_s=60, what=role
    )
    return recorded.pid


CHECK_POINTS: tuple[Callable[[RunPaths, UUID], bool], ...] = (
    lambda paths, _run_id: paths.root.is_dir(),
    lambda paths, _run_id: (paths.control_dir / "revive.lock").exists(),
    lambda paths, _run_id: len(attempts(paths)) > 1,
    lambda paths, run_id: end_of(paths, str(run_id)) is not None,
)
"""How far a health check has come: started, looking at the dead run, the next flow run announced, the dead one's end noted."""


def kill_check(stack: Stack, paths: RunPaths, run_id: UUID, *, point: Callable[[RunPaths, UUID], bool]) -> None:
    """SIGKILL for a health check that has just come to `point` of its work."""
    check = subprocess.Popen(health_command(stack, paths.root.name.rpartition("-")[0]), cwd=ROOT, env=stack.env)
    awaited(lambda: point(paths, run_id) or None, within_s=180, what="the health check's work", pause_s=0.005)
    check.kill()
    check.wait()


@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_moments_end_in_a_finished_run_without_orphans(stack: Stack, client: SyncPrefectClient, seed: int) -> None:
    """Worker, flow, torchrun, rank or a health flow in its work: SIGKILL; health checks by hand stand in for the schedule."""
    draw = random.Random(seed)
    name = f"kill{seed}"
    run_id, paths = training(stack, name, at_step=draw.randrange(10, 300))
    role = ("worker", "flow", "torchrun", "trainer", "health")[seed % 5]
    if role == "health":
        kill_flow(paths, run_id)
        await_silence(paths, run_id)
        kill_check(stack, paths, run_id, point=CHECK_POINTS[seed // 5 % len(CHECK_POINTS)])
    else:
        os.kill(victim(stack, paths, run_id, role), signal.SIGKILL)
    if role == "worker":
        restart_worker(stack)
    if role in ("flow", "health"):
        await_silence(paths, run_id)
        check_health(stack, name)
        check_health(stack, name)
        assert final_state(client, run_id).type == StateType.CRASHED
    newest = UUID(attempts(paths)[-1].flow_run)
    assert final_state(client, newest, within_s=400).is_completed()
    assert len(attempts(paths)) == (2 if role in ("flow", "health") else 1), "exactly one effect"
    assert paths.summary.is_file()
    assert_at_rest(paths)
