"""A drill with a real trainer and a real supervisor, without servers: the fault is planted, seen, gone back on, and left out."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from dflash.config import Config, parse_config
from dflash.drill.conduct import Conductor, FlowRun
from dflash.drill.facts import COMPLETED
from dflash.drill.faults import fault_named
from dflash.drill.reference import Reference
from dflash.drill.timeline import WIDTH, Timeline
from dflash.drill.verdict import judge
from dflash.stages import reopen_run, train_stage
from tests.support.tiny_run import TINY_CONFIG, build_tiny_run

SETTINGS = (
    "train.epochs=1", "checkpoint.interval_steps=10", "checkpoint.window_steps=10", "checkpoint.soak_steps=10",
    "health.check_interval_s=0.3", "rollback.max_skip_frac=0.2", "rollback.region_steps=30", "rollback.cooldown_steps=0",
    "drill.faults=true", "drill.fault_step=60",
)  # fmt: skip
SAMPLES = 400


class LocalStage:
    """Trains in a thread of this process, under the supervisor, in place of a worker's flow run."""

    def __init__(self, root: Path) -> None:
        self.root, self.state = root, "Running"
        self.error: BaseException | None = None

    def start(self) -> None:
        threading.Thread(target=self._train, daemon=True).start()

    def flow_runs(self) -> Sequence[FlowRun]:
        return [FlowRun("local", self.state, self.state != "Running")]

    def kill_worker(self) -> None:
        raise AssertionError("not part of this drill")

    def _train(self) -> None:
        try:
            run = build_tiny_run(self.root, samples=SAMPLES, overrides=SETTINGS)
            train_stage(reopen_run(run.paths.root), on_progress=lambda _progress: None)
            self.state = COMPLETED
        except BaseException as error:
            self.error, self.state = error, "Failed"
            raise


def configuration(root: Path) -> Config:
    text = TINY_CONFIG.format(root=json.dumps(str(root / "runs")), target=json.dumps(str(root / "target")), samples=SAMPLES)
    return parse_config(text, origin="tiny run", overrides=SETTINGS)


def test_a_planted_fault_is_seen_gone_back_on_and_left_out(tmp_path: Path) -> None:
    config, fault = configuration(tmp_path), fault_named("nan")
    lines: list[str] = []
    stage = LocalStage(tmp_path)
    timeline = Timeline(0.0, write=lines.append)
    run = Conductor(config, fault, stage=stage, timeline=timeline, limit_s=240).conduct()
    assert stage.error is None
    own = run.facts
    reference = Reference("k", "r", "w", 1.0, (1.0, 1.0), tuple(own.log.loss.values()))
    checks = judge(fault, own, reference, rule=config.checkpoint, check_every_s=config.health.check_interval_s)
    assert [check.name for check in checks if not check.holds] == ["final acceptance"], "nothing was decoded here"
    said = " ".join(" ".join(lines).split())
    for part in (
        "FAULT nan takes effect: batch 60 of the plan",
        f"rollback to step-{own.rollbacks[0].target_step} (rung 1)",
        f"back at step-{own.rollbacks[0].target_step}",
        "training is finished",
    ):
        assert part in said
    assert max(map(len, lines)) <= WIDTH
