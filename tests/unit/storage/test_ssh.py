"""Files behind ssh: what is asked for and no more, nothing for a missing file, an error for everything else."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import StorageError
from dflash.storage import RemoteFile, is_ssh, remote_file
from tests.support import fake_ssh

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_ssh.install(tmp_path / "bin", monkeypatch)


def remote(path: Path) -> RemoteFile:
    return RemoteFile(host="box", port=None, path=str(path), prefix=())


@pytest.mark.parametrize(("start", "length"), [(0, 10), (0, len(CONTENT)), (100, 5000), (len(CONTENT) - 3, 99), (len(CONTENT), 5)])
def test_any_range_is_the_files_own_bytes(start: int, length: int, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(CONTENT)
    assert remote(file).read(start=start, length=length) == CONTENT[start : start + length]


def test_behind_the_end_there_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"abc")
    assert remote(file).read(start=9, length=5) == b""


def test_the_rest_of_a_large_file_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as large:
        large.truncate(2**31)  # sparse: two gigabytes that nobody wants
    assert remote(file).read(start=2**20, length=4096) == bytes(4096)


def test_a_missing_file_is_none_and_a_folder_an_error(tmp_path: Path) -> None:
    assert remote(tmp_path / "none").read(start=0, length=5) is None
    with pytest.raises(StorageError, match=r"cannot be read: .*Is a directory"):
        remote(tmp_path).read(start=0, length=5)


def test_a_failing_prefix_is_an_error_that_names_its_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"abc")
    wrong = RemoteFile(host="box", port=None, path=str(file), prefix=("pct", "exec", "999", "--"))
    with pytest.raises(StorageError, match="exit code 64"):
        wrong.read(start=0, length=5)


def test_the_words_of_the_error_cannot_steer_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "evil" / "ssh"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf 'bad \\033[31m thing\\n' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    with pytest.raises(StorageError) as caught:
        remote(tmp_path / "x").read(start=0, length=1)
    assert "\x1b" not in str(caught.value)
    assert "bad" in str(caught.value)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=30), st.lists(st.text("a b'\";$`\\", min_size=1))
)
def test_every_word_of_the_remote_command_survives_the_remote_shell(name: str, prefix: list[str]) -> None:
    file = RemoteFile(host="box", port=22, path=f"/{name}", prefix=tuple(prefix))
    command = file.command(41)
    assert command[0] == "ssh"
    assert command[-3:-1] == ["--", "box"]
    assert shlex.split(command[-1]) == [*prefix, "env", "LC_ALL=C", "tail", "-c", "+42", "--", f"/{name}"]


@pytest.mark.parametrize(
    ("address", "host", "port", "path"),
    [
        ("ssh://box/var/log/x", "box", None, "/var/log/x"),
        ("ssh://me@box:2222/a%20b", "me@box", 2222, "/a b"),
        ("ssh://alias/~user/x", "alias", None, "/~user/x"),
    ],
)
def test_addresses(address: str, host: str, port: int | None, path: str) -> None:
    found = remote_file(address, prefix=())
    assert (found.host, found.port, found.path) == (host, port, path)
    assert is_ssh(address)
    assert not is_ssh(path)
    assert found.sibling("config.yaml").path == f"{path.rpartition('/')[0]}/config.yaml"
