from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from dflash.evaluate.table import WIDTH, closing_table
from dflash.evaluate.text import aligned, bar, clean_text
from dflash.records import RunSummary

COMMANDS = (
    "PREFECT_API_URL=http://127.0.0.1:4200/api .venv/bin/prefect server start --host 127.0.0.1 --port 4200",
    "make ui",
)


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "run": "demo-001", "acceptance_length": 3.2149, "acceptance_length_untrained": 1.0312, "acceptance_ci95": (3.014, 3.437),
        "acceptance_per_position": (0.76, 0.55, 0.4, 0.25, 0.15, 0.08, 0.03), "speedup": 1.664, "lossless": True,
        "padding_efficiency": 0.971, "longest_bucket_run": 3, "feature_wait_frac": 0.053, "health_verdict": "healthy",
        "checkpoint": "runs/demo-001/checkpoints/step-600", "steps": 600, "train_time_s": 104.21, "reused": (),
        "mlflow_run_id": "abc",
    }  # fmt: skip
    return RunSummary(**{**values, **changes})


def test_the_closing_table_says_everything_it_must() -> None:
    text = closing_table(summary(reused=("data", "plan")), commands=COMMANDS)
    for wanted in (
        "demo-001", "1.03 -> 3.21", "3.01 to 3.44", "1.66x", "same tokens as plain", "97.1%", "3 batches", "5.3%", "healthy",
        "runs/demo-001/checkpoints/step-600", "data, plan", "76.0%", "3.0%", *COMMANDS,
    ):  # fmt: skip
        assert wanted in text
    assert text.count("#") > 40


def test_the_closing_table_keeps_to_eighty_columns_but_for_what_must_be_copied() -> None:
    text = closing_table(summary(reused=tuple(f"stage-{i}" for i in range(20))), commands=COMMANDS)
    assert all(len(line) <= WIDTH for line in text.splitlines() if line.strip() not in COMMANDS)
    assert text.splitlines()[0] == text.splitlines()[-1] == "=" * WIDTH
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_no_name_or_path_can_move_the_cursor_or_forge_a_line() -> None:
    hostile = "a\x1b[2Jb\rc\u2028d\u202ee\nlossless yes"
    text = closing_table(
        summary(run=hostile, checkpoint=hostile, health_verdict=hostile, reused=(hostile,)), commands=[f"rm {hostile}"]
    )
    assert all(unicodedata.category(char) not in {"Cc", "Cf", "Zl"} for char in text if char != "\n")
    assert len(text.splitlines()) == len(closing_table(summary(reused=("x",)), commands=["y"]).splitlines())


def test_what_was_sampled_is_not_called_greedy() -> None:
    assert "1.66x over plain greedy decoding, prefill left out" in closing_table(summary(), commands=())
    assert "1.66x over plain sampling at 0.7, prefill left out" in closing_table(summary(temperature=0.7), commands=())


def test_the_interval_is_named_by_its_own_level_and_one_prompt_has_none() -> None:
    assert "(95 % interval 3.01 to 3.44)" in closing_table(summary(), commands=())
    assert "(99.5 % interval 3.01 to 3.44)" in closing_table(summary(confidence=0.995), commands=())
    assert "1.03 -> 3.21   (no interval: one prompt)" in closing_table(summary(acceptance_ci95=None), commands=())


def test_what_went_wrong_is_shouted_and_what_is_missing_is_said() -> None:
    text = closing_table(summary(lossless=False, speedup=None, acceptance_ci95=(float("nan"), float("nan"))), commands=())
    assert "NO, see eval/" in text
    assert text.count("n/a") == 3
    assert "next" not in text.splitlines()


def test_the_evaluations_warnings_are_in_the_table() -> None:
    long = (
        "first-position acceptance 0.31 is below the bigram level 0.39: the drafter knows less than the previous token alone tells"
    )
    text = closing_table(summary(warnings=(long, "x\x1b[2J")), commands=())
    assert text.count("WARNING") == 2 and "bigram level" in text and "\x1b" not in text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "WARNING" not in closing_table(summary(), commands=())


@pytest.mark.parametrize(("frac", "filled"), [(-1.0, 0), (0.0, 0), (0.26, 3), (1.0, 10), (7.0, 10)])
def test_bars_are_as_long_as_the_share(frac: float, filled: int) -> None:
    assert bar(frac, width=10) == "#" * filled + "." * (10 - filled)


def test_clean_text_keeps_letters_of_any_script() -> None:
    assert clean_text("Fluß/日本語 a") == "Fluß/日本語 a"
    assert clean_text("a\tb\x00c\ud800") == "a?b?c?"


def test_columns_of_a_table_stand_under_each_other() -> None:
    table = (("", "a", "long"), ("name", "12", "3"))
    assert aligned(table, left=1) == ["       a  long", "name  12     3"]
    assert aligned((("x", "y"), ("long", "")), left=0) == ["   x  y", "long"]
    assert aligned((("x", "y"), ("long", "")), left=2) == ["x     y", "long"]
