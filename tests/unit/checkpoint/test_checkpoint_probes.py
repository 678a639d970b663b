"""Acceptance probes of checkpoints: which are due, what is known, what the verdict makes of it, and which is the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.checkpoint import (
    Evidence,
    ProbeView,
    best_checkpoint,
    checkpoints_to_delete,
    hold_probes,
    load_drafter,
    outcomes,
    probe_is_due,
    probe_view,
    propose_transitions,
    read_probes,
    tries,
)
from dflash.config import CheckpointConfig
from dflash.errors import CheckpointError, RunStateError, SchemaVersionError
from dflash.records import CheckpointState, LedgerEntry, ProbeFigures, ProbeOutcome, ProbeRecord, RunPaths, to_json
from tests.support.checkpoints import entry, save_at, tensors_at

RULE = CheckpointConfig(interval_steps=10, window_steps=10, soak_steps=20)
DETERMINISTIC = settings(max_examples=150, deadline=None, derandomize=True)


def probed(step: int, length: float, *, segment: int = 0, prompts: str = "p") -> ProbeRecord:
    figures = ProbeFigures(length, (length - 0.1, length + 0.1), (round(10 * length),), (10,), (0.5,), 1.0)
    return ProbeRecord(step, segment, prompts, "measured", "", "", figures)


def without(step: int, outcome: ProbeOutcome, *, segment: int = 0, prompts: str = "p", reason: str = "") -> ProbeRecord:
    return ProbeRecord(step, segment, prompts, outcome, "", reason, None)


def longer(new: ProbeFigures, old: ProbeFigures) -> bool:
    return new.acceptance_length > old.acceptance_length + 0.2


def states(*pairs: tuple[int, CheckpointState]) -> dict[int, LedgerEntry]:
    return {step: entry(step, state) for step, state in pairs}


@DETERMINISTIC
@given(st.integers(1, 40), st.integers(1, 40))
def test_the_first_save_at_or_behind_every_multiple_is_due(every: int, interval: int) -> None:
    saves = list(range(0, 400, interval))
    expected = {next((save for save in saves if save >= multiple), None) for multiple in range(every, 400, every)}
    due = {step for step in saves if probe_is_due(step, every_steps=every, interval_steps=interval)}
    assert due == expected - {None}
    assert not any(probe_is_due(step, every_steps=0, interval_steps=interval) for step in saves)


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    torn = to_json(probed(10, 1.5)).encode()[:40]
    with hold_probes(paths) as writer:
        writer.append(without(10, "begun"))
        with paths.probes.open("ab") as file:
            file.write(torn)
        writer.append(probed(20, 1.7))
    assert [record.step for record in read_probes(paths.probes)] == [10, 20]
    assert torn in paths.probes.read_bytes().split(b"\n")
    paths.probes.write_text(to_json(probed(10, 1.5)).replace('"schema_version":1', '"schema_version":9'))
    with pytest.raises(SchemaVersionError, match="9"):
        read_probes(paths.probes)


def test_only_one_process_probes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with hold_probes(paths), pytest.raises(RunStateError, match="another process"), hold_probes(paths):
        pass
    with hold_probes(paths):
        pass


def test_figures_of_other_settings_do_not_count_but_failures_do() -> None:
    records = [probed(10, 1.2, prompts="old"), without(20, "failed", prompts="old"), without(30, "begun"), probed(40, 1.5)]
    assert sorted(outcomes(records)) == [(20, 0), (40, 0)]
    assert sorted(outcomes(records[:3])) == [(10, 0), (20, 0)]
    assert outcomes([]) == {}


def test_tries_count_only_what_has_no_outcome() -> None:
    begun = without(10, "begun")
    assert tries([begun, begun], (10, 0), prompts_sha256="p") == 2
    assert tries([begun, probed(10, 1.0), begun], (10, 0), prompts_sha256="p") == 1
    assert tries([begun], (10, 1), prompts_sha256="p") == 0
    assert tries([begun], (10, 0), prompts_sha256="other") == 0


def test_the_view_awaits_what_is_due_and_has_no_outcome_of_this_segment() -> None:
    current = states((0, "clean"), (10, "probation"), (20, "probation"), (30, "clean"), (40, "suspect"), (50, "probation"))
    current[20] = replace(current[20], segment=1)
    records = [probed(20, 1.4, segment=0), without(50, "failed", reason="why")]
    view = probe_view(records, current, due=[10, 20, 30, 40, 50], min_frac=0.8)
    assert view.awaited == {(10, 0), (20, 1)}, "a checkpoint that was written again starts anew; those with a verdict wait for none"
    assert view.given_up == {(50, 0): "failed: why"}
    assert view.lengths == {(20, 0): 1.4}


def verdicts(current: dict[int, LedgerEntry], view: ProbeView) -> dict[int, tuple[CheckpointState, str]]:
    seen = Evidence((), 1000, lambda _first, _end: 1.0, 0.99, ended=False, probes=view)
    moves = propose_transitions(current, evidence=seen, rule=RULE, problem_of=lambda _step: None)
    return {move.step: (move.state, move.reason) for move in moves}


def test_a_missing_probe_is_unknown_a_failed_one_is_not() -> None:
    current = states((10, "probation"), (20, "probation"), (30, "probation"))
    view = ProbeView(lengths={(10, 0): 2.0}, awaited=frozenset({(20, 0)}), given_up={(30, 0): "failed: no memory"}, min_frac=0.8)
    found = verdicts(current, view)
    assert {step: state for step, (state, _) in found.items()} == {10: "clean", 30: "clean"}
    assert "2.000" in found[10][1]
    assert "no memory" in found[30][1]


@pytest.mark.parametrize(("length", "expected"), [(2.4, "clean"), (1.6, "clean"), (1.59, "suspect"), (1.0, "suspect")])
def test_a_collapse_against_the_best_clean_one_before_is_suspect(length: float, expected: str) -> None:
    current = states((10, "clean"), (20, "clean"), (25, "suspect"), (30, "probation"), (40, "clean"))
    lengths = {(10, 0): 2.0, (20, 0): 1.7, (25, 0): 9.0, (30, 0): length, (40, 0): 5.0}
    view = ProbeView(lengths=lengths, min_frac=0.8)
    assert verdicts(current, view)[30][0] == expected, "neither suspect ones nor later ones set the measure"


def test_a_clean_checkpoint_of_the_same_look_is_a_measure_too() -> None:
    view = ProbeView(lengths={(10, 0): 2.0, (20, 0): 1.0}, min_frac=0.8)
    found = verdicts(states((10, "probation"), (20, "probation")), view)
    assert (found[10][0], found[20][0]) == ("clean", "suspect")


def choose(records: list[ProbeRecord], current: dict[int, LedgerEntry], best: int | None, *, gone: int = -1) -> int | None:
    return best_checkpoint(records, current, in_place=[step for step in current if step != gone], best=best, is_better=longer)


def test_the_best_moves_only_when_the_comparison_says_so() -> None:
    current = states(*((step, "probation") for step in (10, 20, 30, 40)))
    records: list[ProbeRecord] = []
    best: int | None = None
    for step, length, expected in ((10, 1.5, 10), (20, 1.6, 10), (30, 1.71, 30), (40, 1.4, 30)):
        records.append(probed(step, length))
        best = choose(records, current, best)
        assert best == expected
        assert choose(records, current, best) == best
    assert choose([*records, without(40, "begun")], current, best) == best


def test_what_is_abandoned_suspect_or_gone_is_not_the_best() -> None:
    current = states((10, "clean"), (20, "probation"))
    records = [probed(10, 1.5), probed(20, 2.0)]
    assert choose(records, current, 20) == 20
    assert choose(records, current, 20, gone=20) == 10
    for state in ("suspect", "bad", "writing"):
        assert choose(records, {**current, 20: entry(20, state)}, 20) == 10  # type: ignore[arg-type]
    assert choose(records, {**current, 20: entry(20, "probation", segment=1)}, 20) == 10, "written again by another segment"
    assert choose([], current, None) is None
    assert choose([without(10, "failed")], current, 10) is None


@DETERMINISTIC
@given(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=8))
def test_no_probed_checkpoint_is_better_than_the_best_beyond_doubt(lengths: list[float]) -> None:
    records = [probed(10 * (number + 1), length) for number, length in enumerate(lengths)]
    current = states(*((record.step, "probation") for record in records))
    best: int | None = None
    for count in range(1, len(records) + 1):
        best = choose(records[:count], current, best)
        figures = {record.step: record.figures for record in records[:count]}
        assert best is not None
        assert not any(longer(other, figures[best]) for other in figures.values())  # type: ignore[arg-type]


def test_retention_spares_the_pinned_one_besides_all_others() -> None:
    known: dict[int, CheckpointState] = dict.fromkeys(range(0, 80, 10), "clean")
    without_pin = checkpoints_to_delete(list(known), known, keep_clean=2, keep_other=1, pinned=())
    with_pin = checkpoints_to_delete(list(known), known, keep_clean=2, keep_other=1, pinned=(20,))
    assert 20 in without_pin
    assert 20 not in with_pin
    assert len(with_pin) == len(without_pin) - 1


def test_weights_are_read_alone_and_verified(tmp_path: Path) -> None:
    save_at(tmp_path, 10)
    folder = tmp_path / "step-10"
    (folder / "optimizer.safetensors").unlink()
    manifest, weights = load_drafter(folder)
    assert manifest.step == 10
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {n: t.tolist() for n, t in tensors_at(10)[0].items()}
    file = folder / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="damaged"):
        load_drafter(folder)
