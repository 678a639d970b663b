"""`python -m dflash health`: any log, one verdict, an exit code that says it, and clear words for bad input."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli import health_commands, main
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_UNHEALTHY, EXIT_USER_ERROR, EXIT_WATCH
from dflash.tracking.store import MetricPoint, Store
from tests.support import fake_ssh
from tests.support import foreign_logs as logs
from tests.support.log_simulator import log_lines, nonfinite, simulate_run, write_log

CURVE = logs.curve(records=120, seed=4)
HOSTILE = "<script>alert(1)</script>"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["health", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def written(tmp_path: Path, data: bytes, name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_the_exit_code_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = [row | {"loss": float("nan")} for row in CURVE]
    backwards = [*CURVE, *CURVE[60:]]
    for rows, code, word in [
        (CURVE, EXIT_OK, "HEALTHY"),
        (backwards, EXIT_WATCH, "WATCH"),
        (nan, EXIT_UNHEALTHY, "UNHEALTHY"),
        (CURVE[:5], EXIT_BLIND, "BLIND"),
    ]:
        found, out, _ = run(capsys, written(tmp_path, logs.json_lines(rows)))
        assert (found, out.split()[0]) == (code, word)
    assert (EXIT_OK, EXIT_WATCH, EXIT_UNHEALTHY, EXIT_BLIND) == (0, 3, 4, 5)


def test_a_reader_who_has_seen_enough_changes_no_verdict(tmp_path: Path) -> None:
    log = written(tmp_path, logs.json_lines([row | {"loss": float("nan")} for row in CURVE]))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "dflash", "health", str(log)]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_UNHEALTHY
    assert "Traceback" not in done.stderr


def test_the_mapping_is_shown_and_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, logs.json_lines({"it": row["step"], "val": {"ce": row["loss"]}, "loss": 1e9} for row in CURVE))
    _, out, _ = run(capsys, log)
    assert "loss = loss (guessed" in out
    code, out, _ = run(capsys, log, "--map", "loss=val.ce,step=it", "--json")
    assert code == EXIT_OK
    assert json.loads(out)["stats"]["foreign"]["fields"] == {"step": "it", "loss": "val.ce"}


def test_our_log_alone_is_judged_without_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = nonfinite(simulate_run(seed=3, steps=200, lr=lambda step: 1.0), steps=range(150, 200), skipped=False)
    log = tmp_path / "some-run" / "train_log.jsonl"
    log.parent.mkdir()
    write_log(log, records)
    code, out, _ = run(capsys, log.parent, "--json")
    report = json.loads(out)
    assert code == EXIT_UNHEALTHY
    assert report["run"] == "some-run/train_log.jsonl"
    assert report["decision"] is None
    schedule = next(row for row in report["detectors"] if row["detector"] == "lr mismatch")
    assert (schedule["checked"], schedule["findings"]) == (0, 0)
    assert "no configuration" in schedule["note"]
    assert sorted(path.name for path in log.parent.iterdir()) == ["train_log.jsonl"], "nothing is written"


def test_a_log_behind_ssh(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_ssh.install(tmp_path / "bin", monkeypatch)
    log = written(tmp_path, logs.json_lines(CURVE))
    code, out, _ = run(capsys, f"ssh://box{log}", "--remote-prefix", "pct exec 200 --")
    assert code == EXIT_OK
    assert out.startswith(f"HEALTHY  ssh://box{log}"[:80])
    assert "pct exec 200 -- env" in calls.read_text()


def test_a_finding_is_explained_by_number_and_by_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, logs.json_lines(logs.spiked(CURVE, record=80, factor=3.0)))
    for which in ("1", "loss spike"):
        code, out, _ = run(capsys, log, "--explain", which)
        assert code == EXIT_OK
        assert "loss spike (" in out
        assert "Steps: 810 to 810" in out
        assert "Rule: log loss more than" in out
        assert "What to do:" in out
    code, out, err = run(capsys, log, "--explain", "99")
    assert (code, out) == (EXIT_USER_ERROR, "")
    assert "no finding '99'" in err


def test_the_page_is_one_file_that_loads_nothing_and_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": row["step"], f"{HOSTILE} - loss": row["loss"], HOSTILE: HOSTILE} for row in CURVE]
    log = written(tmp_path, logs.json_lines(rows), name="<b>&.jsonl")
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, log, "--html", page)
    assert code == EXIT_OK
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>&" not in text
    assert "\x1b" not in out


def test_what_lies_before_a_step_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"loss": float("nan")} if index == 30 else row for index, row in enumerate(CURVE)]
    log = written(tmp_path, logs.json_lines(rows))
    assert run(capsys, log)[0] == EXIT_UNHEALTHY
    code, out, _ = run(capsys, log, "--since-step", 900, "--json")
    assert code == EXIT_OK
    assert json.loads(out)["damage"] is None


def test_watching_prints_what_changes_and_stops_when_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = simulate_run(seed=3, steps=200, lr=lambda step: 1e-3)
    sick = nonfinite(records, steps=range(150, 200), skipped=False)
    lines = log_lines(sick).splitlines(keepends=True)
    log = written(tmp_path, b"".join(lines[:120]))
    parts = iter([lines[120:125], lines[125:170], lines[170:]])

    def grow(seconds: float) -> None:
        assert seconds == 0.5
        with log.open("ab") as file:
            file.write(b"".join(next(parts)))

    monkeypatch.setattr(health_commands.time, "sleep", grow)
    code, out, _ = run(capsys, log, "--watch", "--interval", 0.5, "--json")
    verdicts = [json.loads(line)["verdict"] for line in out.splitlines()]
    assert code == EXIT_UNHEALTHY
    assert verdicts[0] == "healthy"
    assert verdicts[-1] == "unhealthy"
    assert len(verdicts) <= 3, "an unchanged verdict is not repeated"


def test_watching_can_be_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(health_commands.time, "sleep", interrupt)
    assert run(capsys, written(tmp_path, logs.json_lines(CURVE)), "--watch")[0] == EXIT_OK


REFUSED = {
    "binary": (b"\x7fELF\x00\x01\x02", EXIT_USER_ERROR, "not a text file"),
    "prose": (b"hello\nworld\n", EXIT_USER_ERROR, "no log of a known form"),
    "schema": (b'{"kind": "step", "schema_version": 99, "step": 0}\n', EXIT_USER_ERROR, "schema version 99"),
    "no loss": (b'{"step": 1, "speed": 2}\n' * 9, EXIT_BLIND, "no field that looks like a training loss"),
    "cut off": (b'{"log_history": [{"loss": 1', EXIT_USER_ERROR, "is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_told_with_a_remedy(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, code, message = REFUSED[name]
    found, out, err = run(capsys, written(tmp_path, data))
    assert (found, out) == (code, "")
    assert message in err
    assert "-> " in err
    assert "Traceback" not in err


def test_an_empty_log_is_blind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, written(tmp_path, b""))
    assert code == EXIT_BLIND
    assert "holds no step yet" in out


def test_a_missing_log_and_a_plain_folder_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path / "none")[0] == EXIT_USER_ERROR
    code, _, err = run(capsys, tmp_path)
    assert code == EXIT_USER_ERROR
    assert "without train_log.jsonl" in err


def test_a_run_of_an_mlflow_store_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert run(capsys, "mlflow:abc")[0] == EXIT_USER_ERROR
    uri = f"sqlite:///{tmp_path}/store.db"
    store = Store(uri, experiment="theirs", artifact_root=tmp_path)
    run_id = store.begin_run(name="x", tags={})
    when_ms = 1_700_000_000_000
    points = [MetricPoint(f"train/{name}", row[name], row["step"], when_ms) for row in CURVE for name in ("loss", "grad_norm")]
    store.log_metrics(run_id, [*points, MetricPoint("train/loss", math.nan, 5000, when_ms)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, out, _ = run(capsys, f"mlflow:{run_id}", "--json")
    report = json.loads(out)
    assert code == EXIT_UNHEALTHY
    assert report["damage"]["onset_step"] == 5000
    assert report["stats"]["foreign"]["fields"]["loss"] == "train/loss"
    code, _, err = run(capsys, "mlflow:none")
    assert code == EXIT_USER_ERROR
    assert "Traceback" not in err


def test_acting_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, written(tmp_path, logs.json_lines(CURVE)), "--act")
    assert code == EXIT_USER_ERROR
    assert "--act needs a run's folder" in err


@pytest.mark.parametrize("start", [b'{"step": 1, "loss": ', b"step,loss\n"], ids=["json", "table"])
def test_a_single_line_of_a_hundred_megabytes_is_survived_in_little_memory(start: bytes, tmp_path: Path) -> None:
    log = tmp_path / "long"
    with log.open("wb") as file:
        file.write(start)
        for _ in range(100):
            file.write(b"1" * 2**20)
    limit = (
        "import resource, sys; from dflash.cli import main\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "code = main(['health', sys.argv[1]])\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grown < 150 * 1024, grown\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", limit, str(log)], capture_output=True, text=True, check=False)
    assert done.returncode in (EXIT_USER_ERROR, EXIT_BLIND), done.stderr
    assert "Traceback" not in done.stderr
