"""The page says first what a person counts in the curve, then what each stretch of it was, in words."""

from __future__ import annotations

from typing import Any, get_args

from dflash.health.causes import Cause
from dflash.health.report_causes import CAUSE_IN_WORDS, causes_html
from tests.support.health_runs import healthy, judged
from tests.support.log_simulator import spike

HOSTILE = "<img src=x onerror=alert(1)>"


def cluster(step: int, cause: str, *, damage: bool = False, tests: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "first_step": step, "last_step": step, "cause": cause, "findings": 1, "detectors": ["loss spike"], "damage": damage,
        "tests": tests or {},
    }  # fmt: skip


def count(**changed: Any) -> dict[str, Any]:
    plain = {"limit": 3.0, "records": 127, "of": 2805, "percent": 4.528, "per_bucket": {"0": 120, "3": 7}}
    return plain | {"first": {"step": 4, "value": 5.5, "bucket": 0}, "last": {"step": 2700, "value": 3.2, "bucket": 0}} | changed


def test_there_are_words_for_every_cause() -> None:
    assert set(CAUSE_IN_WORDS) == set(get_args(Cause))


def test_the_counts_are_those_of_the_simple_rules() -> None:
    page = causes_html({"counts": {"loss_above": count()}})
    assert "127 of 2,805 records (4.5 %) with a loss above 3: 120 in bucket 0, 7 in bucket 3" in page
    assert "first and last 5.5 at step 4 and 3.2 at step 2,700" in page


def test_damage_comes_first_and_the_rest_can_be_opened() -> None:
    clusters = [cluster(step, "transient") for step in range(10)] + [cluster(99, "instability", damage=True)]
    page = causes_html({"clusters": clusters})
    assert page.index("Instability") < page.index("Transient")
    assert page.count("card finding") == 11
    assert "<summary>8 more stretches</summary>" in page


def test_every_explanation_that_was_tested_is_shown_with_its_statistic() -> None:
    page = causes_html({"clusters": [cluster(3, "transient", tests={"save-linked": {"p": 0.21333, "proven": False}})]})
    assert "<li>save-linked: p 0.213, proven no</li>" in page


def test_nothing_to_say_leaves_no_section_and_hostile_text_is_escaped() -> None:
    assert causes_html({}) == ""
    page = causes_html({"clusters": [cluster(1, HOSTILE, tests={HOSTILE: {HOSTILE: HOSTILE}})], "counts": {HOSTILE: count()}})
    assert "<img" not in page
    assert "&lt;img" in page


def test_a_real_report_has_both() -> None:
    page = causes_html(judged(spike(healthy(seed=6, steps=700), step=330, factor=9)).stats)
    assert "a loss above 3" in page
    assert "Transient" in page
