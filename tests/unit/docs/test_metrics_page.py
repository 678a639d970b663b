"""The metrics reference names every field, event, metric and tag that the code writes, and nothing else."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from dflash.cli import main
from dflash.records import EvaluationResult, EventName, EventRecord, MicroBatchRecord, StepRecord, SweepCell, SweepResult
from dflash.stages.metric_words import COMMON, EVALUATION, EVENT, EVENTS, MICRO_BATCH, OTHERS, STEP, TAGS, VERSION_TAGS
from dflash.stages.metrics_reference import metrics_markdown
from dflash.tracking import names
from dflash.tracking.names import evaluation_metrics, probe_metrics, step_metrics, sweep_metrics
from tests.unit.tracking.tracking_fakes import step_record

ROOT = Path(__file__).parents[3]
WRITERS = ("train", "checkpoint", "stages", "rollback", "tracking", "records")


def sources(*rooms: str) -> Iterator[ast.Module]:
    for room in rooms:
        for path in sorted((ROOT / "dflash" / room).rglob("*.py")):
            if path.name != "metric_words.py":
                yield ast.parse(path.read_text(encoding="utf-8"))


def strings(*rooms: str) -> set[str]:
    return {
        node.value
        for tree in sources(*rooms)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def fields_of(record: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_every_field_of_the_log_is_explained_once() -> None:
    assert fields_of(StepRecord) == set(COMMON) | set(STEP)
    assert fields_of(EventRecord) == set(COMMON) | set(EVENT)
    assert fields_of(MicroBatchRecord) == set(MICRO_BATCH)
    assert set(EVENTS) == set(get_args(EventName))


def test_details_of_events_are_what_the_code_writes() -> None:
    written = strings(*WRITERS)
    for tree in sources("train", "records", "checkpoint"):  # `dataclasses.asdict`, and keyword arguments
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                written.add(node.target.id)
    for event, (_, details) in EVENTS.items():
        assert set(details) <= written, event


def evaluation() -> EvaluationResult:
    """A result in which everything was measured."""
    values: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(EvaluationResult)}
    pair = dict.fromkeys(("acceptance_ci", "speedup_ci", "survival_per_position", "conditional_per_position"), (0.5, 0.6))
    one = {"acceptance_length": 2.0, "acceptance_length_macro": 2.0, "speedup": 1.5, "speculative_tokens_per_s": 9.0}
    sets = {"dataset": {"gsm8k": one, "mbpp": one}}
    return EvaluationResult(**(values | pair | {"drafter": "trained", "slices": sets, "lossless": True}))


def as_pattern(name: str) -> str:
    return re.escape(name).replace("SET/", "(?:gsm8k|mbpp)/").replace("_N", r"_\d+").replace("/N", r"/\d+")


def test_every_metric_of_an_evaluation_has_one_row_and_every_row_a_metric() -> None:
    written = {name.removeprefix("eval/trained/") for name in evaluation_metrics(evaluation())}
    for name in written:
        rows = [row for row in EVALUATION if re.fullmatch(as_pattern(row), name)]
        assert len(rows) == 1, name
    assert all(any(re.fullmatch(as_pattern(row), name) for name in written) for row in EVALUATION)


def test_every_other_metric_has_one_row_and_every_row_a_metric() -> None:
    cell = SweepCell(8, 0.0, 1, 2.0, None, 9.0, None, 1.5, None, None, True, 0)
    sweep = SweepResult("trained", 1, "x", 1, 8, 8, 0.95, "a machine", (cell,), cell)
    written = set(step_metrics(step_record(0))) | set(sweep_metrics(sweep))
    written |= set(probe_metrics({"acceptance_length": 2.0, "acceptance_ci": [1.9, 2.1]}))
    written |= {
        text for text in strings("stages", "tracking") if re.fullmatch(r"(train|summary|compare|probe|sweep)/[a-z_/]+", text)
    }
    step = set(names.STEP_FIELDS.values())
    assert set(names.STEP_FIELDS) <= set(STEP)
    for name in written - step:
        assert len([row for row in OTHERS if re.fullmatch(as_pattern(row), name)]) == 1, name
    assert all(any(re.fullmatch(as_pattern(row), name) for name in written) for row in OTHERS)


def test_every_tag_is_explained() -> None:
    constants = {value for name, value in vars(names).items() if name.startswith("TAG_")}
    given = {
        key.value
        for tree in sources("stages")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_tags")
        for argument in node.args
        if isinstance(argument, ast.Dict)
        for key in argument.keys
        if isinstance(key, ast.Constant)
    }
    assert constants | given <= set(TAGS) | set(VERSION_TAGS)
    assert set(TAGS) | set(VERSION_TAGS) <= constants | given | strings("stages", "tracking")


def test_the_page_is_this_text(tmp_path: Path) -> None:
    text = metrics_markdown()
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == text, "run `make docs`"
    assert main(["config", "metrics", "--output", str(tmp_path / "metrics.md")]) == 0
    assert (tmp_path / "metrics.md").read_text() == text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(cell.strip() for line in rows for cell in line.strip("|").split(" | ")[:2])
