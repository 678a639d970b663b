"""The command tree: help everywhere, JSON on request, exit codes that mean something."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash import errors
from dflash.cli import build_parser, main
from dflash.cli.health_commands import EXIT_CODES
from dflash.cli.output import progress_printer
from dflash.config import reference_markdown

CONFIG = "target: {mask_token: x}\ndata: {num_conversations: 3}\n"


def leaves(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield path, parser
    for group in groups:
        for name, child in group.choices.items():
            yield from leaves(child, (*path, name))


COMMANDS = dict(leaves(build_parser()))


def test_the_promised_groups_exist() -> None:
    assert {path[0] for path in COMMANDS} >= {"data", "train", "health", "evaluate", "config"}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*path, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert COMMANDS[path].description
    for action in COMMANDS[path]._actions:
        assert action.help, f"{path}: {action.dest} is not explained"


def test_no_command_pays_for_packages_that_it_does_not_use() -> None:
    code = "import sys, dflash.cli; dflash.cli.build_parser(); "
    code += "print(sorted({'torch', 'transformers', 'pyarrow', 'mlflow', 'boto3', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_usage_errors_exit_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "chek"])
    assert ended.value.code == 2


def test_exit_codes_are_distinct_and_named_in_the_help() -> None:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert len(set(codes.values())) == len(codes)
    epilog = build_parser().epilog or ""
    assert all(str(code) in epilog for code in codes.values())
    assert EXIT_CODES["unhealthy"] == errors.EXIT_UNHEALTHY != EXIT_CODES["healthy"] == 0


def test_show_prints_the_resolved_tree_with_the_override(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert main(["config", "show", str(tmp_path / "c.yaml"), "train.lr=3e-4", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["train"]["lr"] == 3e-4
    assert tree["data"]["num_conversations"] == 3


def test_the_doctor_fails_where_this_machine_cannot_run_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    root = f"run.root={tmp_path / 'runs'}"
    assert main(["config", "doctor", "configs/demo.yaml", root]) == errors.EXIT_OK
    assert "ok    target" in capsys.readouterr().out
    command = ["config", "doctor", "configs/demo.yaml", root, "cluster.device=cuda", "--json"]
    assert main(command) == errors.EXIT_USER_ERROR
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["devices"]["status"] == "fail"
    assert "2 CUDA devices" in checks["devices"]["message"]
    assert checks["devices"]["remedy"]
    assert not (tmp_path / "runs").exists()


def test_an_error_under_json_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(tmp_path / "none.yaml"), "--json"]) == errors.EXIT_USER_ERROR
    error = json.loads(capsys.readouterr().out)
    assert error["error"] == "ConfigError"
    assert error["remedy"]


def test_the_reference_is_written_where_asked(tmp_path: Path) -> None:
    assert main(["config", "reference", "--output", str(tmp_path / "reference.md")]) == 0
    assert (tmp_path / "reference.md").read_text() == reference_markdown()


def test_a_closed_pipe_is_no_crash() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dflash", "config", "reference"]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


class Terminal:
    """A stream that remembers what was written."""

    def __init__(self, *, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is buffered."""


def test_progress_rewrites_one_line_on_a_terminal_and_stays_plain_elsewhere() -> None:
    terminal, file = Terminal(tty=True), Terminal(tty=False)
    for stream in (terminal, file):
        show = progress_printer(stream)
        for done in range(101):
            show("work", done, 100)
    assert terminal.text.count("\n") == 1
    assert terminal.text.endswith("work: 100/100\n")
    assert "\r" not in file.text
    assert file.text.splitlines()[0] == "work: 0/100"
    assert file.text.splitlines()[-1] == "work: 100/100"
    assert len(file.text.splitlines()) == 11


def test_overrides_may_stand_behind_options_and_nothing_else_may(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "configs/demo.yaml", "train.epochs=2", "--json", "train.epochs=3", "train.lr=-1"]) == 1
    assert "train.lr" in capsys.readouterr().err, "the last one was read"
    for words in (["--nonsense=1"], ["stray"]):
        with pytest.raises(SystemExit) as refused:
            main(["config", "check", "configs/demo.yaml", "--json", *words])
        assert refused.value.code == 2
        assert f"unrecognized arguments: {words[0]}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "runs/a", "--json", "train.lr=1"])


def test_an_interrupted_command_tells_it_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash.cli.config_commands.read_config", interrupt)
    assert main(["config", "show", "configs/demo.yaml"]) == errors.EXIT_SIGINT
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "interrupted; run the same command again\n")


def test_a_folder_that_may_not_be_entered_is_told_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter every folder, so the refusal is made here, as the system makes it for others."""

    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    for command in (
        ["health"],
        ["checkpoint", "list"],
        ["checkpoint", "verify"],
        ["evaluate"],
        ["compare", "--reference"],
        ["audit"],
    ):
        assert main([*command, str(tmp_path)]) == errors.EXIT_USER_ERROR
        told = capsys.readouterr().err
        assert told.startswith("error: ") and "Permission denied" in told and "\n  -> " in told


def test_a_run_that_cannot_be_begun_where_it_should_is_told_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert main(["train", "configs/demo.yaml", f"run.root={tmp_path / 'file'}", "--json"]) == errors.EXIT_USER_ERROR
    told = json.loads(capsys.readouterr().out)
    assert told["error"] == "StorageError" and "Not a directory" in told["what"] and told["remedy"]


def test_a_fault_of_the_program_is_not_taken_for_one_of_the_disk() -> None:
    full = errors.as_storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert full is not None and "No space left on device" in full.what
    assert errors.as_storage_error(ConnectionResetError(errno.ECONNRESET, "reset")) is None


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "soon"])
@pytest.mark.parametrize("command", [["health", "x", "--watch", "--interval"], ["join", "x", "--node", "1", "--patience"]])
def test_a_time_to_wait_is_one(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, text])
    assert caught.value.code == 2
    assert f"{text!r} is no time to wait" in capsys.readouterr().err
