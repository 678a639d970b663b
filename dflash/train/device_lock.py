"""One training a GPU: a lock file a device, for every run and every user of this machine.

Invariant: a device is held (flock) for as long as its supervisor lives, and the kernel frees it with the process, however that
dies. Nothing is taken of several devices unless all of them are free. Hard decision: files in the machine's temporary folder
and no driver call, because asking the driver from the supervisor would itself take memory on the device. A device is known by
the name it has in CUDA_VISIBLE_DEVICES, or by its number without that; two names of one device are not recognised as the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dflash.config import ClusterConfig
from dflash.errors import DeviceError

LOCK_DIR_VARIABLE = "DFLASH_DEVICE_LOCKS"
"""Environment variable that names another folder for the lock files (all trainings of a machine must agree)."""

_FOLDER = "dflash-devices"
_EVERYONE = 0o1777
_EVERYONE_WRITES = 0o666


def device_names(cluster: ClusterConfig, environment: Mapping[str, str]) -> list[str]:
    """Names of the devices that this machine's ranks will use, in their order; none on a CPU."""
    if cluster.device == "cpu":
        return []
    needed = cluster.devices_per_node
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(needed)] if visible is None else [name.strip() for name in visible.split(",")]
    return names[:needed]


@contextmanager
def hold_devices(cluster: ClusterConfig, *, run: str) -> Iterator[None]:
    """Be the only training on these devices while the block runs.

    Args:
        cluster: devices.
        run: what others are told of the holder.

    Raises:
        DeviceError: another training holds one of them.
    """
    with ExitStack() as held:
        for name in device_names(cluster, os.environ):
            _hold(_folder() / f"{name.replace('/', '_')}.lock", name, run, held)
        yield


def _hold(path: Path, name: str, run: str, held: ExitStack) -> None:
    descriptor = _open(path)
    held.callback(os.close, descriptor)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
        raise _planted(path)
    with suppress(PermissionError):  # another user's file has its rights already
        os.fchmod(descriptor, _EVERYONE_WRITES)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "unknown"
        raise DeviceError(
            f"GPU {name} is being used by another training ({holder})",
            remedy="wait for it, or choose other devices with CUDA_VISIBLE_DEVICES",
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()}, {run}\n".encode(), 0)


def _open(path: Path) -> int:
    # The folder is everybody's: a link in it could lead to a file of ours, which would be opened to everybody and cut to nothing.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            # Not with O_CREAT: the kernel refuses that for another user's file in a sticky folder (fs.protected_regular).
            return os.open(path, flags)
        except FileNotFoundError:
            return os.open(path, flags | os.O_CREAT, _EVERYONE_WRITES)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _planted(path) from error
        raise


def _planted(path: Path) -> DeviceError:
    return DeviceError(
        f"{path} is no lock file but a link or something else that somebody has put there",
        remedy=f"look at who owns it and remove it, or name a folder of your own in {LOCK_DIR_VARIABLE}",
    )


def _folder() -> Path:
    chosen = os.environ.get(LOCK_DIR_VARIABLE)
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / _FOLDER
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(_EVERYONE)
    return folder
