"""One evaluated run for all tests of this folder that publish and register: making it costs seconds."""

from __future__ import annotations

import dataclasses

import pytest

from dflash.config import load_config
from dflash.stages import evaluate_stage, open_bench
from dflash.stages.run import Run
from tests.support.probe_run import build_probe_run, save_drafter

SETTINGS = (
    "tracking.enabled=true", "evaluate.max_new_tokens=8", "publish.license=apache-2.0", "publish.base_model=owner/demo-target",
    "publish.audit_tokens=4",
)  # fmt: skip


@pytest.fixture(scope="session")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Untrained checkpoints 20, 40 and 60, the last one evaluated; only its registry and its probes are written to by tests."""
    run = build_probe_run(tmp_path_factory.mktemp("evaluated"), overrides=SETTINGS)
    for step in (20, 40, 60):
        save_drafter(run, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        quiet = dataclasses.replace(run, config=load_config(run.paths.config, overrides=("tracking.enabled=false",)))
        evaluate_stage(quiet, open_bench(quiet), which="trained", progress=lambda *_: None, checkpoint=run.paths.checkpoint(60))
    return run
