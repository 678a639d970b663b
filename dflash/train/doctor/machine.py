"""Checks of the machine: memory and disk against the plan, the store, the clock, sockets and GPUs.

Invariant: what is judged is passed to a pure `judge_*` function as numbers; the checks around them only measure. The store is
written to, and what was written is removed again.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import uuid
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import torch

from dflash.config import Config
from dflash.errors import DeviceError, StorageError
from dflash.records import CheckResult, CheckStatus
from dflash.storage import Store, open_store
from dflash.train.memory import GB, DevicePlan, memory_plan

EARLIEST_WALL_TIME_S = 1_735_689_600.0  # 2025-01-01: the code is younger, so an earlier clock is wrong
MAX_SKEW_S = 5.0
MAX_STORE_SKEW_S = 60.0
REFUSED_STORE_SKEW_S = 900.0  # S3 refuses requests signed this far off
DATE_TIMEOUT_S = 5.0
DEFAULT_ENDPOINT = "https://s3.amazonaws.com"
PROBE_BYTES = 64 * 1024


def memory_check(config: Config) -> CheckResult:
    """The memory plan of each kind of device against its size, and against what is free right now.

    Raises:
        DeviceError: a place is smaller than its plan.
        TargetError: the target's shape is not known.
    """
    plan = memory_plan(config)
    for place in plan.places:
        capacity = capacity_bytes(place)
        if capacity is not None and place.total_bytes > capacity:
            raise DeviceError(
                f"{place.name} would have to hold {place.total_bytes / GB:.2f} GB, it has {capacity / GB:.2f} GB",
                remedy="lower plan.tokens_per_batch, train.anchors.max_per_batch or train.queues.feature_bytes",
            )
    largest = max(plan.places, key=lambda place: place.total_bytes)
    tight = [judge_free_memory(place.name, place.total_bytes, free_bytes(place)) for place in plan.places]
    warnings = [result for result in tight if result is not None]
    if warnings:
        return warnings[0]
    return CheckResult("memory", "ok", f"at most {largest.total_bytes / GB:.2f} GB ({largest.name})", "")


def judge_free_memory(name: str, needed_bytes: int, free: int | None) -> CheckResult | None:
    """A warning if less is free now than the plan needs; None if it fits or nothing is known."""
    if free is None or needed_bytes <= free:
        return None
    message = f"{name} needs {needed_bytes / GB:.2f} GB, {free / GB:.2f} GB are free right now"
    return CheckResult("memory", "warn", message, "end what else uses it, or lower plan.tokens_per_batch")


def capacity_bytes(place: DevicePlan) -> int | None:
    """The smaller of what the configuration says and what this machine has; None if neither is known."""
    known = [] if place.capacity_bytes is None else [place.capacity_bytes]
    if place.on_host:
        known.append(psutil.virtual_memory().total)
    else:
        known += [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(known, default=None)


def free_bytes(place: DevicePlan) -> int | None:
    """What is free now on the fullest place of this kind; None where there is none."""
    if place.on_host:
        available: int = psutil.virtual_memory().available
        return available
    return min((torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())), default=None)


def disk_check(config: Config) -> CheckResult:
    """Room for the checkpoints that a healthy run keeps (weights and optimizer) and for the feature cache where run.root lies.

    Raises:
        StorageError: too little.
        TargetError: the target's shape is not known.
    """
    plan = memory_plan(config)
    free = shutil.disk_usage(existing_parent(Path(config.run.root))).free
    return judge_disk(config.run.root, plan.disk_bytes, free, cache_bytes=int(config.train.feature_cache_gib * 2**30))


def judge_disk(folder: str, needed_bytes: int, free: int, *, cache_bytes: int) -> CheckResult:
    """Compare what checkpoints need, and what a feature cache may take, with what is free.

    Raises:
        StorageError: too little for the checkpoints.
    """
    if free < needed_bytes:
        raise StorageError(
            f"run.root {folder} has {free / GB:.1f} GB free, checkpoints need {needed_bytes / GB:.1f} GB",
            remedy="free some space, point run.root to a larger disk, or keep fewer checkpoints",
        )
    message = f"{free / GB:.1f} GB free, checkpoints need {needed_bytes / GB:.2f} GB"
    if free < needed_bytes + cache_bytes:
        message += f", the feature cache may take {cache_bytes / GB:.2f} GB, if it is not there yet"
        return CheckResult("disk", "warn", message, "free some space, or lower train.feature_cache_gib: it will keep less")
    return CheckResult("disk", "ok", message, "")


def existing_parent(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def storage_check(config: Config) -> CheckResult:
    """Write, read and delete a small object where runs and data sets go.

    Raises:
        StorageError: a store does not do what it must.
    """
    places = {"runs": str(existing_parent(Path(config.run.root)))}
    if config.data.store is not None:
        remote = "://" in config.data.store
        places["data"] = config.data.store if remote else str(existing_parent(Path(config.data.store)))
    times = {name: probe_store(open_store(uri)) for name, uri in places.items()}
    text = ", ".join(f"{name} {places[name]} ({seconds * 1000:.0f} ms)" for name, seconds in times.items())
    return CheckResult("storage", "ok", f"written, read back and removed: {text}", "")


def probe_store(store: Store) -> float:
    """Prove that a store keeps what is put into it and honours conditional writes; returns the seconds it took.

    Raises:
        StorageError: it does not.
    """
    name, data, begin_s = f".doctor-{uuid.uuid4().hex}", os.urandom(PROBE_BYTES), time.monotonic()
    try:
        store.put(name, data, only_if_absent=True)
        if store.read(name) != data:
            raise StorageError(f"{store.uri} returns other bytes than were written", remedy="do not train on this store")
        if store.put(name, b"second", only_if_absent=True) or store.size(name) != len(data):
            raise StorageError(
                f"{store.uri} overwrites an object that must not be replaced",
                remedy="use a store with conditional writes (If-None-Match): two builders would destroy each other's data",
            )
    finally:
        store.delete(name)
    if store.size(name) is not None:
        raise StorageError(f"{store.uri} still lists an object that was removed", remedy="check the store's permissions")
    return time.monotonic() - begin_s


def clock_check(config: Config) -> CheckResult:
    """Wall clock against the file system's and, where S3 is used, the store's; the monotonic clock against itself."""
    first, wall = time.monotonic(), time.time()
    with tempfile.NamedTemporaryFile(dir=existing_parent(Path(config.run.root)), prefix=".doctor-") as file:
        file_skew_s = Path(file.name).stat().st_mtime - wall
    uses_s3 = (config.data.store or "").startswith("s3://")
    store_skew_s = store_skew(os.environ.get("AWS_ENDPOINT_URL", DEFAULT_ENDPOINT)) if uses_s3 else None
    return judge_clock(wall, monotonic_step_s=time.monotonic() - first, file_skew_s=file_skew_s, store_skew_s=store_skew_s)


def judge_clock(wall_time_s: float, *, monotonic_step_s: float, file_skew_s: float, store_skew_s: float | None) -> CheckResult:
    """Judge clock readings.

    Args:
        wall_time_s: seconds since 1970.
        monotonic_step_s: between two readings of the monotonic clock.
        file_skew_s: a new file's time less ours.
        store_skew_s: the store's time less ours; None without a store or an answer.
    """
    if wall_time_s < EARLIEST_WALL_TIME_S or monotonic_step_s < 0:
        return CheckResult("clock", "fail", f"the clock says {time.ctime(wall_time_s)}", "set the machine's clock (timedatectl)")
    if store_skew_s is not None and abs(store_skew_s) > MAX_STORE_SKEW_S:
        status: CheckStatus = "fail" if abs(store_skew_s) > REFUSED_STORE_SKEW_S else "warn"
        message = f"the store's clock is {store_skew_s:+.0f} s off this machine's"
        return CheckResult("clock", status, message, "synchronise the clock (chrony, ntpd): S3 refuses requests 15 minutes off")
    if abs(file_skew_s) > MAX_SKEW_S:
        message = f"new files are dated {file_skew_s:+.1f} s off this machine's clock"
        return CheckResult("clock", "warn", message, "synchronise the file server's clock: stale runs are told by file times")
    store = "" if store_skew_s is None else f", store {store_skew_s:+.1f} s"
    return CheckResult("clock", "ok", f"file system {file_skew_s:+.2f} s{store}", "")


def store_skew(endpoint: str) -> float | None:
    """The store's clock less ours, in seconds, from the Date header of any answer; None without one."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=DATE_TIMEOUT_S) as response:  # noqa: S310 - from the settings
            date = response.headers.get("Date")
    except HTTPError as error:  # a refusal carries the date as well
        date = error.headers.get("Date")
    except (URLError, HTTPException, OSError, ValueError):
        return None
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, OverflowError):  # a date that is none
        return None


def sockets_check(config: Config) -> CheckResult:
    """Whether a local port can be had, and which GPUs this process sees.

    Raises:
        DeviceError: no socket can be bound.
    """
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        raise DeviceError(
            f"no local port can be bound: {error.strerror}", remedy="raise the limits, or end what holds them"
        ) from error
    if config.cluster.device == "cpu":
        return CheckResult("ports", "ok", f"port {port} was free on 127.0.0.1; no GPU is asked for", "")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return CheckResult("ports", "ok", f"port {port} was free; {len(names)} GPUs visible ({visible}): {', '.join(names)}", "")
