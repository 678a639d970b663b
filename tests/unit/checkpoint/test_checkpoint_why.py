"""Why a checkpoint is or is not clean: the ledger's own lines, what is missing, what touched it, what a rollback did."""

from __future__ import annotations

from dflash.checkpoint import LogEvidence, why_states
from dflash.config import CheckpointConfig
from dflash.records import LedgerEntry, LedgerLine, RollbackEntry, RollbackPlan

RULE = CheckpointConfig(window_steps=100, soak_steps=100)
NONE = LogEvidence(last_record=-1, critical=())


def entry(step: int, state: str, reason: str = "because") -> LedgerEntry:
    return LedgerEntry(step=step, segment=0, state=state, at="2026-01-01T00:00:00+00:00", reason=reason)  # type: ignore[arg-type]


def rollback(*, target: int, alarm: int) -> RollbackPlan:
    return RollbackPlan(
        key="k", action="rollback", rung=1, segment=0, onset_step=alarm - 10, alarm_step=alarm, region_step=alarm - 10,
        target_step=target, skip=((5, 12),), overlay=None, reason="loss spike",
    )  # fmt: skip


def lines_of(
    ledger: list[LedgerLine], step: int, *, evidence: LogEvidence = NONE, in_place: tuple[int, ...] = (0, 200, 400)
) -> str:
    found = {e.step: e for e in why_states(ledger, evidence=evidence, rule=RULE, in_place=in_place)}
    return "\n".join(found[step].lines)


def test_every_transition_is_told_in_order() -> None:
    text = lines_of(
        [entry(200, "writing"), entry(200, "durable"), entry(200, "probation"), entry(200, "clean", "soak passed")], 200
    )
    assert text.startswith("clean: a run may return to it")
    assert text.index("writing: because") < text.index("clean: soak passed")


def test_a_young_one_says_how_many_records_are_missing() -> None:
    ledger: list[LedgerLine] = [entry(200, "probation")]
    assert "40 more records must be judged (up to 299)" in lines_of(ledger, 200, evidence=LogEvidence(259, ()))
    assert "its soak is over" in lines_of(ledger, 200, evidence=LogEvidence(299, ()))
    assert "100 more" not in lines_of([entry(200, "clean")], 200, evidence=LogEvidence(199, ()))


def test_one_that_waits_for_its_probe_says_so_once_its_soak_is_over() -> None:
    ledger: list[LedgerLine] = [entry(200, "probation")]
    awaited = frozenset({(200, 0), (400, 0)})
    assert "its acceptance probe has no outcome yet" in lines_of(ledger, 200, evidence=LogEvidence(299, (), awaited))
    assert "probe" not in lines_of(ledger, 200, evidence=LogEvidence(250, (), awaited))
    assert "probe" not in lines_of(ledger, 200, evidence=LogEvidence(299, (), frozenset({(200, 1)})))


def test_damage_in_its_window_or_soak_is_named_and_other_damage_is_not() -> None:
    evidence = LogEvidence(900, ((290, 320, "loss has risen"), (600, 700, "not finite")))
    ledger: list[LedgerLine] = [entry(0, "clean"), entry(200, "suspect"), entry(400, "suspect")]
    assert "records 100 to 299 decide; in them: loss has risen (since step 290)" in lines_of(ledger, 200, evidence=evidence)
    assert "loss has risen" in lines_of(ledger, 400, evidence=evidence)
    assert "not finite" not in lines_of(ledger, 400, evidence=evidence)
    assert "decide" not in lines_of(ledger, 0, evidence=evidence)


def test_a_rollback_is_told_for_its_target_and_for_what_it_abandoned() -> None:
    plan = rollback(target=200, alarm=450)
    ledger: list[LedgerLine] = [
        entry(200, "clean"),
        entry(400, "suspect"),
        RollbackEntry(phase="begin", plan=plan, target_step=200, next_segment=None, at_s=1.0),
        RollbackEntry(phase="end", plan=plan, target_step=200, next_segment=1, at_s=2.0),
    ]
    assert "a rollback (rung 1) chose it, leaving out 7 batches: loss spike" in lines_of(ledger, 200)
    assert "segment 1 went on from it" in lines_of(ledger, 200)
    assert "abandoned by the rollback to step-200" in lines_of(ledger, 400)


def test_what_is_gone_and_what_the_ledger_does_not_know_is_said() -> None:
    ledger: list[LedgerLine] = [entry(200, "clean"), entry(600, "clean")]
    assert "its folder is gone" in lines_of(ledger, 600)
    assert "its folder is gone" not in lines_of(ledger, 200)
    removed = lines_of([entry(600, "clean")], 600)
    assert "may return" not in removed
    assert removed.startswith("clean: it was found good")
    assert "the ledger does not know it" in lines_of(ledger, 400)
