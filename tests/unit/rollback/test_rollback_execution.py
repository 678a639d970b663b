"""What a supervisor does next: one durable effect after the other, from facts alone."""

from __future__ import annotations

from dataclasses import replace

from dflash.records import LedgerEntry
from dflash.records.rollback import RollbackEntry, RollbackPlan, SavedState
from dflash.rollback import Acknowledge, Facts, MoveAside, NoteCheckpoint, NoteRollback, StopTrainer, VerifyTarget, next_action

PLAN = RollbackPlan(
    key="k", action="rollback", rung=1, segment=2, onset_step=130, alarm_step=133, region_step=130, target_step=100,
    skip=((129, 134),), overlay=None, reason="loss exploded",
)  # fmt: skip
LEDGER = [LedgerEntry(step, 2, "clean", "", "") for step in (50, 100)] + [LedgerEntry(150, 2, "probation", "", "")]
SAVED = {50: SavedState(2, 50), 100: SavedState(2, 100), 150: SavedState(2, 150)}
FACTS = Facts(requests=[PLAN], ledger=LEDGER, segment=2, trainer_alive=True, saved=SAVED, verified={}, now_s=7.0)
BEGIN = RollbackEntry("begin", PLAN, 100, None, 7.0)


def test_nothing_is_done_without_a_request() -> None:
    assert next_action(replace(FACTS, requests=[])) is None


def test_the_intention_is_noted_before_anything_else() -> None:
    assert next_action(FACTS) == NoteRollback(BEGIN)


def clean(step: int) -> LedgerEntry:
    return LedgerEntry(step, 2, "clean", "", "")


def test_a_checkpoint_that_became_clean_since_the_decision_is_the_better_target() -> None:
    saved = {**SAVED, 125: SavedState(2, 131)}
    newer = replace(FACTS, saved=saved, ledger=[*LEDGER, clean(125)])
    action = next_action(newer)
    assert isinstance(action, NoteRollback)
    assert action.entry.plan == replace(PLAN, target_step=125, skip=((131, 134),)), "what lies before is part of its state"
    assert action.entry.target_step == 125
    behind_the_onset = replace(FACTS, ledger=[*LEDGER, clean(150)])
    assert next_action(behind_the_onset) == NoteRollback(BEGIN)
    only_waiting = replace(FACTS, saved=saved, ledger=[*LEDGER, LedgerEntry(125, 2, "probation", "", "")])
    assert next_action(only_waiting) == NoteRollback(BEGIN)
    further_back = replace(PLAN, rung=2)
    action = next_action(replace(newer, requests=[further_back]))
    assert isinstance(action, NoteRollback)
    assert action.entry.plan == further_back, "a later rung means to go further back"


def test_the_whole_way() -> None:
    begun = replace(FACTS, ledger=[*LEDGER, BEGIN])
    assert next_action(begun) == StopTrainer()
    stopped = replace(begun, trainer_alive=False)
    assert next_action(stopped) == VerifyTarget(100)
    verified = replace(stopped, verified={100: None})
    assert next_action(verified) == MoveAside(150, 2)
    moved = replace(verified, saved={step: state for step, state in SAVED.items() if step <= 100})
    note = next_action(moved)
    assert isinstance(note, NoteCheckpoint)
    assert (note.step, note.segment, note.state) == (150, 2, "bad")
    noted = replace(moved, ledger=[*moved.ledger, LedgerEntry(150, 2, "bad", "", "")])
    end = RollbackEntry("end", PLAN, 100, 3, 7.0)
    assert next_action(noted) == NoteRollback(end)
    ended = replace(noted, ledger=[*noted.ledger, end], segment=3)
    assert next_action(ended) == Acknowledge("k", "back at step 100, segment 3 goes on")
    assert next_action(replace(ended, requests=[])) is None


def test_a_begun_rollback_goes_on_even_if_its_request_file_is_gone() -> None:
    assert next_action(replace(FACTS, requests=[], ledger=[*LEDGER, BEGIN])) == StopTrainer()


def test_a_damaged_target_is_marked_and_the_one_before_it_taken() -> None:
    facts = replace(FACTS, ledger=[*LEDGER, BEGIN], trainer_alive=False, verified={100: "hash differs"})
    assert next_action(facts) == NoteCheckpoint(100, 2, "bad", "hash differs")
    marked = replace(facts, ledger=[*facts.ledger, LedgerEntry(100, 2, "bad", "", "hash differs")])
    assert next_action(marked) == VerifyTarget(50)


def test_without_any_sound_checkpoint_the_run_is_halted() -> None:
    bad = [LedgerEntry(step, 2, "bad", "", "") for step in (50, 100)]
    action = next_action(replace(FACTS, ledger=[*LEDGER, BEGIN, *bad], trainer_alive=False))
    assert isinstance(action, NoteRollback)
    assert action.entry.phase == "halt"


def test_a_request_about_a_segment_that_is_over_changes_nothing() -> None:
    action = next_action(replace(FACTS, segment=3))
    assert action == Acknowledge("k", "superseded: segment 2 is over, segment 3 runs")


def test_a_halt_stops_the_trainer_and_is_noted_and_answered() -> None:
    halt = replace(PLAN, action="halt", skip=())
    facts = replace(FACTS, requests=[halt])
    assert next_action(facts) == StopTrainer()
    note = next_action(replace(facts, trainer_alive=False))
    assert isinstance(note, NoteRollback)
    assert note.entry.phase == "halt"
    done = replace(facts, trainer_alive=False, ledger=[*LEDGER, note.entry])
    assert next_action(done) == Acknowledge("k", "the run is halted")


def test_checkpoints_of_the_new_segment_stay_in_place() -> None:
    """A supervisor that died after the relaunch, before the acknowledgement, must not throw new work away."""
    end = RollbackEntry("end", PLAN, 100, 3, 7.0)
    saved = {50: SAVED[50], 100: SAVED[100], 150: SavedState(3, 155)}
    facts = replace(FACTS, ledger=[*LEDGER, BEGIN, end], segment=3, saved=saved)
    assert next_action(facts) == Acknowledge("k", "back at step 100, segment 3 goes on")
