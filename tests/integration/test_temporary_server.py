"""The server of a flow that runs as a plain program: it is really there, really alone, and really gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from dflash.errors import DflashError
from tasks import server
from tasks.server import answers, temporary_server
from tests.support.processes import command_of


@pytest.fixture(autouse=True)
def _own_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "server" in command_of(child)]


def test_it_answers_on_loopback_in_a_session_of_its_own_and_is_gone_afterwards(tmp_path: Path) -> None:
    with temporary_server() as api_url:
        assert answers(api_url)
        (process,) = servers()
        assert os.getsid(process.pid) != os.getsid(0), "Ctrl-C on the program's terminal does not reach it"
        family = [process, *process.children(recursive=True)]
        listening = {c.laddr for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", urlsplit(api_url).port)}
    assert not answers(api_url)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    assert (tmp_path / "prefect" / "prefect.db").is_file(), "the history stays where the next server finds it"


def test_a_server_that_does_not_come_up_is_one_clear_error_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_TIMEOUT_S", 0.0)

    def begin() -> None:
        with temporary_server():
            pytest.fail("it cannot be up already")

    with pytest.raises(DflashError, match="did not start"):
        begin()
    assert servers() == []
