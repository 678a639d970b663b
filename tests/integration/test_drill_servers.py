"""The drill as a person runs it: real servers, workers and deployments, one fault that must be acted on and one that must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import command_of

ROOT = Path(__file__).parents[2]
SMALLER = ("evaluate.num_prompts=16",)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_fault_is_acted_on_and_an_artefact_is_not(tmp_path: Path) -> None:
    settings = [word for item in SMALLER for word in ("--set", item)]
    command = [sys.executable, "-m", "flows.drill", "--fault", "explosion", "--fault", "save-artefact", "--root", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *settings], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("verdict on")]
    assert verdicts == ["verdict on `explosion`: RIGHT", "verdict on `save-artefact`: RIGHT"]
    assert [command for command in map(command_of, psutil.process_iter()) if str(tmp_path) in " ".join(command)] == []
