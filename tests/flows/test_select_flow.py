"""Checkpoint selection as a flow: artifacts, retries, the event of a due checkpoint, and the automation that answers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import State, flow, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from dflash.checkpoint import hold_probes
from dflash.errors import RunStateError, StorageError
from dflash.records import ProbeFigures, ProbeRecord, RegisteredDrafter, Ruling
from dflash.stages import SelectStage
from dflash.stages.run import reopen_run
from dflash.tracking.store import StoreUnreachableError
from flows import selection
from flows.automations import install
from flows.select_checkpoint import select
from flows.selection import SELECTION, selection_automation
from tasks import due_checkpoints
from tasks import select_checkpoint as select_task
from tasks.due_checkpoints import DueCheckpoints
from tasks.events import DUE
from tests.support.checkpoints import save_at

pytestmark = pytest.mark.usefixtures("prefect_server")

FIGURES = ProbeFigures(2.5, (2.25, 2.75), (50, 50), (20, 20), (0.8,), 0.1)
CONFIG = """
run: {{name: tiny, root: {root}}}
target: {{path: demo, mask_token: "<|mask|>"}}
data: {{num_conversations: 4}}
checkpoint: {{interval_steps: 10}}
probe: {{every_steps: {every}}}
"""


def found(*, champion: bool) -> SelectStage:
    measured = ProbeRecord(20, 0, "p", outcome="measured", at="", reason="", figures=FIGURES)
    failed = ProbeRecord(10, 0, "p", outcome="failed", at="", reason="it was removed", figures=None)
    ruling = Ruling(champion, "better: so and so", (0.1, 0.2))
    return SelectStage((failed, measured), 20, RegisteredDrafter("dflash-demo", "3", True, champion, ruling))


def artifacts_of(state: State[Any]) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        run_id = state.state_details.flow_run_id
        kept = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id])))
    return {item.key: item for item in kept if item.key}


def test_the_flow_leaves_what_was_probed_and_what_was_ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def stage(run_dir: str, *, register: bool) -> SelectStage:
        asked.append((run_dir, register))
        return found(champion=True)

    given: list[str] = []
    monkeypatch.setattr(select_task, "select_stage", stage)
    monkeypatch.setattr(select_task, "give_way", given.append)
    state = select("runs/tiny-001", return_state=True)
    assert state.result() == 20
    assert asked == [("runs/tiny-001", True)]
    assert given == [], "whoever calls the flow goes on at the same priority"
    artifacts = artifacts_of(state)
    rows = json.loads(artifacts["probes"].data)
    assert [(row["step"], row["outcome"], row["best"]) for row in rows] == [(10, "failed", ""), (20, "measured", "best")]
    assert [row["interval"] for row in rows] == ["it was removed", "2.250 to 2.750"]
    assert artifacts["champion"].description == "step-20 is the champion: better: so and so"


def test_a_process_that_a_worker_started_for_it_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(select_task, "select_stage", lambda _run_dir, *, register: found(champion=register))
    monkeypatch.setattr(select_task, "give_way", given.append)
    for left in ("table", "markdown"):  # artifacts need a flow run
        monkeypatch.setattr(select_task, left, lambda *_arguments, **_more: None)
    monkeypatch.setenv(select_task.STARTED_FOR, str(uuid4()))
    select_task.select_checkpoint.fn("runs/tiny-001", register=False)
    assert given == ["runs/tiny-001"]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (StoreUnreachableError("MLflow: away", remedy="wait"), 2),
        (StorageError("the disk is away", remedy="wait"), 2),
        (RunStateError("no probes", remedy="set probe.every_steps"), 1),
    ],
)
def test_a_registry_that_is_away_is_tried_again_and_a_mistake_is_not(
    error: Exception, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stage(_run_dir: str, *, register: bool) -> SelectStage:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        return found(champion=False)

    monkeypatch.setattr(select_task, "select_stage", stage)
    monkeypatch.setattr("tasks.select_checkpoint.select_checkpoint.retry_delay_seconds", 0)
    state = select("runs/tiny-001", return_state=True)
    assert calls == tries
    assert state.is_completed() == (tries == 2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    events: list[tuple[str, int, int]] = []
    monkeypatch.setattr(due_checkpoints, "due_event", lambda paths, step, segment: events.append((paths.root.name, step, segment)))
    return events


def run_at(folder: Path, *, every: int) -> Any:
    (folder / "tiny-001").mkdir()
    (folder / "tiny-001" / "config.yaml").write_text(CONFIG.format(root=json.dumps(str(folder)), every=every), encoding="utf-8")
    return reopen_run(folder / "tiny-001")


def test_a_due_checkpoint_is_told_once_and_one_that_has_been_probed_never(tmp_path: Path, told: list[tuple[str, int, int]]) -> None:
    run = run_at(tmp_path, every=20)
    due = DueCheckpoints(run)
    due.tell()
    for step in (10, 20):
        save_at(run.paths.checkpoints_dir, step)
    due.tell()
    due.tell()
    assert told == [("tiny-001", 20, 0)]
    save_at(run.paths.checkpoints_dir, 40)
    with hold_probes(run.paths) as writer:
        writer.append(ProbeRecord(40, 0, "p", outcome="measured", at="", reason="", figures=FIGURES))
    due.tell()
    assert told == [("tiny-001", 20, 0)]


def test_a_run_without_probes_tells_nothing_and_trouble_does_not_touch_the_training(
    tmp_path: Path, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_at(tmp_path, every=0)
    save_at(run.paths.checkpoints_dir, 20)
    DueCheckpoints(run).tell()
    assert told == []
    run.paths.config.write_text(CONFIG.format(root=json.dumps(str(tmp_path)), every=20))
    due = DueCheckpoints(reopen_run(run.paths.root))

    def broken(*_arguments: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(due_checkpoints, "due_steps", broken)
        due.tell()
        due.tell()
    assert caplog.text.count("no space left") == 1
    due.tell()
    assert told == [("tiny-001", 20, 0)], "what could not be looked at then is told now"


def test_the_automation_waits_for_its_deployment_and_starts_it_with_the_run_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "DEPLOYMENT", f"select/{uuid4()}")
    assert selection_automation() is None

    @flow(name=f"select-{uuid4()}")
    def nothing(run_dir: str) -> None:
        """A flow to deploy."""

    with get_client(sync_client=True) as client:
        deployment_id = client.create_deployment(flow_id=client.create_flow(nothing), name="due-checkpoints")
    monkeypatch.setattr(selection, "DEPLOYMENT", f"{nothing.name}/due-checkpoints")
    wanted = selection_automation()
    assert wanted is not None
    assert install(wanted) == f"created: {SELECTION}"
    assert install(wanted) == f"up to date: {SELECTION}"
    with get_client(sync_client=True) as client:
        (known,) = client.read_automations_by_name(SELECTION)
    assert known.trigger.expect == {DUE}
    (action,) = known.actions
    assert action.deployment_id == deployment_id
    assert action.parameters == {"run_dir": {"__prefect_kind": "jinja", "template": "{{ event.payload.run_dir }}"}}
