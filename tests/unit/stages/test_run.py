"""Which folder a configuration trains in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.config import Config, parse_config
from dflash.errors import DflashError, RunStateError
from dflash.records import ControlRequest, RollbackPlan, RunPaths, to_json
from dflash.stages import list_runs, open_run, reopen_run
from dflash.stages.run import note_reused, read_reused
from dflash.train.requests import acknowledge


def config_in(root: Path, **overrides: object) -> Config:
    text = f"run: {{name: demo, root: {root}}}\ntarget: {{mask_token: '<|mask|>'}}\ndata: {{num_conversations: 3}}"
    return parse_config(text, origin="test", overrides=[f"{key}={value}" for key, value in overrides.items()])


def test_runs_are_numbered_and_an_unfinished_one_is_continued(tmp_path: Path) -> None:
    first = open_run(config_in(tmp_path))
    assert (first.name, first.resumed) == ("demo-001", False)
    again = open_run(config_in(tmp_path))
    assert (again.name, again.resumed) == ("demo-001", False), "nothing was logged yet, so there is nothing to resume"
    first.paths.log.write_text("")
    assert open_run(config_in(tmp_path)).resumed
    first.paths.summary.write_text("{}")
    assert open_run(config_in(tmp_path)).name == "demo-002"


def test_another_configuration_gets_its_own_folder(tmp_path: Path) -> None:
    open_run(config_in(tmp_path))
    assert open_run(config_in(tmp_path, **{"train.lr": 0.001})).name == "demo-002"


def test_a_setting_that_only_observes_continues_the_run(tmp_path: Path) -> None:
    open_run(config_in(tmp_path))
    assert open_run(config_in(tmp_path, **{"health.check_interval_s": 1.0})).name == "demo-001"


def test_a_folder_whose_configuration_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    run = open_run(config_in(tmp_path))
    run.paths.config.write_text("from: another version\n")
    assert open_run(config_in(tmp_path)).name == "demo-002"
    assert run.paths.config.read_text() == "from: another version\n"


def test_a_name_that_continues_another_one_is_not_confused_with_it(tmp_path: Path) -> None:
    (tmp_path / "demo-long-007").mkdir()
    (tmp_path / "demo-9").mkdir()
    assert open_run(config_in(tmp_path)).name == "demo-001"


def test_a_run_that_is_being_trained_is_refused(tmp_path: Path) -> None:
    run = open_run(config_in(tmp_path))
    code = (
        "import sys; from pathlib import Path; from dflash.records import RunPaths; from dflash.train.runs import hold_run\n"
        "with hold_run(RunPaths(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.paths.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunStateError, match="being trained right now"):
            open_run(config_in(tmp_path))
    finally:
        holder.communicate()
    assert open_run(config_in(tmp_path)).name == "demo-001", "the lock dies with its process"


def test_a_halted_run_is_not_continued_as_if_it_had_crashed(tmp_path: Path) -> None:
    run = open_run(config_in(tmp_path))
    request = ControlRequest(key="halt-1", action="halt", reason="loss is not finite", requested_at="now", requested_by="test")
    run.paths.requests_dir.mkdir(parents=True)
    (run.paths.requests_dir / "halt-1.json").write_text(to_json(request))
    assert open_run(config_in(tmp_path)).name == "demo-001", "asked for, but not carried out"
    acknowledge(run.paths, "halt-1", outcome="the trainer is stopped")
    with pytest.raises(RunStateError, match=r"halted by test: loss is not finite") as by_hand:
        open_run(config_in(tmp_path))
    assert "halt-1.json" in by_hand.value.remedy
    (run.paths.requests_dir / "halt-1.json").unlink()
    assert open_run(config_in(tmp_path)).name == "demo-001"
    plan = RollbackPlan("s", "halt", 4, 0, 70, 75, 70, None, (), None, "loss is not finite")
    (run.paths.requests_dir / "s.json").write_text(to_json(replace(request, key="s", plan=plan)))
    acknowledge(run.paths, "s", outcome="the run is halted")
    with pytest.raises(RunStateError, match=r"loss is not finite") as decided:
        open_run(config_in(tmp_path))
    assert "remove" not in decided.value.remedy, "the ledger would halt it all the same"


def test_a_configuration_that_cannot_work_leaves_no_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path / "runs", **{"data.source": "files", "data.files": f"[{tmp_path}/none.jsonl]"})
    with pytest.raises(DflashError, match=r"none\.jsonl"):
        open_run(config)
    assert not (tmp_path / "runs").exists()


def test_reopening_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunStateError, match="not a run"):
        reopen_run(tmp_path)
    run = open_run(config_in(tmp_path))
    assert reopen_run(run.paths.root).config == run.config
    assert list_runs(tmp_path) == [run.paths.root]


def test_what_was_reused_is_remembered_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_reused(paths) == []
    for _ in range(2):
        note_reused(paths, "data set")
    note_reused(paths, "plan")
    assert read_reused(paths) == ["data set", "plan"]
