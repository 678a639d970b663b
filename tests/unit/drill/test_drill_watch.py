"""What a drill sees of a run: every file's news once, in order, as lines that fit a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint import Ledger
from dflash.config import load_config
from dflash.drill.facts import gather, read_log
from dflash.drill.faults import FAULTS, fault_named, plan_fault
from dflash.drill.reference import Reference, keep_reference, load_reference, reference_key
from dflash.drill.timeline import WIDTH, Moment, Timeline, lines_of
from dflash.drill.watch import RunWatch
from dflash.errors import ConfigError, DataError
from dflash.records import ControlRequest, LedgerEntry, PlantedFault, RollbackEntry, RollbackPlan, RunPaths, to_json
from dflash.train.planted_log import append_planted, planted_lines

CONFIG = Path(__file__).parents[3] / "configs" / "drill.yaml"


def line(kind: str, step: int, segment: int, at_s: float, **more: Any) -> str:
    return json.dumps({"kind": kind, "step": step, "segment": segment, "wall_time_s": at_s, **more}) + "\n"


def event(name: str, step: int, segment: int, at_s: float, **details: Any) -> str:
    return line("event", step, segment, at_s, event=name, details=details)


def plan() -> RollbackPlan:
    return RollbackPlan(
        key="segment-0-ab", action="rollback", rung=1, segment=0, onset_step=3, alarm_step=4, region_step=3, target_step=2,
        skip=((2, 5), (7, 8)), overlay=None, reason="loss has risen",
    )  # fmt: skip


def damaged_run(root: Path) -> RunPaths:
    """Four steps, a fault at step 3, a rollback to step 2, two more steps."""
    paths = RunPaths(root / "drill-nan-001")
    paths.requests_dir.mkdir(parents=True)
    paths.checkpoints_dir.mkdir()
    losses = [line("step", step, 0, 10.0 + step, ce=3.0 - step) for step in range(4)]
    first = [event("start", 0, 0, 9.0), *losses, event("skip", 3, 0, 13.5, batch_ids=[3], nonfinite=["ce"])]
    second = [
        event("rollback_end", 2, 1, 15.0),
        event("resume", 2, 1, 16.0),
        line("step", 2, 1, 17.0, ce=0.9),
        line("step", 3, 1, 18.0, ce=None),
    ]
    paths.log.write_text("".join([*first, *second, event("finish", 4, 1, 19.0)]) + '{"torn', encoding="utf-8")
    append_planted(paths, PlantedFault("nan", 0, 3, 3, 13.4))
    request = ControlRequest("segment-0-ab", "rollback", "loss has risen", "2026-01-01", "health-check", plan=plan())
    (paths.requests_dir / "segment-0-ab.json").write_text(to_json(request))
    (paths.requests_dir / "segment-0-ab.ack.json").write_text("{}")
    ledger = Ledger(paths.ledger)
    for state in ("writing", "durable", "probation", "suspect"):
        ledger.append(LedgerEntry(3, 0, state, "2026-01-01T00:00:00+00:00", "critical"))  # type: ignore[arg-type]
    ledger.append_rollback(RollbackEntry("begin", plan(), 2, None, 14.2))
    ledger.append_rollback(RollbackEntry("end", plan(), 2, 1, 14.8))
    return paths


def test_the_news_of_every_file_come_once_and_in_their_order(tmp_path: Path) -> None:
    paths = damaged_run(tmp_path)
    watch = RunWatch(paths)
    moments = watch.poll()
    assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
    texts = [moment.text for moment in moments if moment.at_s < 1000]
    assert [text.split(":")[0] for text in texts] == [
        "training begins", "FAULT nan takes effect", "trainer", "supervisor", "supervisor", "trainer", "training is finished",
    ]  # fmt: skip
    assert any("segment 1 leaves out batches 2..4, 7..7" in text for text in texts)
    assert any("step-3 suspect" in moment.text for moment in moments)
    assert sum("requests rollback to step-2 (rung 1), 4 batches" in moment.text for moment in moments) == 1
    assert watch.step == 3
    assert watch.poll() == []
    with paths.log.open("a", encoding="utf-8") as file:
        file.write('"}\n' + event("save_durable", 4, 1, 20.0))
    assert watch.poll() == []
    assert watch.durable == 4


def test_a_folder_without_anything_has_no_news(tmp_path: Path) -> None:
    watch = RunWatch(RunPaths(tmp_path / "missing"))
    assert watch.poll() == []
    assert watch.loss is None


def test_facts_are_gathered_from_the_folder_alone(tmp_path: Path) -> None:
    paths = damaged_run(tmp_path)
    config = load_config(CONFIG)
    facts = gather(paths, plan_fault(fault_named("nan"), config), ended="Completed", struck_step=None, hit_checkpoint=None)
    assert [entry.phase for entry in facts.rollbacks] == ["begin", "end"]
    assert [item.request.key for item in facts.requests] == ["segment-0-ab"]
    assert facts.planted == tuple(planted_lines(paths))
    assert facts.log == read_log(paths)
    assert facts.log.loss == {0: 3.0, 1: 2.0, 2: 0.9, 3: None}, "the abandoned records are not live"
    assert facts.log.resumed_from == {1: 2}
    assert (facts.outcome.steps, facts.processes_left) == (None, 0)


def test_lines_fit_80_columns_and_keep_words_and_order() -> None:
    text = "health-check requests rollback to step-600 (rung 1): " + "the loss has risen and stays up; " * 6
    lines = lines_of(Moment(100.0 + 3725, 700, text), begun_s=100.0)
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split()[:2] == ["62:05", "700"]
    assert " ".join(" ".join(lines).split()[2:]) == " ".join(text.split())
    written: list[str] = []
    timeline = Timeline(5.0, write=written.append)
    timeline.heading("a drill")
    timeline.add(Moment(5.0, None, "begins"))
    assert written[-1].split() == ["0:00", "begins"]
    assert not any(character < " " for text in written for character in text)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_goes_where_the_plan_says(name: str) -> None:
    config = load_config(CONFIG, overrides=["train.accumulation_steps=2", "drill.fault_step=30"])
    made = plan_fault(FAULTS[name], config)
    assert made.first_position == 60
    assert made.end_position - made.first_position == 2 * FAULTS[name].bad_batches
    with pytest.raises(ConfigError, match="no drill"):
        plan_fault(FAULTS[name], load_config(CONFIG, overrides=["drill.faults=false"]))


def test_a_reference_is_kept_for_exactly_its_configuration(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    key = reference_key(config)
    for override in ("train.lr=0.001", "run.seed=3", "evaluate.num_prompts=7"):
        assert reference_key(load_config(CONFIG, overrides=[override])) != key
    for override in ("health.check_interval_s=3", "rollback.max_per_day=1", "run.name=other", "drill.fault_step=9"):
        assert reference_key(load_config(CONFIG, overrides=[override])) == key
    assert load_reference(tmp_path, config) is None
    facts = gather(
        damaged_run(tmp_path), plan_fault(fault_named("none"), config), ended="Completed", struck_step=None, hit_checkpoint=None
    )
    with pytest.raises(DataError, match="no reference"):
        keep_reference(tmp_path, config, facts, run="drill-nan-001")
    kept = Reference(key, "drill-reference-001", "aa", 3.0, (2.5, 3.5), (3.0, None, 1.0))
    (tmp_path / f"reference-{key}.json").write_text(to_json(kept))
    assert load_reference(tmp_path, config) == kept
