"""Logs elsewhere: over ssh only what is new is fetched, a changed past is noticed, and a silent host is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.cli.log_sources import LOG_NAME, SshLog, StoreLog, source_of
from dflash.errors import DataError, StorageError
from dflash.health import LogCursor, read_new, read_new_from, start_cursor
from dflash.health.lines import LogItem, LogReplaced, StepLine, TornLine
from dflash.storage import open_store, remote_file
from tests.support import fake_ssh
from tests.support.log_simulator import log_lines, simulate_run

LOG = log_lines(simulate_run(seed=1, steps=60, lr=lambda step: 1e-3))
BLOCK = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log in a folder whose name would break an unquoted command."""
    folder = tmp_path / "a run; touch 'x' $HOME"
    folder.mkdir()
    path = folder / LOG_NAME
    path.write_bytes(LOG)
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_ssh.install(tmp_path / "bin", monkeypatch)


def ssh_log(path: Path, *, prefix: tuple[str, ...] = ()) -> SshLog:
    address = "ssh://user@box:2222" + str(path).replace(" ", "%20").replace(";", "%3B")
    return SshLog(remote_file(address, prefix=prefix))


def store_log(path: Path) -> StoreLog:
    return StoreLog(open_store(str(path.parent)), path.name)


def read_all(source: SshLog | StoreLog, cursor: LogCursor, *, max_bytes: int = BLOCK) -> tuple[list[LogItem], LogCursor]:
    items: list[LogItem] = []
    while True:
        result = read_new_from(source, cursor, max_bytes=max_bytes)
        items += result.items
        cursor = result.cursor
        if not result.more:
            return items, cursor


@pytest.mark.parametrize("kind", ["ssh", "store"])
@pytest.mark.parametrize("max_bytes", [3000, BLOCK])
def test_a_source_gives_what_the_local_file_gives(kind: str, max_bytes: int, log: Path, calls: Path) -> None:
    source = ssh_log(log) if kind == "ssh" else store_log(log)
    items, cursor = read_all(source, start_cursor(), max_bytes=max_bytes)
    assert items == list(read_new(log, start_cursor(), max_bytes=BLOCK).items)
    assert cursor.offset == len(LOG)


@pytest.mark.parametrize("kind", ["ssh", "store"])
def test_only_what_is_new_is_read_and_a_changed_past_is_noticed(kind: str, log: Path, calls: Path) -> None:
    source = ssh_log(log) if kind == "ssh" else store_log(log)
    lines = LOG.splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:40]))
    _, cursor = read_all(source, start_cursor())
    assert read_all(source, cursor) == ([], cursor)
    with log.open("ab") as file:
        file.write(lines[40] + lines[41][:30])
    result = read_new_from(source, cursor, max_bytes=BLOCK)
    assert [item.step for item in result.items if isinstance(item, StepLine)] == [39]
    assert result.pending_bytes == 30
    assert result.bytes_read <= 4096 + len(lines[40]) + 30
    log.write_bytes(b"".join(lines[:10]))
    items, cursor = read_all(source, result.cursor)
    assert items[0] == LogReplaced(reason="truncated")
    log.write_bytes(b"".join([*lines[20:40]]))
    items, cursor = read_all(source, cursor)
    assert isinstance(items[0], LogReplaced)
    log.unlink()
    assert read_all(source, cursor)[0] == [LogReplaced(reason="removed")]
    assert read_all(source, start_cursor()) == ([], start_cursor())


def test_two_writers_and_torn_lines_are_seen_through_ssh_too(log: Path, calls: Path) -> None:
    lines = LOG.splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:5], lines[5][:40], *lines[6:8]]))
    items, _ = read_all(ssh_log(log), start_cursor())
    assert [type(item) for item in items].count(TornLine) == 1


def test_the_remote_command_is_quoted_and_the_prefix_comes_first(log: Path, calls: Path) -> None:
    items, _ = read_all(ssh_log(log, prefix=("pct", "exec", "200", "--")), start_cursor())
    assert len(items) == len(LOG.splitlines())
    (call,) = calls.read_text().splitlines()
    assert "-p 2222 -- user@box pct exec 200 -- env LC_ALL=C tail -c +1 -- " in call
    assert not (Path.cwd() / "x").exists()


def test_the_configuration_beside_a_log_is_found_wherever_it_lies(log: Path, calls: Path) -> None:
    for source in (ssh_log(log), store_log(log), source_of(str(log), remote_prefix=())):
        assert source.beside("config.yaml") is None
    (log.parent / "config.yaml").write_text("a: 1\n")
    for source in (ssh_log(log), store_log(log), source_of(str(log.parent), remote_prefix=())):
        assert source.beside("config.yaml") == b"a: 1\n"


def test_a_host_that_does_not_answer_is_an_error_and_not_an_empty_log(calls: Path) -> None:
    source = source_of("ssh://down/var/log/train_log.jsonl", remote_prefix=())
    with pytest.raises(StorageError, match=r"ssh to down failed: .*No route to host"):
        source.read_at(0, before=0, max_bytes=10)


def test_a_folder_behind_ssh_is_told(log: Path, calls: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        source_of(f"ssh://box{log.parent.parent}", remote_prefix=()).read_at(0, before=0, max_bytes=10)


def test_without_an_ssh_client_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError, match="ssh cannot be started"):
        source_of("ssh://box/x/y", remote_prefix=()).read_at(0, before=0, max_bytes=10)


@pytest.mark.parametrize(
    "address", ["ssh://", "ssh://host", "ssh://host/", "ssh://-oProxyCommand=x/y", "ssh://h:99999999/x", "ssh:///x"]
)
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(StorageError, match=r"write ssh://host"):
        source_of(address, remote_prefix=())


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no log"):
        source_of(str(tmp_path / "none.jsonl"), remote_prefix=())
    with pytest.raises(DataError, match=f"without {LOG_NAME}"):
        source_of(str(tmp_path), remote_prefix=())
    with pytest.raises(DataError, match="names a bucket"):
        source_of("s3://bucket", remote_prefix=())
