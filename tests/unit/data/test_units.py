"""Units as plain functions: planned, built anywhere in any order, committed once; the same bytes whoever builds them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from workshop import GOOD, STOP_IDS, TOKENIZER, VOCAB_SIZE, Workshop, rows

from dflash.config import Config
from dflash.data.answers import InProcessAnswerer
from dflash.data.commit import commit, fix_edges, known_edges
from dflash.data.manifest import EDGES_FILE
from dflash.data.prepare import find_data, plan_build
from dflash.data.units import BuildJob, UnitSpec, build_unit, record_name, stage_unit
from dflash.errors import DataError, StorageError
from dflash.records import DataManifest, UnitRecord, sealed


def planned(config: Config) -> tuple[BuildJob, list[UnitSpec]]:
    return plan_build(config, tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE, target_fingerprint="t1", progress=lambda *_: None)


def built(spec: UnitSpec, job: BuildJob, edges: tuple[int, ...]) -> UnitRecord:
    return build_unit(spec, job=job, edges=edges, tokenizer=TOKENIZER, answerer=None, progress=lambda *_: None)


def corpus(place: Workshop) -> tuple[str, ...]:
    many = rows(*(f"numbers {number} and " + "the weather " * (number % 5) for number in range(150)))
    return place.corpus(*GOOD), place.corpus(*many[:100], "{oops", *many[100:], name="b.jsonl")


POLICIES: dict[str, Any] = {"bad_rows": "quarantine", "max_bad_frac": 0.5}


def everything(folder: str) -> dict[str, bytes]:
    """Every file of a data set that does not say when and where it was built."""
    root = Path(folder)
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if name != "build.json"}


def test_units_survive_the_journey_and_may_be_built_in_any_order(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = workshop.config(*corpus(workshop), **POLICIES)
    normal = workshop.prepare(config)
    elsewhere = config.model_copy(
        update={"data": config.data.model_copy(update={"store": str(tmp_path_factory.mktemp("elsewhere"))})}
    )
    job, units = pickle.loads(pickle.dumps(planned(elsewhere)))  # noqa: S301 - what a cluster does between its processes
    edges = known_edges(job)
    assert edges == (24, 40, 80)
    records = {spec.unit: built(spec, job, edges) for spec in reversed(units)}
    assert find_data(job, units) is None, "units alone are no data set"
    manifest = commit([records[spec.unit] for spec in units], job=job, tokenizer=TOKENIZER)
    assert manifest == normal.manifest
    assert everything(job.location) == everything(normal.location)
    found = find_data(job, units)
    assert found is not None
    assert found.manifest == manifest


@pytest.mark.parametrize("settings", [{}, {"bucket_edges_tokens": "equal_mass", "num_buckets": 3}], ids=["given", "measured"])
def test_the_number_of_workers_changes_no_byte(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    files = corpus(workshop)
    alone = workshop.prepare(workshop.config(*files, **POLICIES, **settings))
    spread = workshop.prepare(workshop.config(*files, **POLICIES, **settings, workers=2, store=str(tmp_path_factory.mktemp("two"))))
    assert not spread.reused
    assert spread.location != alone.location
    assert everything(spread.location) == everything(alone.location)


def test_a_builder_that_comes_second_verifies_and_uses_what_is_there(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    job, units = planned(workshop.config(*corpus(workshop), **POLICIES))
    records = [built(spec, job, (24, 40, 80)) for spec in units]
    first = commit(records, job=job, tokenizer=TOKENIZER)
    name = next(Path(job.location).glob("manifests/*.json"))
    stamp = name.stat().st_mtime_ns
    caplog.set_level("INFO")
    assert commit(records, job=job, tokenizer=TOKENIZER) == first
    assert name.stat().st_mtime_ns == stamp
    assert "committed by another builder: verified and used" in caplog.text


def test_measured_edges_are_fixed_by_the_first_builder(workshop: Workshop) -> None:
    config = workshop.config(*corpus(workshop), **POLICIES, bucket_edges_tokens="auto", num_buckets=3)
    job, units = planned(config)
    assert known_edges(job) is None
    assert find_data(job, units) is None
    staged = [stage_unit(spec, job=job, tokenizer=TOKENIZER, answerer=None, progress=lambda *_: None) for spec in units]
    edges = fix_edges(job, staged)
    assert edges[-1] == 80
    assert fix_edges(job, staged[:1]) == edges, "another builder, with other files, gets the same"
    assert known_edges(job) == edges
    records = [built(spec, job, edges) for spec in units]
    assert not list(Path(job.location).glob("staging/units/*.json")), "staged rows go when they are dealt out"
    assert isinstance(commit(records, job=job, tokenizer=TOKENIZER), DataManifest)
    Path(job.location, EDGES_FILE).write_text(sealed({"edges_tokens": [8, 4]}))
    with pytest.raises(DataError, match=r"edges.json holds \[8, 4\]"):
        known_edges(job)


def test_a_source_that_changes_while_it_is_read_is_refused(workshop: Workshop) -> None:
    job, units = planned(workshop.config(*corpus(workshop), **POLICIES))
    workshop.corpus(*GOOD, *rows("late"))
    with pytest.raises(StorageError, match=r"a\.jsonl changed while it was read"):
        built(units[0], job, (24, 40, 80))
    assert job.store.size(record_name(units[0].unit)) is None


def test_a_record_of_other_edges_or_of_another_unit_is_not_used(workshop: Workshop) -> None:
    job, units = planned(workshop.config(*corpus(workshop), **POLICIES))
    record = built(units[0], job, (24, 40, 80))
    assert built(units[0], job, (24, 40, 80)) == record
    other = built(units[0], job, (30, 80))
    assert len(other.buckets) == 2
    job.store.put(record_name(units[1].unit), job.store.read(record_name(units[0].unit)), only_if_absent=False)
    assert built(units[1], job, (24, 40, 80)).source.unit == units[1].unit


def test_quarantined_rows_stay_in_the_order_of_the_source_whatever_the_target_does(workshop: Workshop) -> None:
    prompts = ["2 words", "loop", "{oops", "mute", "3 words", "[1]", "loop", "hello"]
    source = workshop.corpus(*({"prompt": text} if text[0] not in "{[" else text for text in prompts))
    contents = []
    for batch_size in (1, 3, 64):
        config = workshop.config(source, regenerate=True, answers={"batch_size": batch_size}, **POLICIES)
        data = workshop.prepare(
            config.model_copy(update={"data": config.data.model_copy(update={"store": str(workshop.folder / str(batch_size))})})
        )
        (file,) = data.manifest.quarantine_files
        contents.append(data.store.read(file.path).decode())
    assert contents[0] == contents[1] == contents[2]
    origins = [line.split('"')[3] for line in contents[0].splitlines()]
    assert origins == [f"a.jsonl:{number}" for number in (2, 3, 4, 6, 7)]


def test_rows_expected_for_the_progress_count_through_all_units(workshop: Workshop) -> None:
    config = workshop.config(*corpus(workshop), **POLICIES)
    shown: list[tuple[str, int, int]] = []
    workshop.prepare(config, progress=lambda *report: shown.append(report))
    rows_done = [done for label, done, _ in shown if label == "tokenize"]
    assert rows_done == sorted(rows_done)
    assert rows_done[-1] == 155
    assert {total for label, _, total in shown if label == "tokenize"} == {155}
    assert [report for report in shown if report[0] == "hash files"] == [("hash files", 1, 2), ("hash files", 2, 2)]


def test_answers_need_somebody_to_answer(workshop: Workshop) -> None:
    job, units = planned(workshop.config(workshop.corpus({"prompt": "2 words"}), regenerate=True))
    with pytest.raises(DataError, match="no target to write the answers"):
        built(units[0], job, (24, 40, 80))
    answerer = InProcessAnswerer(workshop.target, batch_size=2, stop_ids=STOP_IDS)
    record = build_unit(units[0], job=job, edges=(24, 40, 80), tokenizer=TOKENIZER, answerer=answerer, progress=lambda *_: None)
    assert (record.answers, record.exact_answers) == (1, 1)
