"""Probing a run: which checkpoints, in which order, what becomes of those that cannot be probed, and the best one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint import BEST, ProbeWriter, hold_probes, outcomes, read_pointer, read_probes
from dflash.cli import main
from dflash.errors import EvaluationError, RunStateError
from dflash.evaluate.prompts import EvalPrompt
from dflash.records import ProbeFigures, ProbeRecord
from dflash.stages import probe as probe_module
from dflash.stages import probe_watch as watch_module
from dflash.stages.evaluate import open_bench
from dflash.stages.probe import BACKLOG, _Prober, give_way, probe_stage
from dflash.stages.probe_watch import ProbeWatch, _Child
from dflash.stages.run import Run, reopen_run
from dflash.tracking.names import probe_metrics
from dflash.train.probes import due_steps
from tests.support.probe_run import build_probe_run, save_drafter


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Probed by the command line; only read by the tests."""
    run = build_probe_run(tmp_path_factory.mktemp("probed"))
    for step in (0, 10, 20, 30, 40):
        save_drafter(run, step)
    probe_stage(run.paths.root, parent_pid=None, on_probe=lambda _record: None)
    return run


@pytest.fixture
def run(tmp_path: Path, shared: Run) -> Run:
    """A run of the same data without checkpoints."""
    for name in ("config.yaml", "data.json"):
        file = tmp_path / "probed-001" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes((shared.paths.root / name).read_bytes())
    (tmp_path / "probed-001" / "plan").symlink_to(shared.paths.plan_dir)
    return reopen_run(tmp_path / "probed-001")


def outcome_pairs(run: Run) -> list[tuple[int, str]]:
    return [(record.step, record.outcome) for record in read_probes(run.paths.probes)]


def events(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.paths.log.read_text().splitlines()] if run.paths.log.exists() else []


@contextmanager
def prober(run: Run) -> Iterator[_Prober]:
    with hold_probes(run.paths) as writer:
        yield _Prober(run, writer)


def measured(step: int, *, counted: int, identity: str = "p", segment: int = 0) -> ProbeRecord:
    figures = ProbeFigures(counted / 10, (1.0, 9.0), (counted, counted), (10, 10), (0.5,), 1.0)
    return ProbeRecord(step, segment, identity, "measured", f"2026-01-01T00:00:{step:02d}+00:00", "", figures)


def test_what_is_due_is_probed_once(shared: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome_pairs(shared) == [(20, "begun"), (20, "measured"), (40, "begun"), (40, "measured")]
    found = outcomes(read_probes(shared.paths.probes))
    for record in found.values():
        assert record.figures is not None
        assert record.figures.acceptance_length >= 1
        assert len(record.figures.counted) == 3
    assert main(["probe", str(shared.paths.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    main(["checkpoint", "list", str(shared.paths.root), "--json"])
    listed = {row["step"]: row["acceptance_length"] for row in json.loads(capsys.readouterr().out)}
    assert listed[20] == found[20, 0].figures.acceptance_length  # type: ignore[union-attr]
    assert listed[10] is None


def test_probe_prompts_are_not_those_of_the_final_evaluation(shared: Run, run: Run) -> None:
    with prober(run) as opened:
        own: list[EvalPrompt] = opened._prompts
    assert len(own) == 3
    assert not {prompt.id for prompt in own} & {prompt.id for prompt in open_bench(shared).prompts}


def test_probe_prompts_of_several_sets_are_of_all_of_them_and_not_the_final_evaluation_s(run: Run, tmp_path: Path) -> None:
    sets = []
    for name in ("one", "two"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{name}: what is {n} times {n + 7}?"}) + "\n" for n in range(20)))
        sets.append({"name": name, "file": str(file)})
    overrides = ["evaluate.source=sets", f"evaluate.sets={json.dumps(sets)}", "evaluate.num_prompts=8", "probe.num_prompts=6"]
    several = reopen_run(run.paths.root, overrides=overrides)
    probed = probe_module.probe_prompts(several)[0]
    assert sorted(prompt.dataset for prompt in probed) == ["one"] * 3 + ["two"] * 3
    assert not {prompt.prompt_ids for prompt in probed} & {prompt.prompt_ids for prompt in open_bench(several).prompts}


def test_no_prompt_is_probed_twice(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "repeats.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {n % 4} plus nothing?"}) + "\n" for n in range(12)))
    overrides = [
        "evaluate.source=sets",
        f"evaluate.sets={json.dumps([{'name': 'one', 'file': str(file)}])}",
        "evaluate.num_prompts=6",
    ]
    probed = probe_module.probe_prompts(reopen_run(run.paths.root, overrides=[*overrides, "probe.num_prompts=6"]))[0]
    assert len({prompt.prompt_ids for prompt in probed}) == len(probed) == 4


def test_the_last_checkpoint_is_due_wherever_it_lies(run: Run) -> None:
    save_drafter(run, 20)
    save_drafter(run, 33, total_steps=100)
    assert due_steps(run.paths, run.config) == [20], "a stop between two saves is not the end"
    save_drafter(run, 35, total_steps=35)
    assert due_steps(run.paths, run.config) == [20, 35]


def test_the_newest_comes_first_and_a_long_queue_is_cut(run: Run) -> None:
    for number in range(1, BACKLOG + 3):
        save_drafter(run, 20 * number)
    with prober(run) as opened:
        assert opened.oldest() == 20
        assert opened.newest() == 20 * (BACKLOG + 2)
        assert outcome_pairs(run) == [(20, "skipped"), (40, "skipped")]
        assert opened.oldest() == 60


def test_a_damaged_checkpoint_a_lost_one_and_a_deadly_one_have_outcomes(run: Run) -> None:
    save_drafter(run, 20)
    save_drafter(run, 40)
    (run.paths.checkpoint(20) / "drafter.safetensors").write_bytes(b"\0" * 100)
    with prober(run) as opened:
        assert opened.probe(20).outcome == "failed"
        assert opened.oldest() == 40
        key = opened._key(40)
        for _ in range(probe_module.MAX_TRIES):  # as killed processes leave it
            opened._writer.append(replace(measured(40, counted=10, identity=opened._identity), outcome="begun", figures=None))
        record = opened.probe(40)
        assert (record.outcome, record.reason) == ("failed", "its process died 3 times")
        assert opened.oldest() is None
        assert opened.probe(60).outcome == "skipped", "retention was faster"
        assert key == (40, 0)


def test_a_run_that_cannot_be_opened_gives_up_what_is_due_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_more: object) -> list[EvalPrompt]:
        raise EvaluationError("no prompts", remedy="give some")

    save_drafter(run, 20)
    monkeypatch.setattr(probe_module, "load_eval_prompts", refuse)
    with pytest.raises(EvaluationError):
        probe_stage(run.paths.root, parent_pid=None, on_probe=lambda _record: None)
    assert [(r.step, r.outcome, r.reason) for r in read_probes(run.paths.probes)] == [(20, "failed", "no prompts")]


def test_only_a_process_that_is_there_for_probes_gives_way(
    shared: Run, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, given = [0], []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(os, "getpriority", lambda *_arguments: own[0])
    for words in (["probe", str(shared.paths.root)], ["select", str(shared.paths.root), "--no-register"]):
        assert main(words) == 0
        assert given == [], "the caller goes on with its own work"
        assert main(words, own_process=True) == 0
        assert given.pop() == (os.PRIO_PROCESS, 0, 19)
    capsys.readouterr()
    run.paths.config.write_text(run.paths.config.read_text().replace("niceness: 19", "niceness: 3"))
    for own[0], niceness in ((0, 3), (7, 7)):
        give_way(run.paths.root)
        assert given.pop() == (os.PRIO_PROCESS, 0, niceness), "a process without privileges cannot take priority back"


def test_a_run_without_probes_is_refused(run: Run) -> None:
    run.paths.config.write_text(run.paths.config.read_text().replace("every_steps: 20", "every_steps: 0"))
    with pytest.raises(RunStateError, match="no probes"):
        probe_stage(run.paths.root, parent_pid=None, on_probe=lambda _record: None)
    assert due_steps(run.paths, reopen_run(run.paths.root).config) == []


@dataclass
class QuietChild:
    """Stands in for the process: nothing is started."""

    is_hopeless: bool = False
    wanted: bool = False

    def tick(self, *, wanted: bool, lines: int) -> None:
        self.wanted = wanted

    def hope_again(self) -> None:
        self.is_hopeless = False

    def end(self) -> None:
        """Nothing runs."""


def watch_of(run: Run, child: QuietChild) -> ProbeWatch:
    watch = ProbeWatch(run)
    watch._child = child  # type: ignore[assignment] - the same interface
    return watch


def append(run: Run, *records: ProbeRecord) -> None:
    run.paths.probe_dir.mkdir(exist_ok=True)
    for record in records:
        ProbeWriter(run.paths.probes).append(record)


def test_outcomes_become_events_once_and_the_best_is_pointed_to(run: Run) -> None:
    for step in (20, 40, 60):
        save_drafter(run, step)
    child = QuietChild()
    watch = watch_of(run, child)
    watch.tick()
    assert child.wanted
    append(run, measured(20, counted=15), measured(40, counted=20))
    watch.tick()
    assert read_pointer(run.paths.checkpoints_dir, BEST) == 40
    append(run, measured(60, counted=20))
    watch.tick()
    watch_of(run, child).tick()  # as a supervisor that was started again
    assert [(e["event"], e["step"], e["details"]["acceptance_length"]) for e in events(run)] == [
        ("acceptance_probe", 20, 1.5),
        ("acceptance_probe", 40, 2.0),
        ("acceptance_probe", 60, 2.0),
    ]
    assert read_pointer(run.paths.checkpoints_dir, BEST) == 40, "no better than the best is not the best"
    assert not child.wanted


def test_an_abandoned_best_makes_room(run: Run) -> None:
    save_drafter(run, 20)
    append(run, measured(20, counted=15))
    watch = watch_of(run, QuietChild())
    watch.tick()
    assert read_pointer(run.paths.checkpoints_dir, BEST) == 20
    run.paths.checkpoint(20).rename(run.paths.root / "aside")
    watch.tick()
    assert read_pointer(run.paths.checkpoints_dir, BEST) is None


def test_a_process_that_never_begins_is_given_up(run: Run) -> None:
    save_drafter(run, 20)
    watch = watch_of(run, QuietChild(is_hopeless=True))
    watch.tick()
    watch.tick()
    assert [(r.step, r.outcome) for r in read_probes(run.paths.probes)] == [(20, "failed")]
    assert "died 3 times" in events(run)[0]["details"]["reason"]


def test_a_process_that_cannot_begin_because_somebody_else_probes_is_not_given_up(run: Run) -> None:
    save_drafter(run, 20)
    child = QuietChild(is_hopeless=True)
    with hold_probes(run.paths):
        watch_of(run, child).tick()
    assert outcome_pairs(run) == []
    assert not child.is_hopeless, "it begins again"


def test_a_probe_of_one_prompt_is_taken_in_without_an_interval(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    save_drafter(run, 20)
    record = measured(20, counted=25, identity="p")
    assert record.figures is not None
    with hold_probes(run.paths) as writer:
        writer.append(replace(record, figures=replace(record.figures, acceptance_ci=None)))
    with caplog.at_level("INFO"):
        watch_of(run, QuietChild()).tick()
    assert "acceptance length of step-20: 2.500" in caplog.messages
    (event,) = events(run)
    assert event["details"]["acceptance_ci"] is None
    assert probe_metrics(event["details"]) == {"probe/acceptance_length": 2.5}


def test_trouble_is_logged_once_and_never_raised(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    save_drafter(run, 20)
    run.paths.probe_dir.mkdir()
    run.paths.probes.write_text('{"schema_version": 77}\n')
    watch = watch_of(run, QuietChild())
    watch.tick()
    watch.tick()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_the_process_is_restarted_with_waits_and_ended_when_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    now_s = 0.0

    class Process:
        code: int | None = None
        killed = False

        def __init__(self, command: list[str], **_more: object) -> None:
            started.append(command)
            self.pid = 0

        def poll(self) -> int | None:
            return self.code

        def kill(self) -> None:
            self.killed = True
            self.code = -9

    monkeypatch.setattr(watch_module.subprocess, "Popen", Process)
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now_s)
    nice: list[tuple[int, int, int]] = []
    own = 0
    monkeypatch.setattr(watch_module.os, "setpriority", lambda *arguments: nice.append(arguments))
    monkeypatch.setattr(watch_module.os, "getpriority", lambda *_arguments: own)
    child = _Child(run.paths, timeout_s=100.0, niceness=3)
    child.tick(wanted=False, lines=0)
    assert not started
    child.tick(wanted=True, lines=0)
    assert started[0][1:4] == ["-m", "dflash", "probe"]
    for seconds in (50.0, 99.0):
        now_s = seconds
        child.tick(wanted=True, lines=0)
    assert isinstance(child._process, Process)
    assert not child._process.killed
    now_s = 101.0
    process = child._process
    child.tick(wanted=True, lines=0)
    assert process.killed
    child.tick(wanted=True, lines=0)  # it is gone
    child.tick(wanted=True, lines=0)
    assert len(started) == 1, "not before its wait"
    now_s, own = 200.0, 7
    child.tick(wanted=True, lines=1)
    assert len(started) == 2
    assert not child.is_hopeless
    assert [values[-1] for values in nice] == [3, 7], "the niceness of probes, or the supervisor's own where that is higher"


def by_flow(run: Run, *, timeout_s: float) -> Run:
    probe = run.config.probe.model_copy(update={"runner": "flow", "timeout_s": timeout_s})
    return replace(run, config=run.config.model_copy(update={"probe": probe}))


def test_a_flow_s_outcomes_are_taken_in_and_no_process_is_started(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drafter(run, 20)
    monkeypatch.delattr(watch_module.subprocess, "Popen")
    watch = ProbeWatch(by_flow(run, timeout_s=1000.0))
    watch.tick()
    assert outcome_pairs(run) == []
    append(run, measured(20, counted=15))
    watch.tick()
    watch.close()
    assert [e["step"] for e in events(run)] == [20]
    assert read_pointer(run.paths.checkpoints_dir, BEST) == 20


def test_a_flow_that_never_comes_is_given_up_and_one_at_work_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now_s)
    save_drafter(run, 20)
    watch = ProbeWatch(by_flow(run, timeout_s=100.0))
    watch.tick()
    now_s = 99.0
    watch.tick()
    assert outcome_pairs(run) == []
    now_s = 150.0
    with hold_probes(run.paths):
        watch.tick()
    assert outcome_pairs(run) == [], "its lock says that a flow is at work"
    now_s = 251.0
    watch.tick()
    assert outcome_pairs(run) == [(20, "failed")]
    assert "automation" in read_probes(run.paths.probes)[0].reason
