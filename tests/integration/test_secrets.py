"""A whole run with secrets in its environment, through Prefect, MLflow and publishing: none of them is told anywhere."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.planted_secrets import PLANTED, find_planted
from tests.support.stack import TINY

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.full]


def call(folder: Path, *command: str, expect: set[int]) -> str:
    """A command with the secrets in its environment and everything of its own in `folder`; returns all that it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "DFLASH_"))}
    environment = kept | PLANTED | {"PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode in expect, said
    (folder / f"said-{len(list(folder.glob('said-*')))}.txt").write_text(said, encoding="utf-8")
    return said


def test_no_output_of_a_whole_run_tells_a_secret_of_its_environment(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    small = ("train.max_steps=24", "checkpoint.interval_steps=8", "checkpoint.window_steps=8", "checkpoint.soak_steps=8")
    settings = [word for item in (f"run.root={runs}", *TINY, *small) for word in ("--set", item)]
    call(tmp_path, "flows.train", "--config", "configs/demo.yaml", *settings, expect={0})
    run = runs / "tiny-001"
    call(tmp_path, "dflash", "health", str(run), "--html", str(tmp_path / "health.html"), expect={0, 3, 5})
    publish = ("publish.license=apache-2.0", "publish.base_model=owner/demo")
    call(tmp_path, "dflash", "publish", str(run), *publish, "--output", str(tmp_path / "published"), expect={0})
    refused = call(
        tmp_path,
        "dflash",
        "train",
        "configs/demo.yaml",
        f"run.root={runs}",
        "tracking.uri=http://me:planted-in-a-url@h/",
        expect={1},
    )
    assert "tracking.uri" in refused
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.yaml", "train_log.jsonl", "report.html", "mlflow.db", "prefect.db", "README.md", "said-0.txt"} <= written
    assert find_planted(tmp_path, secrets={**PLANTED, "URL": "planted-in-a-url"}) == []
    (tmp_path / "control.txt").write_text(f"token {PLANTED['HF_TOKEN']}")
    assert len(find_planted(tmp_path, secrets=PLANTED)) == 1, "the search finds what is there"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in runs.rglob("*") if path.is_file()}
    assert not [path for path, mode in modes.items() if mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH | stat.S_IWOTH)]
