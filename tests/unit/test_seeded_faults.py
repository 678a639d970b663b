"""The seeded faults fit the source: each stands in it exactly once, leaves a file that can be imported, and names real tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import seeded_faults
from benchmarks.report import kept_lines
from benchmarks.seeded_faults import GOAL, ROOT, append, figures, with_fault
from benchmarks.seeded_faults_list import FAULTS, Fault


def test_there_are_thirty_in_the_rooms_that_judge_plan_and_keep_the_ledger() -> None:
    assert len(FAULTS) == 30
    assert len({fault.name for fault in FAULTS}) == 30
    rooms = [fault.file.split("/")[1] for fault in FAULTS]
    assert {room: rooms.count(room) for room in set(rooms)} == {"health": 12, "rollback": 9, "data": 5, "checkpoint": 4}
    assert GOAL >= 28


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_applies_once_and_can_be_imported(fault: Fault) -> None:
    changed = with_fault((ROOT / fault.file).read_text(encoding="utf-8"), fault)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / fault.file).read_text(encoding="utf-8")))
    assert all((ROOT / "tests" / "unit" / name).is_file() for name in fault.tests)


@pytest.mark.parametrize("source", ["nothing of it", "x = 1\nx = 1\n"])
def test_a_list_that_is_out_of_date_is_no_result(source: str) -> None:
    with pytest.raises(SystemExit, match="bring the list up to date"):
        with_fault(source, Fault("f", "a.py", "x = 1", "x = 2", ()))


def test_an_interrupted_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fake(tests: tuple[str, ...], copy: Path) -> tuple[int, float, str]:
        changed = (copy / "a.py").read_text() != "x = 1\n"
        ran.append(f"{tests[0]} {'with' if changed else 'without'}")
        return int(changed and tests[0] == "sees"), 0.5, ""

    def copied(copy: Path) -> None:
        copy.mkdir(exist_ok=True)
        (copy / "a.py").write_text("x = 1\n")

    monkeypatch.setattr(seeded_faults, "run_tests", fake)
    monkeypatch.setattr(seeded_faults, "fresh_copy", copied)
    faults = [Fault(name, "a.py", "x = 1", f"x = {number}", (tests,)) for number, (name, tests) in enumerate(
        [("one", "sees"), ("two", "blind"), ("three", "sees")], start=2
    )]  # fmt: skip
    assert [outcome["caught"] for outcome in seeded_faults.tried(faults[:2], work=tmp_path)] == [True, False]
    assert ran == ["sees without", "sees with", "blind without", "blind with"]
    (tmp_path / "outcomes.jsonl").open("a").write('{"key": "torn')
    outcomes = list(seeded_faults.tried(faults, work=tmp_path))
    assert ran[4:] == ["sees with"], "what is known is not tried again"
    assert figures(outcomes) == {"faults": 3, "caught": 2, "goal": GOAL, "not_caught": "two", "cpu_s": 1.5}


def test_tests_that_fail_without_a_fault_or_test_nothing_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(seeded_faults, "fresh_copy", lambda _copy: None)
    fault = Fault("f", "a.py", "x = 1", "x = 2", ("t",))
    for code, said in ((1, "without any fault"), (2, "without any fault")):
        monkeypatch.setattr(seeded_faults, "run_tests", lambda *_, code=code: (code, 0.0, ""))
        with pytest.raises(SystemExit, match=said):
            list(seeded_faults.tried([fault], work=tmp_path))
    monkeypatch.setattr(seeded_faults, "run_tests", lambda _tests, copy: (0 if "1" in (copy / "a.py").read_text() else 2, 0.0, ""))
    with pytest.raises(SystemExit, match="tested nothing"):
        list(seeded_faults.tried([fault], work=tmp_path))
    assert (tmp_path / "copy" / "a.py").read_text() == "x = 1\n", "the fault was taken out again"


def test_a_torn_line_is_no_outcome(tmp_path: Path) -> None:
    append(tmp_path / "log", {"key": "a"}, {})
    with (tmp_path / "log").open("a") as file:
        file.write('{"key"')
    append(tmp_path / "log", {"key": "b"}, {})
    assert kept_lines(tmp_path / "log") == [{"key": "a"}, {"key": "b"}]
