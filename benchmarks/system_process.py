"""One system in a process of its own that works when it is asked: both ends of the conversation.

Requests are lines on its standard input, answers JSON lines on its standard output; the first one says that it is built.
Needs the standard library alone, because the peers run it in an environment of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""Interpreter of the peers' environment, which `make bench-peers` makes."""
ABSENT = "not measured: run `make bench-peers` first"


class SystemProcess:
    """The asking end; `worker`: module that serves `--system` and `options`, in our environment or in the peers'."""

    def __init__(self, worker: str, system: str, options: Sequence[str], *, environment: Mapping[str, str]) -> None:
        python = sys.executable if system == "ours" else str(PEERS_PYTHON)
        self._process = subprocess.Popen(
            [python, "-m", worker, "--system", system, *options],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._is_ready = False

    def ask(self, request: str) -> dict[str, Any]:
        """Send a request and wait for its answer; the first one waits until the system is built."""
        if not self._is_ready:
            self._is_ready = bool(self._read()["ready"])
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(build: Callable[[], Any], answer: Callable[[Any, list[str]], dict[str, Any]]) -> None:
    """The answering end: build the system, then answer requests, split into words, until standard input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # what a peer prints must not look like an answer
    system = build()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(system, line.split())), file=out, flush=True)
