"""The reader of a flow run's console dies, as a killed worker does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WORK = """
import sys
from pathlib import Path
from flows.settings import flow_settings
from tasks.console import say
from prefect.logging import get_logger
from prefect.logging.configuration import setup_logging

flow_settings()
setup_logging()
logger = get_logger("work")
logger.warning("somebody reads this")
sys.stdin.readline()
for _ in range(3):
    logger.warning("nobody reads this")
    say("nor this")
Path(sys.argv[1]).write_text("done")
"""


def test_work_goes_on_when_nobody_reads_its_console(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, "-c", WORK, str(done)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"somebody reads this" in process.stdout.readline()
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert done.read_text() == "done"
