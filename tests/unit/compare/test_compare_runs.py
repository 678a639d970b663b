"""Runs compared from their folders: the verdict, what differs, what happened, and a page that nobody can break."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.checkpoint import read_ledger
from dflash.cli import main
from dflash.compare.compare import AcceptanceRow, compare_runs
from dflash.compare.page import render_comparison
from dflash.compare.pictures import draw_acceptance
from dflash.compare.view import view_run
from dflash.errors import DataError, EvaluationError, RunStateError
from dflash.records import RollbackEntry, RollbackPlan, to_json
from dflash.stages import compare_stage, reopen_run
from dflash.stages.tracking import close_again, tracker_of
from tests.support.compared_runs import RESULT, step_line, write_evaluation_files, write_run
from tests.unit.tracking.tracking_fakes import FakeStore

LOG = "".join(step_line(step, bucket=step % 2) for step in range(20))


def answers(tokens: int, *, count: int = 12) -> dict[str, tuple[str, list[int]]]:
    """Prompts of two kinds; `tokens` committed in each of four passes, a little more or less from prompt to prompt."""
    return {f"hash-{i}": (("sums", "lists")[i % 2], [tokens, tokens + i % 3, tokens, tokens]) for i in range(count)}


def test_the_verdict_and_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a-001", LOG, answers=answers(2))
    write_run(
        tmp_path / "b-001",
        LOG.replace('"ce":1.0', '"ce":0.5'),
        answers=answers(4),
        overrides=["train.lr=0.5", "run.seed=3", "run.name=other", "probe.every_steps=7"],
    )
    found = compare_stage([tmp_path / "a-001", tmp_path / "b-001"], output=None, track=False)
    (contest,) = found.comparison.contests
    assert [(each.kind, each.word, round(each.difference, 6)) for each in contest] == [
        ("all", "better", 2.0), ("lists", "no difference", 2.0), ("sums", "no difference", 2.0),
    ]  # fmt: skip
    assert found.comparison.verdicts[0].startswith(
        "b-001 is better than a-001: acceptance length 4.25 against 2.25, difference +2.00"
    )
    assert found.comparison.settings.keys() == {"train.lr", "run.seed"}, "what names or watches a run is no difference"
    assert found.page == tmp_path / "comparisons/a-001-vs-b-001/comparison.html"
    data = json.loads(found.data.read_text())
    assert data["reference"] == "a-001" and data["verdicts"][0]["word"] == "better"
    assert data["loss_at_equal_tokens"]["all"] == {"a-001": pytest.approx(1.0), "b-001": pytest.approx(1.0)}
    assert "b-001" in found.text and "train.lr" in found.text


def test_a_verdict_over_different_targets_comes_with_a_warning(tmp_path: Path) -> None:
    views = [view_run(write_run(tmp_path / name, LOG, answers=answers(2)).root) for name in ("a", "b")]
    facts = {"target": "demo", "target's weights": "00ff"}
    same = compare_runs([replace(views[0], data=facts), replace(views[1], data=facts | {"target": "targets/demo"})])
    other = compare_runs([replace(views[0], data=facts), replace(views[1], data=facts | {"target's weights": "11ff"})])
    assert not [text for text in same.warnings if "targets" in text]
    assert [text for text in other.warnings if "different targets (a: demo 00ff, b: demo 11ff)" in text]


@pytest.mark.parametrize(("live", "status"), [(False, "KILLED"), (True, "RUNNING")])
def test_a_comparison_does_not_leave_a_run_open_that_nobody_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool, status: str
) -> None:
    store = FakeStore()
    monkeypatch.setattr("dflash.tracking.open.Store", lambda *_arguments, **_named: store.connect())
    monkeypatch.setattr("dflash.stages.tracking.run_is_live", lambda _paths: live)
    for name in ("a-001", "b-001"):
        write_run(tmp_path / name, LOG, answers=answers(2), overrides=["tracking.enabled=true", f"run.root={tmp_path}"])
    compare_stage([tmp_path / "a-001", tmp_path / "b-001"], output=None, track=True)
    (run,) = store.runs.values()
    closed = reopen_run(tmp_path / "b-001")
    assert (run["name"], run["status"], run["tags"]["compared_with"]) == ("b-001.s0", status, "a-001")
    assert run["artifacts"] == [f"compare/a-001-vs-b-001/comparison.{kind}" for kind in ("html", "json")]
    for ended in ("FAILED", "KILLED", "FINISHED"):
        run["status"] = ended
        tracker = tracker_of(closed)
        tracker.connect()
        assert run["status"] == "RUNNING"
        close_again(closed, tracker)
        assert run["status"] == ("RUNNING" if live else ended), "an evaluation of an ended run leaves it as it was"
    closed.paths.summary.write_text("{}")
    run["status"] = "RUNNING"
    tracker = tracker_of(closed)
    tracker.connect()
    close_again(closed, tracker)
    assert run["status"] == ("RUNNING" if live else "FINISHED")


def test_a_rollback_is_told_with_what_it_skipped(tmp_path: Path) -> None:
    again = "".join(step_line(step, segment=1) for step in range(10, 25))
    paths = write_run(tmp_path / "a", LOG + again)
    plan = RollbackPlan(
        key="k", action="rollback", rung=2, segment=0, onset_step=15, alarm_step=18, region_step=15, target_step=10,
        skip=((14, 17),), overlay=None, reason="the loss exploded",
    )  # fmt: skip
    entries = [RollbackEntry("begin", plan, 10, None, 1.0), RollbackEntry("end", plan, 10, 1, 2.0)]
    paths.ledger.write_text("".join(to_json(entry) + "\n" for entry in entries))
    assert len(read_ledger(paths.ledger)) == 2
    write_run(tmp_path / "b", LOG)
    found = compare_runs([view_run(tmp_path / "a"), view_run(tmp_path / "b")])
    assert found.history[0] == (
        "segment 0: steps 0 to 19, of which 10 still count",
        "segment 1: steps 10 to 24",
        "rolled back from step 18 to step 10 (rung 2), without batches 14-16: the loss exploded",
    )
    assert found.common_tokens == 2000
    assert found.verdicts == ("b cannot be judged against a: acceptance was not evaluated for both.",)
    assert any("different numbers of tokens" in text for text in found.warnings)


def test_measurements_that_do_not_mean_the_same_are_said_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", LOG, answers=answers(2))
    other = write_run(tmp_path / "b", LOG)
    write_evaluation_files(other.eval_dir / "trained-step-9", answers(9))
    write_evaluation_files(other.eval_dir / "trained-step-12", answers(3), replace(RESULT, temperature=0.6, lossless=False))
    found = compare_runs([view_run(tmp_path / "a"), view_run(tmp_path / "b")])
    assert found.contests[0][0].other == pytest.approx(3.25), "the newest evaluation counts"
    assert any("temperature (a: 0.0, b: 0.6)" in text for text in found.warnings)
    assert any("b: decoding was not lossless" in text for text in found.warnings)


def test_a_page_shows_hostile_text_as_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    evil = {f"h{i}": (hostile, [2, 3]) for i in range(9)} | {f"g{i}": ("x", [2]) for i in range(9)}
    write_run(tmp_path / "a", LOG, answers=evil)
    write_run(tmp_path / f"b{hostile.replace('/', '')}", LOG, answers=evil)
    view = view_run(tmp_path / "a")
    other = replace(view_run(tmp_path / f"b{hostile.replace('/', '')}"), data={hostile: hostile}, notes=(hostile,))
    page = render_comparison(compare_runs([view, other]))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert 'src="http' not in page and "@import" not in page


@pytest.mark.parametrize("pointer", [None, "{}", '{"dir": "nowhere", "fingerprint": "0"}'])
def test_a_data_set_that_is_gone_is_told_and_the_runs_are_compared_all_the_same(tmp_path: Path, pointer: str | None) -> None:
    paths = write_run(tmp_path / "a", LOG)
    if pointer is not None:
        paths.data_pointer.write_text(pointer)
    view = view_run(tmp_path / "a")
    assert view.data == {} and view.notes[0].startswith("the data set is not described: ")


def test_a_verdict_over_a_handful_of_prompts_says_that_they_are_too_few(tmp_path: Path) -> None:
    write_run(tmp_path / "a", LOG, answers=answers(2, count=5))
    write_run(tmp_path / "b", LOG, answers=answers(4, count=5))
    (verdict,) = compare_runs([view_run(tmp_path / "a"), view_run(tmp_path / "b")]).verdicts
    assert verdict.startswith("No difference shown") and "fewer than 8" in verdict


def test_a_verdict_over_the_turns_of_a_few_conversations_says_so(tmp_path: Path) -> None:
    for name, tokens in (("a", 2), ("b", 4)):
        file = write_run(tmp_path / name, LOG, answers=answers(tokens)).eval_dir / "trained-step-12" / "prompts.jsonl"
        rows = [json.loads(line) | {"drawn_as": f"c{place // 2}"} for place, line in enumerate(file.read_text().splitlines())]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (verdict,) = compare_runs([view_run(tmp_path / "a"), view_run(tmp_path / "b")]).verdicts
    assert verdict.startswith("No difference shown")
    assert verdict.endswith("over the same 12 prompts (6 of them independent; fewer than 8 decide nothing).")


def test_one_prompt_of_a_kind_has_no_interval_and_one_without_a_verification_no_length(tmp_path: Path) -> None:
    for name, tokens in (("a", 2), ("b", 3)):
        write_run(tmp_path / name, LOG, answers=answers(tokens) | {"x": ("single", [tokens, 4]), "y": ("silent", [])})
    found = compare_stage([tmp_path / "a", tmp_path / "b"], output=None, track=False)
    cells = {row.kind: row.cells for row in found.comparison.acceptance}
    assert cells["single"] == ((3.0, None, None), (3.5, None, None)) and cells["silent"] == (None, None)
    assert all(low < length < high for length, low, high in cells["all"])
    assert {each.kind for each in found.comparison.contests[0]} == {"all", "lists", "sums", "single"}
    single = next(each for each in found.comparison.contests[0] if each.kind == "single")
    assert (single.difference, single.low, single.high, single.word) == (0.5, None, None, "no difference")
    assert "+0.50 <small>[no interval]</small>" in found.page.read_text()
    line = next(line for line in found.text.splitlines() if line.split()[:1] == ["single"])
    assert line.split() == ["single", "3.00", "3.50"] and "3.00 <small>" not in found.page.read_text()
    json.loads(found.data.read_text(), parse_constant=pytest.fail)


def test_a_length_outside_of_its_own_interval_is_drawn(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, LOG, answers=answers(2))
    views = [view_run(tmp_path / name) for name in ("a", "b")]
    rows = (AcceptanceRow("all", ((2.0, 2.1, 2.2), (2.0, 1.8, 1.9))),)
    assert draw_acceptance(views, rows).startswith(b"\x89PNG")


@pytest.mark.parametrize("missing", ["verifications.parquet", "prompts.jsonl"])
def test_half_an_evaluation_is_refused(tmp_path: Path, missing: str) -> None:
    paths = write_run(tmp_path / "a", LOG, answers=answers(2))
    (paths.eval_dir / "trained-step-12" / missing).write_bytes(b"{")
    with pytest.raises(EvaluationError, match="not a whole evaluation"):
        view_run(tmp_path / "a")


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", LOG)
    write_run(tmp_path / "b", "")
    with pytest.raises(EvaluationError, match="needs two runs"):
        compare_stage([tmp_path / "a"], output=None, track=False)
    with pytest.raises(EvaluationError, match="named twice"):
        compare_stage([tmp_path / "a", tmp_path / "a"], output=None, track=False)
    with pytest.raises(DataError, match="no training step"):
        compare_stage([tmp_path / "a", tmp_path / "b"], output=None, track=False)
    with pytest.raises(RunStateError, match="not a run"):
        compare_stage([tmp_path / "a", tmp_path / "c"], output=None, track=False)
    assert not (tmp_path / "comparisons").exists()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) != 0
    assert "not a run" in capsys.readouterr().err
