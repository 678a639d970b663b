"""`python -m dflash doctor`: exit code, one JSON object, a readable table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli import main
from dflash.errors import EXIT_OK, EXIT_USER_ERROR


def test_the_demo_is_examined_and_nothing_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "configs/demo.yaml", f"run.root={tmp_path / 'runs'}"]
    assert main([*command, "--json"]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(report["checks"]) == 17
    assert all(check["status"] in ("ok", "warn") for name, check in checks.items() if name != "data set")
    assert all(check["message"] for check in checks.values())
    assert list(tmp_path.iterdir()) == []
    assert main(command) == EXIT_OK
    out = capsys.readouterr().out.replace(str(tmp_path), "DIR")  # one word, however long this machine makes it
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "-> prepare one" in out


def test_a_failure_exits_with_1_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["target.mask_token=null", "target.mask_token_id=511", "drafter.target_layer_ids=[0, 3]"]
    assert main(["doctor", "configs/demo.yaml", f"run.root={tmp_path}", *wrong, "--json"]) == EXIT_USER_ERROR
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    failed = {check["name"] for check in report["checks"] if check["status"] == "fail"}
    assert failed == {"target"}
    assert {check["name"] for check in report["checks"] if check["status"] == "skip"} >= {"taps", "overfit"}
