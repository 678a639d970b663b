"""Progress lines and artifacts, and programs: what a person sees and how it ends."""

from __future__ import annotations

import contextlib
import contextvars
import http.server
import logging
import threading
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from dflash.errors import HaltedError
from dflash.train.progress import TrainProgress
from tasks import patience, progress, reporting, server
from tasks.local import run_program
from tasks.train_drafter import _detail

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where")


class Recorder:
    """Stands in for Prefect's artifact calls and for the clock of the lines; `gate` holds the calls back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[float] = []
        self.called = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.now_s = 100.0
        self.away = False
        monkeypatch.setattr(progress, "create_progress_artifact", self._create)
        monkeypatch.setattr(progress, "update_progress_artifact", self._update)
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now_s)

    def _create(self, *, progress: float, key: str, description: str) -> Any:
        self._update(artifact_id=None, progress=progress, description=description)
        return uuid4()

    def _update(self, *, artifact_id: Any, progress: float, description: str) -> None:
        self.called.set()
        self.gate.wait(30)
        if self.away:
            raise ConnectionError("no server")
        self.stored.append(progress)


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_lines_come_every_few_seconds_and_the_end_once(prefect: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tasks"), progress.ProgressReport("x") as report:
        for step in range(101):
            report("training", step, 100)
            prefect.now_s += 0.5
        for _ in range(20):
            report("training", 100, 100)
            prefect.now_s += 0.5
    lines = lines_of(caplog)
    assert len(lines) == 11, "50 s: one line every 5 s, and the last"
    assert "100/100" in lines[-1]


def test_the_first_and_the_last_value_are_stored_and_what_came_between_is_not_queued(prefect: Recorder) -> None:
    prefect.gate.clear()
    with progress.ProgressReport("x") as report:
        report("training", 0, 100)
        assert prefect.called.wait(30)
        for step in range(101):
            report("training", step, 100)  # returns at once although the server hangs
        prefect.gate.set()
    assert prefect.stored == [0.0, 100.0]


def test_a_stage_that_reports_nothing_stores_nothing_and_a_failing_one_stores_its_last(prefect: Recorder) -> None:
    with progress.ProgressReport("x"):
        pass
    assert prefect.stored == []

    def fail() -> None:
        with progress.ProgressReport("x") as report:
            report("training", 30, 100)
            raise HaltedError("x", remedy="y")

    with pytest.raises(HaltedError):
        fail()
    assert prefect.stored == [30.0]


def test_a_server_that_hangs_does_not_hold_the_end_of_a_stage(prefect: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LAST_UPDATE_S", 0.01)
    prefect.gate.clear()
    with progress.ProgressReport("x") as report:
        report("training", 1, 2)
    assert prefect.stored == []
    prefect.gate.set()


def test_each_label_begins_with_a_line_of_its_own(prefect: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tasks"), progress.ProgressReport("x") as report:
        report("answers", 0, 3)
        report("answers", 3, 3)
        report("writing", 1, 1)
    assert [line.split()[0] for line in lines_of(caplog)] == ["answers", "answers", "writing"]


def test_a_prefect_that_is_away_costs_one_warning_and_the_work_goes_on(
    prefect: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "ARTIFACT_EVERY_S", 0.001)
    prefect.away = True
    with caplog.at_level(logging.INFO, logger="tasks"), progress.ProgressReport("x") as report:
        for step in range(4):
            prefect.called.clear()
            report("answers", step, 3)
            assert prefect.called.wait(30)
    assert len(lines_of(caplog)) == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["artifact x could not be stored in Prefect: ConnectionError: no server"]


def test_an_artifact_that_cannot_be_stored_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(reporting, "create_markdown_artifact", refuse)
    monkeypatch.setattr(reporting, "create_table_artifact", refuse)
    monkeypatch.setattr(reporting, "is_there", lambda _api_url: True)
    reporting.markdown("a", "text", description="")
    reporting.table("b", [{"x": 1}], description="")
    assert caplog.text.count("could not be stored in Prefect") == 2


def test_what_a_server_that_is_away_cannot_take_is_sent_once_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    there, stored = [False], []
    monkeypatch.setattr(reporting, "is_there", lambda _api_url: there[0])
    monkeypatch.setattr(reporting, "create_markdown_artifact", lambda text, **_rest: stored.append((text, WHERE.get())))
    WHERE.set("in the task")
    reporting.markdown("a", "one", description="")
    reporting.markdown("b", "two", description="")
    WHERE.set("in the flow")
    assert stored == []
    there[0] = True
    reporting.markdown("c", "three", description="")
    assert stored == [("one", "in the task"), ("two", "in the task"), ("three", "in the flow")], "in the order of the work"
    there[0] = False
    reporting.markdown("d", "four", description="")
    assert len(stored) == 3
    reporting.send_kept()
    reporting.send_kept()
    assert stored[3:] == [("four", "in the flow")]


def test_a_server_that_answers_is_not_waited_for_and_one_that_is_away_is(
    healthy_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with temporary_settings({PREFECT_API_URL: healthy_server}):
        assert patience.await_server()
    assert not caplog.records
    naps: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    monkeypatch.setattr(patience, "is_there", lambda _api_url: len(naps) > 100)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        assert patience.await_server()
    assert len(naps) == 101
    assert "the Prefect server is back" in caplog.text


def test_a_server_that_refuses_is_there_and_a_proxy_without_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(code: int) -> Any:
        def opened(*_arguments: Any, **_keywords: Any) -> Any:
            raise HTTPError("http://x", code, "", Message(), None)

        return opened

    for code, there in ((401, True), (404, True), (502, False), (503, False)):
        monkeypatch.setattr(server.urllib.request, "urlopen", answer(code))
        assert patience.is_there("http://127.0.0.1:1/api") is there
    assert not patience.is_there("not an address")


def test_a_line_of_training_fits_on_eighty_columns_and_holds_no_control_characters(
    prefect: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    detail = _detail(TrainProgress(800, 800, 12.34, 7.99, 9999.0, 999.0))
    with caplog.at_level(logging.INFO, logger="tasks"), progress.ProgressReport("x") as report:
        report.show("training", 800, 800, detail=detail)
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


def api_url_of_a_program() -> str | None:
    seen: list[str | None] = []
    assert run_program(lambda: seen.append(get_current_settings().api.url), check=lambda: None) == 0
    return seen[0]


def test_the_checkouts_own_server_is_used_while_it_answers_and_a_temporary_one_otherwise(
    healthy_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def temporary() -> Iterator[str]:
        yield "http://127.0.0.1:2/api"

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("DFLASH_LOCAL_DIR", str(tmp_path))
    monkeypatch.setattr("tasks.local.temporary_server", temporary)
    with temporary_settings({PREFECT_API_URL: healthy_server}):
        assert api_url_of_a_program() == "http://127.0.0.1:2/api", "a server that is not this checkout's is left alone"
    record = tmp_path / "prefect-api-url"
    record.write_text(f"{healthy_server}\n", encoding="utf-8")
    assert api_url_of_a_program() == healthy_server
    record.write_text("http://127.0.0.1:1/api\n", encoding="utf-8")
    assert api_url_of_a_program() == "http://127.0.0.1:2/api", "it was stopped without `down`"


def test_a_server_that_the_environment_names_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert api_url_of_a_program() == "http://127.0.0.1:1/api"
