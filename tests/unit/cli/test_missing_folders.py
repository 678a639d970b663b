"""`export`, `import`, `audit` and `doctor` on what is not there or is something else: one error, a remedy, exit code 1 or 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli import main
from dflash.errors import EXIT_USER_ERROR


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Something of every kind that a person may name by mistake."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.json").write_bytes(b"\xff\xfe\x00" * 50)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    names = ("empty", "file", "binary", "model", "absent", "out")
    return {name: str(tmp_path / name) for name in names}


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The one JSON object of a command that must fail, after the same command told it in words."""
    assert main(command) == EXIT_USER_ERROR
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and "\n  -> " in told.err
    assert "Traceback" not in told.err
    assert main([*command, "--json"]) == EXIT_USER_ERROR
    found: dict[str, str] = json.loads(capsys.readouterr().out)
    assert found["what"] and found["remedy"]
    return found


@pytest.mark.parametrize("kind", ["empty", "file", "binary", "model", "absent"])
def test_export_needs_a_run(kind: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(["export", places[kind], "--output", places["out"]], capsys)
    assert places[kind] in found["what"] and "no run with a durable checkpoint" in found["what"]
    assert not Path(places["out"]).exists()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("empty", "cannot be read"), ("file", "cannot be read"), ("binary", "cannot be read"), ("absent", "cannot be read"),
        ("model", "every other mark of a drafter"),
    ],
)  # fmt: skip
def test_import_needs_a_published_drafter(
    kind: str, named: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(["import", places[kind], "--output", places["out"]], capsys)
    assert places[kind] in found["what"] and named in found["what"]
    assert not Path(places["out"]).exists()


@pytest.mark.parametrize("kind", ["empty", "file", "binary", "model", "absent"])
def test_the_audit_is_a_report_with_failures(kind: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", places[kind], "--json"]) == EXIT_USER_ERROR
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    assert {check["name"] for check in report["checks"]} == {"config", "files"}
    assert all(check["status"] == "fail" and check["remedy"] for check in report["checks"])
    assert main(["audit", places[kind]]) == EXIT_USER_ERROR
    assert capsys.readouterr().out.startswith("fail  config")


@pytest.mark.parametrize("command", ["import", "audit"])
@pytest.mark.parametrize("kind", ["empty", "file", "absent"])
def test_a_target_that_is_not_there_is_named(
    command: str, kind: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", places["out"]] if command == "import" else []
    found = refused([command, places["model"], *output, "--target", places[kind]], capsys)
    assert places[kind] in found["what"]
    assert "target" in found["remedy"]


@pytest.mark.parametrize("kind", ["empty", "file", "binary", "absent"])
def test_the_doctor_needs_a_configuration(kind: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(["doctor", places[kind]], capsys)
    assert places[kind] in found["what"] or found["what"]


def test_the_doctor_goes_on_where_no_run_can_be_written(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A file where the runs should go breaks three checks, and every other one is made all the same."""
    assert main(["doctor", "configs/demo.yaml", f"run.root={places['file']}", "--json"]) == EXIT_USER_ERROR
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in report["checks"]}
    assert {name for name, check in found.items() if check["status"] == "fail"} == {"storage", "clock"}
    assert all(found[name]["remedy"] for name in ("storage", "clock"))
    assert {found[name]["status"] for name in ("devices", "target", "rope", "ports", "attention", "leak test")} == {"ok"}


@pytest.mark.parametrize(
    "command",
    [["export"], ["export", "x"], ["import", "x"], ["audit"], ["doctor"], ["export", "x", "--output", "y", "--layout", "onnx"],
     ["export", "x", "--output", "y", "--dtype", "int8"]],
)  # fmt: skip
def test_a_command_that_is_not_whole_is_a_usage_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
