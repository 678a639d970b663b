"""Log shipping by a real rsyslogd: every line of a run's log arrives once, whole, also what was written while nobody listened."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RSYSLOGD = shutil.which("rsyslogd") or shutil.which("rsyslogd", path="/usr/sbin")

pytestmark = pytest.mark.skipif(RSYSLOGD is None, reason="rsyslog is not installed")


@pytest.fixture
def shipping(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], socket.socket]]:
    """The command and environment of rsyslogd with the project's file, and the log server that it will connect to."""
    for name in ("spool", "runs/demo-001"):
        (tmp_path / name).mkdir(parents=True)
    main = tmp_path / "main.conf"
    main.write_text(
        f'global(workDirectory="{tmp_path}/spool")\ninclude(file="{ROOT}/infra/logs/50-dflash.conf")\n', encoding="utf-8"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        env = os.environ | {
            "DFLASH_RUNS": str(tmp_path / "runs"),
            "DFLASH_LOG_HOST": "127.0.0.1",
            "DFLASH_LOG_PORT": str(server.getsockname()[1]),
            "DFLASH_LOG_SPOOL": str(tmp_path / "spool"),
        }
        yield [str(RSYSLOGD), "-n", "-f", str(main), "-i", str(tmp_path / "pid")], env, server


def test_rsyslog_accepts_the_file(shipping: tuple[list[str], dict[str, str], socket.socket]) -> None:
    command, env, _ = shipping
    done = subprocess.run([*command, "-N1"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower()


def test_every_line_arrives_whole_and_in_order(tmp_path: Path, shipping: tuple[list[str], dict[str, str], socket.socket]) -> None:
    command, env, server = shipping
    log = tmp_path / "runs/demo-001/train_log.jsonl"
    lines = [
        json.dumps({"step": step, "text": 'a "quoted" \\ line', "long": "x" * (100_000 if step == 3 else 10)}) for step in range(40)
    ]
    log.write_text("".join(f"{line}\n" for line in lines[:20]), encoding="utf-8")
    shipper = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream, log.open("a", encoding="utf-8") as more:
            connection.settimeout(60)
            more.write("".join(f"{line}\n" for line in lines[20:]))
            more.flush()
            arrived = [json.loads(stream.readline()) for _ in lines]
    finally:
        shipper.terminate()
        shipper.wait(30)
    assert [item["line"] for item in arrived] == lines
    assert {item["source"] for item in arrived} == {"dflash-train-log"}
    assert {item["file"] for item in arrived} == {str(log)}
    assert all(item["host"] and item["time"] for item in arrived)
