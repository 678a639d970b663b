"""`python -m dflash health RUN`: a run's folder through the same command, with its state, its page and its supervisor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.cli import health_commands, main
from dflash.config import dump_config, parse_config
from dflash.errors import EXIT_BLIND, EXIT_OK, EXIT_UNHEALTHY, EXIT_USER_ERROR
from dflash.records import RunPaths
from tests.support.log_simulator import Record, nonfinite, simulate_run, write_log

pytestmark = pytest.mark.usefixtures("without_pictures")
STEPS = 260


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose configuration expects the constant learning rate that the logs below have; nobody trains it."""
    run = RunPaths(tmp_path / "demo-001")
    run.root.mkdir()
    text = f"run: {{root: {tmp_path}}}\ntarget: {{mask_token: x}}\ndata: {{num_conversations: 3}}\n"
    schedule = "train: {schedule: constant, lr: 1.0e-3, warmup_frac: 0.0}\n"
    run.config.write_text(dump_config(parse_config(text + schedule, origin="test")))
    return run


def healthy_log() -> list[Record]:
    return simulate_run(seed=3, steps=STEPS, lr=lambda _step: 1e-3)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["health", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.draws
def test_a_healthy_run_writes_its_report_and_a_page_where_asked(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(paths.log, healthy_log())
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, paths.root, "--html", page)
    assert code == EXIT_OK
    assert out.startswith("HEALTHY  demo-001")
    assert "Queues" in page.read_text()
    assert page.read_text().count("data:image/png") == (paths.health_dir / "report.html").read_text().count("data:image/png")
    assert (paths.health_dir / "pictures" / "loss.png").is_file()


def test_a_log_that_is_not_there_yet_is_blind(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, paths.root)
    assert code == EXIT_BLIND
    assert "holds no step yet" in out


def test_a_dead_run_ends_the_watching_at_once(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(paths.log, healthy_log())

    def never(_seconds: float) -> None:
        pytest.fail("nobody writes the log any more")

    monkeypatch.setattr(health_commands.time, "sleep", never)
    code, out, _ = run(capsys, paths.root, "--watch", "--json")
    assert code == EXIT_OK
    assert len(out.splitlines()) == 1


def test_a_mapping_makes_no_sense_for_a_run(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, paths.root, "--map", "loss=ce")
    assert code == EXIT_USER_ERROR
    assert "leave out --map" in err


def test_only_the_newer_part_can_be_looked_at(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(paths.log, nonfinite(healthy_log(), steps=[40], skipped=True))
    _, out, _ = run(capsys, paths.root, "--json")
    assert any(f["detector"] == "non-finite" for f in json.loads(out)["findings"])
    code, out, _ = run(capsys, paths.root, "--since-step", 100, "--json")
    assert code == EXIT_OK
    assert not any(f["detector"] == "non-finite" for f in json.loads(out)["findings"])


def test_our_log_inside_a_run_can_be_judged_by_its_path(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(paths.log, nonfinite(healthy_log(), steps=range(200, STEPS), skipped=False))
    code, out, _ = run(capsys, paths.log, "--json")
    report = json.loads(out)
    assert code == EXIT_UNHEALTHY
    assert report["run"] == "demo-001/train_log.jsonl"
    assert next(row for row in report["detectors"] if row["detector"] == "lr mismatch")["checked"] == STEPS
    assert not paths.health_dir.exists(), "a log alone leaves nothing behind"


@pytest.mark.parametrize("prefix", ["'open", '"'])
def test_a_prefix_with_an_open_quotation_mark_is_an_error(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ssh://box/x/y", "--remote-prefix", prefix)
    assert code == EXIT_USER_ERROR
    assert "--remote-prefix" in err
