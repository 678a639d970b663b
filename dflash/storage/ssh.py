"""A file on another machine, read over ssh: only what is asked for crosses the network.

Invariant: no shell runs here (an argument list), and every word of the remote command is quoted for the shell that ssh
itself starts there. Nothing is written on the other side, no password is asked for, and a host that does not answer is an
error, never an empty file.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, cast
from urllib.parse import unquote, urlsplit

from dflash.errors import StorageError

SSH_SCHEME = "ssh"
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_SSH_FAILED = 255
_CHUNK_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200


def is_ssh(uri: str) -> bool:
    """Whether the address names a file on another machine."""
    return urlsplit(uri).scheme == SSH_SCHEME


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind ssh.

    Attributes:
        host: `host` or `user@host`, as ssh takes it (aliases of its configuration included).
        port: None for ssh's own default.
        path: absolute, on the other machine.
        prefix: words put before the remote command, such as `pct exec 200 --`.
    """

    host: str
    port: int | None
    path: str
    prefix: tuple[str, ...]

    @property
    def uri(self) -> str:
        """`ssh://host/path`."""
        return f"ssh://{self.host}{'' if self.port is None else f':{self.port}'}{self.path}"

    def sibling(self, name: str) -> RemoteFile:
        """Another file in the same folder."""
        return RemoteFile(self.host, self.port, f"{self.path.rpartition('/')[0]}/{name}", self.prefix)

    def command(self, start: int) -> list[str]:
        """The local command whose output is the file from byte `start` on."""
        remote = [*self.prefix, "env", "LC_ALL=C", "tail", "-c", f"+{start + 1}", "--", self.path]
        port = () if self.port is None else ("-p", str(self.port))
        return ["ssh", *_OPTIONS, *port, "--", self.host, shlex.join(remote)]

    def read(self, *, start: int, length: int) -> bytes | None:
        """Up to `length` bytes from `start` on; None if there is no such file.

        Raises:
            StorageError: ssh fails, or the file cannot be read.
        """
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(self.command(start), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            except OSError as error:
                raise StorageError(f"ssh cannot be started: {error.strerror}", remedy="install the ssh client") from error
            with process, cast("IO[bytes]", process.stdout) as output:
                data = bytearray()
                while len(data) < length and (chunk := output.read(min(_CHUNK_BYTES, length - len(data)))):
                    data += chunk
                cut = len(data) >= length
                if cut:
                    process.terminate()  # the rest is not wanted
            errors.seek(0)
            said = errors.read(_SHOWN_CHARACTERS * 4).decode("utf-8", errors="replace").strip()
        if cut or process.returncode == 0:
            return bytes(data)
        if process.returncode != _SSH_FAILED and "No such file" in said:
            return None
        raise self._failure(process.returncode, said)

    def _failure(self, code: int, said: str) -> StorageError:
        shown = " ".join("".join(c if c.isprintable() else " " for c in said).split())[-_SHOWN_CHARACTERS:]
        if code == _SSH_FAILED:
            return StorageError(
                f"ssh to {self.host} failed: {shown or 'no message'}", remedy="try `ssh` by hand; keys must work without a password"
            )
        return StorageError(
            f"{self.uri} cannot be read: {shown or f'exit code {code}'}", remedy="give the path of a readable file on that machine"
        )


def remote_file(uri: str, *, prefix: Sequence[str]) -> RemoteFile:
    """The file that `ssh://[user@]host[:port]/path` names.

    Raises:
        StorageError: the address is not of that form.
    """
    remedy = "write ssh://host/absolute/path or ssh://user@host:port/absolute/path"
    parts = urlsplit(uri)
    try:
        port = parts.port
    except ValueError as error:
        raise StorageError(f"{uri} has no valid port", remedy=remedy) from error
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    path = unquote(parts.path)
    if not host or host.startswith("-") or len(path) < 2 or not path.isprintable() or not host.isprintable():
        raise StorageError(f"{uri} names no file on another machine", remedy=remedy)
    return RemoteFile(host=host.removesuffix(":"), port=port, path=path, prefix=tuple(prefix))
