"""Ledger, retention and the rule for clean checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.checkpoint import (
    Evidence,
    Ledger,
    checkpoints_to_delete,
    clean_steps,
    current_states,
    is_legal,
    propose_transitions,
    read_ledger,
)
from dflash.checkpoint.ledger import LEGAL
from dflash.config import CheckpointConfig
from dflash.errors import RunStateError, SchemaVersionError
from dflash.records import CheckpointState, to_json
from tests.support.checkpoints import entry

STATES = get_args(CheckpointState)
RULE = CheckpointConfig(interval_steps=10, window_steps=10, soak_steps=20)
DETERMINISTIC = settings(max_examples=150, deadline=None, derandomize=True)


def evidence(
    *, spans: tuple[tuple[int, int], ...] = (), judged: int = 0, missing: frozenset[int] = frozenset(), ended: bool = False
) -> Evidence:
    def coverage_frac(first: int, end: int) -> float:
        return sum(step not in missing for step in range(first, end)) / max(1, end - first)

    return Evidence(critical_spans=spans, judged_records=judged, coverage_frac=coverage_frac, min_coverage_frac=0.99, ended=ended)


def nothing_wrong(_step: int) -> str | None:
    return None


def judge_one(step: int, state: CheckpointState, seen: Evidence) -> CheckpointState:
    proposals = propose_transitions({step: entry(step, state)}, evidence=seen, rule=RULE, problem_of=nothing_wrong)
    assert len(proposals) <= 1
    return proposals[0].state if proposals else state


@DETERMINISTIC
@given(st.lists(st.tuples(st.sampled_from([0, 4, 8]), st.sampled_from(STATES), st.integers(0, 2)), max_size=25))
def test_the_ledger_only_ever_holds_legal_histories(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, CheckpointState, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "checkpoints" / "ledger.jsonl"
    expected = []
    current = {}
    for step, state, segment in attempts:
        wanted = entry(step, state, segment=segment)
        ledger = Ledger(path)  # as after a restart of the supervisor
        if is_legal(current.get(step), wanted):
            ledger.append(wanted)
            expected.append(wanted)
            current[step] = wanted
        else:
            with pytest.raises(RunStateError, match=f"step-{step}"):
                ledger.append(wanted)
        assert ledger.current == current
    assert read_ledger(path) == expected
    assert clean_steps(path) == tuple(sorted(step for step, last in current.items() if last.state == "clean"))


def test_the_legal_transitions_are_those_of_the_design() -> None:
    edges = {(before, after) for before, states in LEGAL.items() for after in states}
    chain = [(None, "writing"), ("writing", "durable"), ("durable", "probation")]
    verdicts = [("probation", state) for state in ("clean", "suspect", "bad")]
    assert set(chain + verdicts) <= edges
    assert ("clean", "suspect") in edges, "a clean one can be demoted"
    assert not [edge for edge in edges if edge[0] == "bad"], "nothing leads out of bad"
    assert {before for before, after in edges if after == "clean"} == {"probation"}
    assert set(LEGAL) == {None, *STATES}


def test_a_later_segment_may_write_a_step_again_and_an_earlier_one_may_not() -> None:
    bad = entry(4, "bad", segment=1)
    assert is_legal(bad, entry(4, "writing", segment=2))
    assert not is_legal(bad, entry(4, "writing", segment=1))
    assert not is_legal(bad, entry(4, "writing", segment=0))
    assert not is_legal(entry(4, "probation", segment=1), entry(4, "clean", segment=2))


def test_a_torn_line_stays_one_line_and_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(entry(0, "writing"))
    torn = to_json(entry(0, "durable"))[:20].encode()
    with path.open("ab") as file:
        file.write(torn)
    again = Ledger(path)
    again.append(entry(0, "durable"))
    assert path.read_bytes().split(b"\n")[1] == torn
    assert [item.state for item in read_ledger(path)] == ["writing", "durable"]
    assert current_states(read_ledger(path)) == again.current


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(to_json(entry(0, "writing")).replace('"schema_version":2', '"schema_version":7') + "\n")
    with pytest.raises(SchemaVersionError, match="7"):
        read_ledger(path)


@DETERMINISTIC
@given(
    # Mostly clean ones: with a seventh of them there are hardly ever more than are kept.
    st.dictionaries(st.integers(0, 60), st.sampled_from([*STATES, None, *["clean"] * 8]), max_size=20),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_retention_keeps_everything_it_promised(found: dict[int, CheckpointState | None], keep_clean: int, keep_other: int) -> None:
    states = {step: state for step, state in found.items() if state is not None}
    doomed = checkpoints_to_delete(list(found), states, keep_clean=keep_clean, keep_other=keep_other, pinned=())
    kept = set(found) - set(doomed)
    assert set(doomed) <= set(found)
    clean = sorted(step for step in found if step > 0 and states.get(step) == "clean")
    assert set(clean[-keep_clean:]) <= kept
    if found:
        assert max(found) in kept
    if 0 in found:
        assert 0 in kept
    newest_clean = clean[-1] if clean else 0
    assert all(step in kept for step in found if step >= newest_clean)
    # And no more than that: older ones beyond the promise go, oldest first.
    rest = sorted(step for step in found if 0 < step < newest_clean and step not in clean[-keep_clean:])
    assert doomed == rest[: max(0, len(rest) - keep_other)]


def test_nothing_is_deleted_while_only_step_0_is_clean() -> None:
    states: dict[int, CheckpointState] = {0: "clean", 10: "probation", 20: "suspect", 30: "bad"}
    assert checkpoints_to_delete([0, 10, 20, 30], states, keep_clean=1, keep_other=0, pinned=()) == []


@pytest.mark.parametrize(
    ("judged", "ended", "expected"),
    [(39, False, "probation"), (40, False, "clean"), (39, True, "clean"), (20, True, "clean"), (19, True, "probation")],
)
def test_a_checkpoint_is_clean_only_after_its_soak_or_at_the_end(judged: int, ended: bool, expected: str) -> None:
    assert judge_one(20, "probation", evidence(judged=judged, ended=ended)) == expected


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 9), "clean"),  # recovered before the window
        ((0, 10), "suspect"),  # reaches into the window
        ((15, 16), "suspect"),
        ((39, 45), "suspect"),  # the last onset inside the soak
        ((40, 45), "clean"),  # begins after the soak
        ((0, 99), "suspect"),
    ],
)
@pytest.mark.parametrize("before", ["probation", "clean"])
def test_critical_findings_in_window_or_soak_make_suspect(span: tuple[int, int], expected: str, before: CheckpointState) -> None:
    assert judge_one(20, before, evidence(spans=(span,), judged=60)) == expected


def test_a_finding_makes_suspect_at_once_and_not_only_after_the_soak() -> None:
    assert judge_one(20, "probation", evidence(spans=((21, 22),), judged=23)) == "suspect"


@DETERMINISTIC
@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=4),
    st.integers(0, 90),
    st.booleans(),
)
def test_clean_never_touches_a_critical_record_in_its_span(
    step: int, spans: list[tuple[int, int]], judged: int, ended: bool
) -> None:
    verdict = judge_one(step, "probation", evidence(spans=tuple(spans), judged=judged, ended=ended))
    window = set(range(max(0, step - RULE.window_steps), step))
    soak = range(step, step + RULE.soak_steps)
    dirty = any(window & set(range(onset, last + 1)) or onset in soak for onset, last in spans)
    crossing = any(onset < step <= last for onset, last in spans)
    if dirty or crossing:
        assert verdict == "suspect"
    elif judged >= step + RULE.soak_steps or (ended and judged >= step):
        assert verdict == "clean"
    else:
        assert verdict == "probation"


def test_holes_in_the_log_leave_it_unknown() -> None:
    missing = frozenset({12})
    assert judge_one(20, "probation", evidence(judged=60, missing=missing)) == "probation"
    assert judge_one(20, "probation", evidence(judged=60, missing=frozenset({9, 40}))) == "clean"


def test_damage_or_non_finite_weights_make_bad_and_files_are_read_only_when_due() -> None:
    asked: list[int] = []

    def problem_of(step: int) -> str | None:
        asked.append(step)
        return "weights or moments are not finite" if step == 20 else None

    current = {step: entry(step, "probation") for step in (0, 10, 20, 90)} | {30: entry(30, "bad"), 40: entry(40, "clean")}
    seen = evidence(judged=50)
    proposals = propose_transitions(current, evidence=seen, rule=RULE, problem_of=problem_of)
    assert [(proposal.step, proposal.state) for proposal in proposals] == [(0, "clean"), (10, "clean"), (20, "bad")]
    assert asked == [0, 10, 20]
    assert all(is_legal(current[proposal.step], entry(proposal.step, proposal.state)) for proposal in proposals)


def test_step_0_is_clean_by_definition_whatever_the_log_says() -> None:
    assert judge_one(0, "probation", evidence(spans=((0, 5),), judged=0)) == "clean"
