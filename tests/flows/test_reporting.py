"""Progress lines and artifacts, and programs: what a person sees and how it ends."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from dflash.errors import HaltedError
from dflash.train.progress import TrainProgress
from tasks import reporting
from tasks.local import run_program
from tasks.train_drafter import _detail


class Recorder:
    """Stands in for Prefect's artifact calls, and for the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[float] = []
        self.updated: list[float] = []
        self.now_s = 100.0
        self.away = False
        monkeypatch.setattr(reporting, "create_progress_artifact", self._create)
        monkeypatch.setattr(reporting, "update_progress_artifact", self._update)
        monkeypatch.setattr(reporting.time, "monotonic", lambda: self.now_s)

    def _create(self, *, progress: float, key: str, description: str) -> Any:
        if self.away:
            raise ConnectionError("no server")
        self.created.append(progress)
        return uuid4()

    def _update(self, *, artifact_id: Any, progress: float, description: str) -> None:
        self.updated.append(progress)


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_lines_come_every_few_seconds_artifacts_less_often_and_the_end_once(
    prefect: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    report = reporting.ProgressReport("x")
    with caplog.at_level(logging.INFO, logger="tasks"):
        for step in range(101):
            report("training", step, 100)
            prefect.now_s += 0.5
        for _ in range(20):
            report("training", 100, 100)
            prefect.now_s += 0.5
    lines = lines_of(caplog)
    assert len(lines) == 11, "50 s: one line every 5 s, and the last"
    assert "100/100" in lines[-1]
    assert len(prefect.created) == 1
    assert 4 <= len(prefect.updated) <= 7, "60 s: never more often than every 10 s, but for the end"
    assert prefect.updated[-1] == 100.0


def test_each_label_begins_with_a_line_of_its_own(prefect: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    report = reporting.ProgressReport("x")
    with caplog.at_level(logging.INFO, logger="tasks"):
        report("answers", 0, 3)
        report("answers", 3, 3)
        report("writing", 1, 1)
    assert [line.split()[0] for line in lines_of(caplog)] == ["answers", "answers", "writing"]


def test_a_prefect_that_is_away_costs_a_warning_and_the_work_goes_on(prefect: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    prefect.away = True
    report = reporting.ProgressReport("x")
    with caplog.at_level(logging.INFO, logger="tasks"):
        report("answers", 0, 3)
        report("answers", 3, 3)
    assert len(lines_of(caplog)) == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["artifact x could not be stored in Prefect: ConnectionError: no server"]


def test_a_line_of_training_fits_on_eighty_columns_and_holds_no_control_characters(
    prefect: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    detail = _detail(TrainProgress(800, 800, 12.34, 7.99, 9999.0, 999.0))
    with caplog.at_level(logging.INFO, logger="tasks"):
        reporting.ProgressReport("x").show("training", 800, 800, detail=detail)
    line = f"12:00:00  {lines_of(caplog)[0]}"
    assert len(line) <= 80
    assert line.isprintable()
    assert _detail(TrainProgress(0, 800, None, None, None, None)) == ""


def test_a_program_ends_with_the_errors_own_code_and_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")

    def halted() -> None:
        raise HaltedError("run x was halted", remedy="read the report")

    started: list[str] = []
    assert run_program(lambda: started.append("body"), check=halted) == 21
    assert started == [], "what can be checked is checked before anything starts"
    assert run_program(halted, check=lambda: None) == 21
    captured = capsys.readouterr()
    assert captured.err.count("error: run x was halted\n  -> read the report") == 2
    assert run_program(lambda: None, check=lambda: None) == 0


@pytest.fixture
def healthy_server() -> Iterator[str]:
    """Something that answers like a Prefect server's health endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
        server.shutdown()


def api_urls_seen() -> tuple[list[str | None], Any]:
    seen: list[str | None] = []
    return seen, lambda: seen.append(get_current_settings().api.url)


def test_the_configured_server_is_used_if_it_answers_and_a_temporary_one_otherwise(
    healthy_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    seen, look = api_urls_seen()
    with temporary_settings({PREFECT_API_URL: healthy_server}):
        run_program(look, check=lambda: None)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        run_program(look, check=lambda: None)
    assert seen == [healthy_server, None]


def test_a_server_that_the_environment_names_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    seen, look = api_urls_seen()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        run_program(look, check=lambda: None)
    assert seen == ["http://127.0.0.1:1/api"]
