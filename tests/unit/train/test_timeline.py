"""The timeline of a run: only what the log measured, in order, and equal to the log's own figures."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cli import main
from dflash.cli.trace_commands import write_trace
from dflash.errors import RunStateError
from dflash.records import EventRecord, RunPaths, StepRecord
from dflash.train import chrome
from dflash.train.chrome import chrome_trace
from dflash.train.timeline import DRAFTER, EPOCHS, RUN, Timeline, read_timeline
from tests.support.log_simulator import simulate_run, write_log
from tests.support.timed_log import WALL_S, Record, event, micro, rolled_back, step, written


def told(log: Path) -> Timeline:
    return read_timeline(log, first_step=0, end_step=None)


def test_spans_are_those_of_the_log(tmp_path: Path) -> None:
    timeline = told(written(tmp_path, rolled_back()))
    spans = {span.name: span for span in timeline.spans if span.track != DRAFTER}
    assert (spans["segment 0"].begin_s, spans["segment 0"].end_s) == pytest.approx((0.0, 3.4))
    assert (spans["no trainer runs"].begin_s, spans["no trainer runs"].end_s) == pytest.approx((3.4, 6.0))
    assert spans["rollback to step 4"].length_s == pytest.approx(0.25)
    assert spans["rollback to step 4"].details["skipped"] == [[8, 10]]
    assert (spans["save step-4"].begin_s, spans["save step-4"].end_s) == pytest.approx((2.01, 2.5))
    assert spans["save step-4"].details["outcome"] == "durable"
    assert (spans["write step-4"].begin_s, spans["write step-4"].length_s) == pytest.approx((2.1, 0.4))
    assert [mark.name for mark in timeline.marks] == ["stop_requested", "finish"]
    epochs = [(span.details["segment"], span.name) for span in timeline.spans if span.track == EPOCHS]
    assert epochs == [(0, "epoch 0"), (1, "epoch 0"), (1, "epoch 1")]
    work = [span for span in timeline.spans if span.track == DRAFTER]
    snapshot = next(span for span in work if span.name == "snapshot step-4")
    assert (snapshot.begin_s, snapshot.length_s) == pytest.approx((2.01, 0.02))
    waits = [span for span in work if span.name == "waits for features"]
    assert [(span.begin_s, span.length_s) for span in waits] == [pytest.approx((1.6, 0.05))]


def test_what_a_rollback_abandoned_is_marked(tmp_path: Path) -> None:
    timeline = told(written(tmp_path, rolled_back()))
    steps = [(span.details["segment"], span.details["step"], span.live) for span in timeline.spans if span.name.startswith("step ")]
    assert {(segment, number) for segment, number, live in steps if not live} == {(0, number) for number in range(4, 10)}
    assert timeline.steps == len(steps) == 14


def test_gauges_are_read_when_the_log_read_them(tmp_path: Path) -> None:
    timeline = told(written(tmp_path, [event("start", 0, 0.0), step(0, 1.0), step(1, 1.2), step(2, 1.4, target_depths=(9,))]))
    by_name = defaultdict(list)
    for gauge in timeline.gauges:
        by_name[gauge.name].append((round(gauge.at_s, 6), dict(gauge.values)))
    assert by_name["queues (batches)"][0] == (1.0, {"ready": 7, "features": 3}), "when the step began"
    assert by_name["batches finished in the step"] == [(1.1, {"target 0": 2}), (1.3, {"target 0": 1}), (1.5, {"target 0": 6})]
    assert by_name["loss"][0] == (1.1, {"ce": 2.0}), "when it was over"


def test_a_wait_of_several_micro_batches_is_no_span(tmp_path: Path) -> None:
    """The log has its sum, and not when it was."""
    several = step(0, 1.0, wait_s=0.05, micro_batches=(micro(0), micro(1)))
    other_rank = step(
        1, 2.0, wait_s=0.05, micro_batches=(micro(2), micro(3, rank=1)), rank_wait_s=(0.0, 0.05), target_depths=(1, 1)
    )
    timeline = told(written(tmp_path, [event("start", 0, 0.0), several, other_rank]))
    assert [span.name for span in timeline.spans if span.track == DRAFTER] == ["step 0", "step 1"]
    assert next(span for span in timeline.spans if span.name == "step 0").details["wait_time_s"] == 0.05
    waits = [gauge.values for gauge in timeline.gauges if gauge.name == "wait for features (s)"]
    assert waits == [{"rank 0": 0.0, "rank 1": 0.05}]


def test_saves_that_fail_and_saves_without_an_end(tmp_path: Path) -> None:
    timeline = told(
        written(
            tmp_path,
            [
                event("start", 0, 0.0),
                event("save_begin", 1, 1.0),
                event("save_failed", 1, 2.0, error="no space", hung=False, retry_in_s=5),
                event("save_durable", 1, 8.0, write_s=0.5),
                event("save_begin", 2, 10.0),
                event("save_failed", 2, 70.0, error="hangs", hung=True),
                event("save_begin", 3, 80.0),
                step(3, 81.0),
            ],
        )
    )
    saves = {span.name: (span.begin_s, span.end_s, span.details["outcome"]) for span in timeline.spans if "save" in span.name}
    assert saves == {
        "save step-1": (1.0, 8.0, "durable"),
        "save step-2": (10.0, 70.0, "failed"),
        "save step-3": (80.0, pytest.approx(81.1), "not known"),
    }
    assert [mark.name for mark in timeline.marks] == ["save_failed", "save_failed"]


def test_a_clock_that_is_set_moves_no_step_and_another_boot_is_laid_over_the_wall_clock(tmp_path: Path) -> None:
    log = written(
        tmp_path,
        [
            event("start", 0, 0.0),
            step(0, 1.0),
            step(1, 2.0, wall_time_s=WALL_S + 3602.0),  # an hour put forward
            event("resume", 2, 7200.0, segment=1, mono_from=-7190.0),  # ten seconds after a boot
            step(2, 7201.0, segment=1, mono_time_s=11.0),
        ],
    )
    begins = [span.begin_s for span in told(log).spans if span.name.startswith("step ")]
    assert begins == pytest.approx([1.0, 2.0, 7201.0])


def check_trace(trace: dict[str, Any]) -> None:
    """Valid Chrome trace JSON: known phases, no negative time, ordered, and spans of a thread nest or follow each other."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    timed = [item for item in trace["traceEvents"] if item["ph"] != "M"]
    assert {item["ph"] for item in timed} <= {"X", "i", "C"}
    assert [item["ts"] for item in timed] == sorted(item["ts"] for item in timed)
    assert all(item["ts"] >= 0 and item.get("dur", 0.0) >= 0 and item["name"] for item in timed)
    open_until: dict[int, list[float]] = defaultdict(list)
    for item in timed:
        if item["ph"] == "X":
            stack = open_until[item["tid"]]
            while stack and stack[-1] <= item["ts"] + 0.01:
                stack.pop()
            assert not stack or item["ts"] + item["dur"] <= stack[-1] + 0.01, f"{item['name']} reaches over the one around it"
            stack.append(item["ts"] + item["dur"])


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """Logs of segments with steps, saves, rollbacks and crashes in between."""
    records: list[Record] = []
    at_s, first = 0.0, 0
    for segment in range(draw(st.integers(1, 3))):
        records.append(event("start" if segment == 0 else "resume", first, at_s, segment=segment, total_steps=99))
        end = first + draw(st.integers(1, 8))
        for number in range(first, end):
            lasts_s = draw(st.floats(0.001, 0.5))
            wait_s = draw(st.floats(0.0, 1.0)) * lasts_s
            records.append(step(number, at_s, lasts_s=lasts_s, wait_s=wait_s, segment=segment))
            at_s += lasts_s
            if draw(st.integers(0, 3)) == 0:
                records.append(event("save_begin", number + 1, at_s, segment=segment))
                at_s += 0.01
                records.append(event("save_staged", number + 1, at_s, segment=segment, blocked_s=0.01))
                if draw(st.booleans()):
                    at_s += 0.2
                    records.append(event("save_durable", number + 1, at_s, segment=segment, write_s=0.19))
        at_s += 1.0
        first = draw(st.integers(0, end))
        if draw(st.booleans()):
            records.append(event("rollback_begin", end, at_s, segment=segment, target_step=first))
            records.append(event("rollback_end", first, at_s + 0.5, segment=segment + 1, target_step=first))
            at_s += 1.0
    return records


@settings(max_examples=25, deadline=None, derandomize=True)
@given(records=histories())
def test_any_history_gives_a_valid_trace_with_the_log_s_figures(
    records: list[Record], tmp_path_factory: pytest.TempPathFactory
) -> None:
    timeline = told(written(tmp_path_factory.mktemp("log"), records, tail='{"kind":"step","segm'))
    trace = chrome_trace(timeline, run="toy")
    check_trace(trace)
    logged = [record for record in records if isinstance(record, StepRecord)]
    shown = [item for item in trace["traceEvents"] if item["ph"] == "X" and item["name"].startswith("step ")]
    assert [(item["args"]["segment"], item["args"]["step"]) for item in shown] == [(r.segment, r.step) for r in logged]
    assert [item["dur"] for item in shown] == pytest.approx([1e6 * record.step_time_s for record in logged], abs=1e-3)
    durable = [record for record in records if isinstance(record, EventRecord) and record.event == "save_durable"]
    writes = [item["dur"] for item in trace["traceEvents"] if item["name"].startswith("write ")]
    assert writes == pytest.approx([1e6 * record.details["write_s"] for record in durable], abs=1e-3)
    assert trace["otherData"]["unreadable_lines"] == 1
    segments = [item for item in trace["traceEvents"] if item["name"].startswith("segment ")]
    assert len(segments) == len({record.segment for record in logged})


def test_the_command_writes_the_steps_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "toy-001"
    written(run, rolled_back())
    out = tmp_path / "trace.json"
    assert main(["trace", str(run), "--output", str(out), "--steps", "2:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    trace = json.loads(out.read_text())
    check_trace(trace)
    assert [item["name"] for item in trace["traceEvents"] if item["name"].startswith("step ")] == ["step 2", "step 3"]
    assert [item for item in trace["traceEvents"] if item["name"] == "segment 1"], "segments are shown whole"
    assert {item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "thread_name"} >= {RUN, DRAFTER}


def test_bad_input_is_one_message_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "toy-001", tmp_path / "trace.json"
    written(tmp_path / "empty", [])
    for folder, steps, word in (
        (tmp_path / "none", "0:", "cannot be read"),
        (tmp_path / "empty", "0:", "no line"),
        (run, "4:4", "no range"),
        (run, "five", "no range"),
        (run, "-3:", "no range"),
    ):
        assert main(["trace", str(folder), "--output", str(out), f"--steps={steps}"]) == 1
        assert word in capsys.readouterr().err
    written(run, rolled_back())
    monkeypatch.setattr(chrome, "MAX_STEPS", 3)
    assert main(["trace", str(run), "--output", str(out)]) == 1
    assert "--steps" in capsys.readouterr().err
    assert not out.exists()


def test_steps_that_the_run_never_had_are_no_timeline(tmp_path: Path) -> None:
    paths, output = RunPaths(tmp_path), tmp_path / "trace.json"
    write_log(paths.log, simulate_run(seed=1, steps=20, lr=lambda step: 1e-3))
    with pytest.raises(RunStateError, match="no step from 5000"):
        write_trace(paths, output, first_step=5000, end_step=6000)
    assert not output.exists()
