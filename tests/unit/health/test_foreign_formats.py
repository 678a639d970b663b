"""Other people's logs: every format gives the same curve and the same verdict; a mapping is guessed or given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import HealthConfig
from dflash.errors import DataError
from dflash.health import FieldMap, ForeignLog, NoLossError, Rows, parse_map, read_rows, sniff
from dflash.health.foreign_fields import guess_fields
from dflash.health.foreign_rows import LARGEST_DOCUMENT_BYTES, LONGEST_LINE_BYTES
from dflash.health.foreign_values import ABSENT, NONFINITE, SPELT_NAN, step_of, value_of
from dflash.records import HealthReport
from tests.support import foreign_logs as logs

NOW_S = 1_800_000_000.0
CURVE = logs.curve(records=200, seed=1)
SPIKED = logs.spiked(CURVE, record=150, factor=2.5)
EMPTY = FieldMap()


def judged(data: bytes, *, given: FieldMap = EMPTY, block: int = 1000) -> HealthReport:
    rows = Rows(format="")
    log = ForeignLog(rows, given=given, health=HealthConfig(), origin="some.log")
    blocks = [data[start : start + block] for start in range(0, len(data), block)]
    log.read(read_rows(blocks, kind=sniff(data[:4096], origin="some.log"), rows=rows, origin="some.log"))
    return log.report(run="some.log", now_s=NOW_S, recent_records=200)


def outcome(data: bytes) -> str:
    """The verdict, or that the log was refused (with a remedy: `DataError` cannot be made without)."""
    try:
        return judged(data).verdict
    except DataError:
        return "refused"


FORMATS: dict[str, Callable[[list[logs.Row]], bytes]] = {
    "json lines": logs.json_lines,
    "csv": logs.table,
    "tsv": lambda rows: logs.table(rows, delimiter="\t"),
    "csv with a byte order mark": lambda rows: b"\xef\xbb\xbf" + logs.table(rows),
    "trainer_state.json": logs.trainer_state,
    "golden by step": logs.golden,
    "golden as a list": lambda rows: logs.golden(rows, as_list=True),
    "mlflow list": lambda rows: json.dumps(logs.history_entries(rows)).encode(),
    "mlflow answer": lambda rows: json.dumps({"metrics": logs.history_entries(rows)}).encode(),
    "mlflow lines": lambda rows: logs.json_lines(logs.history_entries(rows)),
    "mlflow by key": lambda rows: json.dumps(
        {
            name: [{"step": row["step"], "value": row[name], "timestamp": 1} for row in rows]
            for name in ("loss", "grad_norm")
        }
    ).encode(),
    "wandb lines": lambda rows: logs.json_lines(logs.wandb_rows(rows)),
    "list of rows": lambda rows: json.dumps(rows, indent=1).encode(),
    "nested lines": lambda rows: logs.json_lines({"step": r["step"], "metrics": {"loss": r["loss"], "grad_norm": r["grad_norm"]}} for r in rows),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_the_same_spike_at_its_own_step(form: str) -> None:
    report = judged(FORMATS[form](SPIKED))
    assert report.records == 200
    assert report.last_step == 2000
    (spike,) = [finding for finding in report.findings if finding.detector == "loss spike"]
    assert (spike.first_step, spike.values["resolved_step"]) == (1510, 1520)
    assert spike.severity != "critical"
    assert "at step 1510" in spike.message
    assert report.decision is None
    assert report.verdict == "healthy"
    assert spike.batch_ids == ()
    assert spike.bucket is None


@pytest.mark.parametrize("form", FORMATS)
def test_a_clean_log_is_silent_in_every_format(form: str) -> None:
    report = judged(FORMATS[form](CURVE))
    assert report.verdict == "healthy"
    assert {finding.severity for finding in report.findings} <= {"info"}
    assert report.coverage_frac == 1.0


def test_the_average_at_the_end_of_a_trainer_state_is_no_step() -> None:
    report = judged(logs.trainer_state(CURVE))
    assert report.last_step == CURVE[-1]["step"]
    assert report.stats["foreign"]["notes"] == ["the row of averages over the whole run is left out"]


def test_bare_nan_is_critical_at_its_record() -> None:
    rows = [row | {"loss": math.nan, "grad_norm": math.nan} for row in CURVE]
    report = judged(logs.json_lines(rows))
    assert report.verdict == "unhealthy"
    assert report.damage is not None
    assert (report.damage.onset_step, report.damage.alarm_step) == (10, 10)


def test_the_text_nan_in_golden_values_was_not_logged() -> None:
    rows = [row if index < 120 else row | {"loss": "nan", "grad_norm": "nan"} for index, row in enumerate(CURVE)]
    report = judged(logs.golden(rows))
    assert report.verdict == "healthy"
    assert report.last_step == 1200
    assert any("80 records say" in finding.message for finding in report.findings)


def test_the_text_nan_in_a_table_is_not_finite_while_the_run_says_something_else() -> None:
    def broken(index: int, row: logs.Row) -> logs.Row:
        return row | {"tokens_per_s": 900.0} | ({} if index < 120 else {"loss": "nan", "grad_norm": "nan"})

    assert judged(logs.table([broken(i, row) for i, row in enumerate(CURVE)])).verdict == "unhealthy"
    silent = [row if i < 120 else dict.fromkeys(row, "nan") | {"step": row["step"]} for i, row in enumerate(CURVE)]
    report = judged(logs.table(silent))
    assert report.verdict == "healthy"
    assert any("last 80 records hold no loss" in finding.message for finding in report.findings)


def test_a_loss_that_is_missing_from_a_third_of_the_records_leaves_us_blind() -> None:
    rows = [row | {"loss": None} if index % 3 == 0 else row for index, row in enumerate(CURVE)]
    report = judged(logs.json_lines(rows))
    assert report.verdict == "blind"
    assert report.coverage_frac < 0.7


def test_lines_that_are_no_records_are_counted() -> None:
    lines = logs.json_lines(CURVE).splitlines(keepends=True)
    report = judged(b"".join([*lines[:50], b'{"step": 3, "lo\n', b"[1]\n", b"\n", *lines[50:]]))
    assert report.records == 200
    assert any("2 lines are no records" in finding.message for finding in report.findings)


def test_steps_that_go_back_are_a_warning_and_negative_ones_are_left_out() -> None:
    rows = [*CURVE[:100], *CURVE[60:]]
    report = judged(logs.json_lines([{"step": -5, "loss": 3.0}, *rows]))
    assert report.verdict == "watch"
    warnings = [finding.message for finding in report.findings if finding.severity == "warn"]
    assert any("goes back from 1000 to 610" in message for message in warnings)
    assert any("1 records have a negative step" in message for message in warnings)
    assert report.records == 240


def test_a_record_from_the_future_is_told() -> None:
    rows = [row | {"timestamp": "2040-01-01T00:00:00Z"} for row in CURVE]
    assert any("in the future" in finding.message for finding in judged(logs.json_lines(rows)).findings)
    rows = [row | {"timestamp": (NOW_S - 5) * 1000} for row in CURVE]
    assert not judged(logs.json_lines(rows)).findings


def test_a_log_without_steps_is_numbered() -> None:
    report = judged(logs.json_lines({"loss": row["loss"]} for row in SPIKED))
    assert (report.first_step, report.last_step) == (0, 199)
    (spike,) = [finding for finding in report.findings if finding.detector == "loss spike"]
    assert spike.first_step == 150


def test_a_log_without_a_loss_names_its_fields_and_the_way_out() -> None:
    with pytest.raises(NoLossError, match="'loss_scale', 'val/loss'") as caught:
        judged(logs.json_lines({"loss_scale": 1.0, "val/loss": 2.0, "note": "x"} for _ in range(9)))
    assert "--map loss=" in caught.value.remedy
    report = judged(logs.json_lines({"val/loss": row["loss"]} for row in CURVE), given=parse_map(["loss=val/loss"]))
    assert report.verdict == "healthy"
    assert report.stats["foreign"]["given"] == ["loss"]


def test_a_given_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(DataError, match="no field 'ce'"):
        judged(logs.json_lines(CURVE), given=parse_map(["loss=ce"]))


@pytest.mark.parametrize("text", ["loss", "=x", "losses=x", "loss="])
def test_a_mapping_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="no mapping"):
        parse_map([text])


def test_a_mapping_may_hold_commas_and_equal_signs() -> None:
    mapping = parse_map([r"loss=a\,b=c,step=it", "lr=x"])
    assert (mapping.loss, mapping.step, mapping.lr) == ("a,b=c", "it", "x")


GUESSES = [
    (["iteration", "lm loss", "grad-norm", "learning-rate"], ("iteration", "lm loss", "grad-norm", "learning-rate")),
    (["global_step", "train/loss_scale", "train/loss", "eval/loss"], ("global_step", "train/loss", None, None)),
    (
        ["Step", "run 7 - train/loss", "run 7 - train/loss__MIN", "run 7 - train/loss__MAX"],
        ("Step", "run 7 - train/loss", None, None),
    ),
    (["_step", "reduced_train_loss", "val_loss"], ("_step", "reduced_train_loss", None, None)),
    (["trainer/global_step", "aux_loss", "ntp_loss"], ("trainer/global_step", "ntp_loss", None, None)),
    (["trainLoss", "gradNorm", "learningRate"], (None, "trainLoss", "gradNorm", "learningRate")),
    (["epoch", "accuracy"], (None, None, None, None)),
]


@pytest.mark.parametrize(("names", "expected"), GUESSES)
def test_the_guess_takes_what_was_trained_on(names: list[str], expected: tuple[str | None, ...]) -> None:
    found = guess_fields(names, given=EMPTY, origin="x")
    assert (found.step, found.loss, found.grad_norm, found.lr) == expected


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\x00\x00", b"PK\x03\x04" + bytes(30), bytes(range(256)), b"\xff\xfe{\x00"])
def test_a_binary_file_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="not a text file"):
        sniff(data, origin="x")


@pytest.mark.parametrize("data", [b"hello world\nnothing here\n", b"3,4,5\n1,2,3\n", b"{}", b"[", b'{"a": [1, 2'])
def test_a_text_that_is_no_log_is_refused_or_blind(data: bytes) -> None:
    assert outcome(data) in ("refused", "blind")


def test_an_empty_log_is_blind() -> None:
    assert sniff(b" \n\n", origin="x") == "empty"
    report = judged(b"")
    assert (report.verdict, report.records) == ("blind", 0)


def test_a_line_too_long_to_hold_is_skipped_and_the_rest_is_read() -> None:
    long = b'{"step": 5, "junk": "' + b"x" * (LONGEST_LINE_BYTES + 10) + b'"}\n'
    lines = logs.json_lines(CURVE).splitlines(keepends=True)
    report = judged(b"".join([*lines[:50], long, *lines[50:]]), block=1 << 20)
    assert report.records == 200
    assert any("1 lines are no records" in finding.message for finding in report.findings)


def test_a_single_line_of_any_length_is_refused_within_bounds() -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        yield b'{"a": "'
        while True:
            taken += 1 << 20
            yield b"x" * (1 << 20)

    rows = Rows(format="")
    with pytest.raises(DataError, match="one JSON value of over"):
        list(read_rows(endless(), kind="document", rows=rows, origin="x"))  # type: ignore[arg-type]
    assert taken <= LARGEST_DOCUMENT_BYTES + (1 << 20)


def test_values_are_numbers_nothing_or_not_finite() -> None:
    assert value_of("2.5e0") == 2.5
    assert value_of(math.inf) == value_of(10**400) == NONFINITE
    assert value_of("NaN") == value_of(" -inf ") == SPELT_NAN
    assert {value_of(raw) for raw in (None, True, "", "x", [1], {}, "1" * 99)} == {ABSENT}
    assert (step_of("7"), step_of(7.0), step_of(7.5), step_of(math.nan), step_of(1e300)) == (7, 7, None, None, None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=300), st.sampled_from([b"", b"{", b"[", b'{"loss": 1, "step": 1}\n', b"step,loss\n1,2\n"]))
def test_any_bytes_end_in_a_verdict_or_an_error_with_a_remedy(junk: bytes, start: bytes) -> None:
    assert outcome(start + junk) in ("refused", "blind", "healthy", "watch", "unhealthy")


@pytest.mark.parametrize("block", [1, 7, 100_000])
def test_the_cut_into_blocks_does_not_matter(block: int) -> None:
    data = logs.json_lines(SPIKED)
    assert judged(data, block=block) == judged(data)
