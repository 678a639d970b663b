"""Real builds in processes that are killed (SIGKILL) at chosen moments; run as a script, see `kill_builds`.

The moments are events of the build itself: every batch that is tokenized, and every object before and after it is put.
One process imports everything once and forks one builder for each kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def kill_builds(folder: Path, settings: dict[str, Any], moments: Sequence[int]) -> list[dict[str, Any]]:
    """Build in `folder` (made by `Workshop`), each time killed at the event of that number.

    Returns:
        For each builder the event it was killed at (None: it finished first) and how many events it had seen. The folder of
        data sets as it left it is copied to `after-<number>`.
    """
    command = [sys.executable, str(Path(__file__)), str(folder), json.dumps(settings), json.dumps(list(moments))]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit" / "data")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    from workshop import Workshop

    from dflash.storage.local_store import LocalStore

    folder = Path(sys.argv[1])
    settings, moments = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    place = Workshop(folder, folder / "target")
    config = place.config(*settings.pop("files"), **settings)
    for number, moment in enumerate(moments):
        read_end, write_end = os.pipe()
        builder = os.fork()
        if builder == 0:
            events = Events(moment, write_end)
            for name in ("put", "put_file"):
                setattr(LocalStore, name, events.around(getattr(LocalStore, name)))
            place.prepare(config, progress=events.progress)
            os._exit(0)
        os.close(write_end)
        _, status = os.waitpid(builder, 0)
        with os.fdopen(read_end, "rb") as seen:
            count = len(seen.read())
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status:
            raise SystemExit(f"the builder failed by itself: status {status}")
        shutil.copytree(place.data_root, folder / f"after-{number}", dirs_exist_ok=True)
        print(json.dumps({"killed_at": moment if killed else None, "events": count}), flush=True)


class Events:
    """Counts what a build does and ends its process at the moment that was asked for."""

    def __init__(self, moment: int, channel: int) -> None:
        self._left = moment
        self._channel = channel

    def happen(self) -> None:
        os.write(self._channel, b".")
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def progress(self, *_: object) -> None:
        self.happen()

    def around(self, function: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.happen()
            result = function(*arguments, **named)
            self.happen()
            return result

        return counted


if __name__ == "__main__":
    main()
