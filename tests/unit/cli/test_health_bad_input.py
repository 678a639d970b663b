"""What is no log, or a strange one, on the command line: one clear message, the right exit code, and never a long wait."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.cli import main
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_USER_ERROR, EXIT_WATCH
from dflash.health.foreign_rows import LONGEST_LINE_BYTES
from tests.support.health_runs import healthy
from tests.support.log_simulator import change_steps, log_lines

Files = dict[str, Callable[[Path], object]]
ENDLESS = LONGEST_LINE_BYTES + 10
RUN = list(healthy(seed=6, steps=700))[:250]


def outcome(capsys: pytest.CaptureFixture[str], log: Path) -> tuple[int, str, str]:
    code = main(["health", str(log)])
    told = capsys.readouterr()
    return code, told.out, " ".join(told.err.split())


REFUSED: Files = {
    "cannot be read: not a file": os.mkfifo,
    "its first line is over 4 MiB": lambda path: path.write_bytes(b"a" * ENDLESS),
    "is one JSON value of over 32 MiB": lambda path: path.write_bytes(b'{"loss": 1.0, "x": "' + b"a" * (33 << 20) + b'"}\n'),
    "is a folder without train_log.jsonl": Path.mkdir,
    "there is no log": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_log_is_refused_at_once(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    REFUSED[message](log)
    code, out, err = outcome(capsys, log)
    assert (code, out) == (EXIT_USER_ERROR, "")
    assert message in err
    assert "-> " in err


def test_an_endless_line_among_good_ones_is_skipped_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    lines = log_lines(RUN).splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:200]) + b'{"kind":"step","x":"' + b"a" * ENDLESS + b'"}\n' + b"".join(lines[200:]))
    code, out, _ = outcome(capsys, log)
    assert code == EXIT_WATCH
    assert f"a line of over {LONGEST_LINE_BYTES} bytes" in " ".join(out.split())
    assert "100.0 % in the log" in out


def test_records_from_the_future_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(log_lines([replace(record, wall_time_s=record.wall_time_s + 1e10) for record in RUN]))
    code, out, _ = outcome(capsys, log)
    assert code == EXIT_WATCH
    assert "in the future: two clocks disagree" in " ".join(out.split())


def test_negative_steps_are_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(
        log_lines(change_steps(RUN, lambda record: replace(record, step=-record.step) if record.step > 200 else record))
    )
    code, out, _ = outcome(capsys, log)
    assert code == EXIT_WATCH
    assert "unreadable line" in out


def test_a_log_without_any_loss_is_blind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(
        b"".join(
            json.dumps({**json.loads(line), "ce": None, "micro_batches": []}).encode() + b"\n"
            for line in log_lines(RUN).splitlines()
            if b'"kind":"step"' in line
        )
    )
    code, out, _ = outcome(capsys, log)
    assert code == EXIT_BLIND
    assert "covers only 0.0 % of the steps" in out


def test_numbers_near_the_largest_are_drawn_without_a_word_from_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_bytes(
        b"".join(b'{"step":%d,"loss":%s}\n' % (step, b"1e308" if step == 60 else b"2.0%d" % (step % 7)) for step in range(100))
    )
    assert main(["health", str(log), "--html", str(page)]) == EXIT_OK
    assert capsys.readouterr().err == ""
    assert [str(warning.message) for warning in recwarn] == []
    assert page.read_text().startswith("<!doctype html>")
