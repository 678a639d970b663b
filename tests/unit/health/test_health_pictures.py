"""What the pictures are drawn from: bounded memory, peaks that thinning cannot lose, and a clean way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.axes import Axes

from dflash.health.history import MAX_PEAKS, MAX_POINTS, History, Peaks, Save
from dflash.health.pictures import draw_pictures
from dflash.health.probe_plot import draw_probes
from dflash.health.report import PICTURES_FOLDER, write_report
from tests.support.health_runs import healthy, items_of, new_checker, remedy
from tests.support.log_simulator import Record, change_steps, event, resumed

RECORDS = healthy(seed=6, steps=700)


def history_of(records: list[Record] | tuple[Record, ...]) -> History:
    checker = new_checker()
    checker.feed(items_of(records))
    return checker.history


def three_targets(records: tuple[Record, ...]) -> list[Record]:
    return change_steps(records, lambda r: replace(r, target_depths=(r.step, r.step // 2, r.step)))


@pytest.mark.parametrize("count", [1, MAX_PEAKS, MAX_PEAKS + 1, 5 * MAX_PEAKS + 3, 3000])
def test_peaks_are_the_highest_of_each_stretch_and_none_is_lost(count: int) -> None:
    values = [(7 * n) % 101 for n in range(count)]
    values[count // 2] = 1000
    peaks, pieces = Peaks(), Peaks()
    peaks.see([(step, value, step) for step, value in enumerate(values)])
    for first in range(0, count, 7):
        pieces.see([(step, values[step], step) for step in range(first, min(first + 7, count))])
    assert peaks == pieces
    assert len(peaks.stretches) <= MAX_PEAKS
    starts = [peak.step for peak in peaks.stretches]
    for peak, end in zip(peaks.stretches, [*starts[1:], count], strict=True):
        assert peak.value == max(values[peak.step : end])
        assert values[peak.tag] == peak.value
    assert max(peak.value for peak in peaks.stretches) == 1000


def test_the_history_is_bounded_and_survives_being_saved() -> None:
    history = history_of(three_targets(RECORDS))
    assert sorted(history.queues) == ["features", "ready"]
    assert sorted(history.targets) == [0, 1, 2]
    assert all(len(curve.points) <= MAX_POINTS for curve in (*history.queues.values(), *history.targets.values()))
    assert history.targets[1].points[-1].value < 0 < history.targets[0].points[-1].value
    again = msgspec.convert(msgspec.to_builtins(history, str_keys=True), History, str_keys=True)
    assert again == history


def test_saves_are_spans_and_an_open_one_stays_open() -> None:
    history = history_of(RECORDS[:450])
    assert history.saves[0] == Save(200, 202)
    history.see_event(items_of([event("save_begin", step=500)])[0])  # type: ignore[arg-type]
    assert history.saves[-1] == Save(500, None)


def test_the_longest_runs_of_one_bucket_are_kept_with_their_bucket() -> None:
    history = history_of(RECORDS)
    assert max(peak.value for peak in history.runs.stretches) == 3
    assert {peak.tag for peak in history.runs.stretches} <= set(history.loss)


def test_a_run_that_goes_back_forgets_what_it_abandons() -> None:
    history = history_of(resumed(list(RECORDS), died_at=350, from_step=200))
    steps = [peak.step for peak in history.step_time.stretches]
    assert steps == sorted(steps)
    assert [save.step for save in history.saves] == [200, 400, 600]
    for curve in history.queues.values():
        assert [p.step for p in curve.points] == sorted(p.step for p in curve.points)


def test_only_what_the_log_has_numbers_for_is_drawn() -> None:
    full = draw_pictures(history_of(three_targets(RECORDS)), ())
    assert [picture.name for picture in full.machinery] == ["gradient", "step-time", "queues", "targets", "runs"]
    assert len(full.buckets) == 6
    empty = draw_pictures(History(), ())
    assert (empty.loss, empty.machinery, empty.buckets) == ((), (), ())


def test_the_pictures_are_files_beside_the_page(tmp_path: Path) -> None:
    checker = new_checker()
    checker.feed(items_of(RECORDS))
    report = checker.report(run="x", now_s=1.7e9, ended=True, remedy=remedy)
    page = write_report(report, checker.history, tmp_path)
    files = {file.name for file in (tmp_path / PICTURES_FOLDER).iterdir()}
    assert files == {"loss.png", "gradient.png", "step-time.png", "queues.png", "runs.png"}
    assert all((tmp_path / PICTURES_FOLDER / name).read_bytes().startswith(b"\x89PNG") for name in files)
    assert page.is_file()


def probe_event(step: int, length: float, *, segment: int = 0) -> Record:
    details = {"outcome": "measured", "acceptance_length": length, "acceptance_ci": [length - 0.2, length + 0.3]}
    return replace(event("acceptance_probe", step=step), segment=segment, details=details)


def test_probes_are_kept_by_step_drawn_and_told() -> None:
    failed = replace(event("acceptance_probe", step=50), details={"outcome": "failed", "reason": "no memory"})
    checker = new_checker()
    absurd = replace(event("acceptance_probe", step=70), details={"acceptance_length": 10**400})
    checker.feed(items_of([*RECORDS[:150], probe_event(100, 2.0), failed, absurd, probe_event(60, 1.5), probe_event(100, 2.5)]))
    assert [(probe.step, probe.length) for probe in checker.history.probes] == [(60, 1.5), (100, 2.5)]
    report = checker.report(run="r", now_s=0.0, ended=True, remedy=remedy)
    assert report.stats["last_probe"] == {"step": 100, "length": 2.5, "low": 2.3, "high": 2.8}
    assert not [finding for finding in report.findings if finding.onset_step == 100]
    names = [picture.name for picture in draw_pictures(checker.history, ()).machinery]
    assert names[0] == "acceptance"
    assert draw_probes(history_of(RECORDS[:60]), ()) is None


def test_a_probe_of_one_prompt_has_no_band(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(event("acceptance_probe", step=60), details={"acceptance_length": 1.5, "acceptance_ci": None})
    upside_down = replace(event("acceptance_probe", step=80), details={"acceptance_length": 1.5, "acceptance_ci": [1.7, 1.2]})
    bands: list[list[int]] = []
    original = Axes.errorbar

    def kept(axes: Axes, x: list[int], *arguments: Any, **more: Any) -> Any:
        bands.append(x)
        return original(axes, x, *arguments, **more)

    monkeypatch.setattr(Axes, "errorbar", kept)
    checker = new_checker()
    checker.feed(items_of([*RECORDS[:150], alone]))
    stats = checker.report(run="r", now_s=0.0, ended=True, remedy=remedy).stats
    assert stats["last_probe"] == {"step": 60, "length": 1.5, "low": None, "high": None}
    only = draw_probes(checker.history, ())
    assert (bands, only is not None and "one prompt" in only.words) == ([], True)
    both = draw_probes(history_of([*RECORDS[:150], alone, probe_event(100, 2.0), upside_down]), ())
    assert bands == [[80, 100]]
    assert both is not None and "one prompt" in both.words
    sure = draw_probes(history_of([*RECORDS[:150], probe_event(100, 2.0)]), ())
    assert sure is not None and "one prompt" not in sure.words


def test_a_rollback_takes_back_the_probes_of_what_it_abandons() -> None:
    history = history_of([*RECORDS[:150], probe_event(60, 1.5), probe_event(100, 2.0), probe_event(140, 2.5)])
    history.rewind(100)
    assert [probe.step for probe in history.probes] == [60, 100], "the run goes on from the checkpoint of step 100"
    for step in range(1000, 1000 + MAX_POINTS + 50):
        history.see_event(items_of([probe_event(step, 2.0)])[0])  # type: ignore[arg-type]
    assert len(history.probes) <= MAX_POINTS
    assert history.probes[-1].step == 1000 + MAX_POINTS + 49
    again = msgspec.convert(msgspec.to_builtins(history, str_keys=True), History, str_keys=True)
    assert again == history
