from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from matplotlib.axes import Axes

from dflash.evaluate.plots import draw_plots
from dflash.records import EvaluationResult


def result(**changes: Any) -> EvaluationResult:
    part = {"verifications": 40, "acceptance_length": 2.5, "acceptance_ci": [2.2, 2.8]}
    values: dict[str, Any] = {
        "drafter": "trained", "step": 600, "dataset": "synthetic-11", "prompts": 48, "block_size": 4, "temperature": 0.0,
        "template_flags": {}, "verifications": 80, "drafted": 240, "accepted": 120, "committed_tokens": 200,
        "acceptance_length": 2.5, "acceptance_length_untruncated": 2.6, "accepted_length": 1.5,
        "acceptance_length_macro": 2.4, "acceptance_ci": (2.1, 2.9), "confidence": 0.95,
        "survival_per_position": (0.8, 0.5, 0.2), "conditional_per_position": (0.8, 0.6, 0.4),
        "acceptance_histogram": (16, 24, 24, 16), "slices": {"kind": {}, "context_tokens": {"0-31": part, "32-63": part}},
        "plain_s_per_token": 0.02, "speculative_s_per_token": 0.01, "speedup": 2.0, "lossless": True,
        "differing_prompts": 0, "near_tie_prompts": 0, "warnings": (),
    }  # fmt: skip
    return EvaluationResult(**{**values, **changes})


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_every_plot_is_a_readable_png_and_the_same_bytes_each_time() -> None:
    first, second = draw_plots(result()), draw_plots(result())
    assert sorted(first) == [
        "acceptance_by_context.png",
        "acceptance_per_position.png",
        "accepted_histogram.png",
        "tokens_per_s.png",
    ]
    assert first == second
    for png in first.values():
        width, height = size_of(png)
        assert width >= 800 and height >= 500


def test_the_plots_show_the_figures() -> None:
    base = draw_plots(result())
    assert (
        draw_plots(result(survival_per_position=(0.9, 0.5, 0.2)))["acceptance_per_position.png"]
        != base["acceptance_per_position.png"]
    )
    assert draw_plots(result(acceptance_histogram=(40, 20, 10, 10)))["accepted_histogram.png"] != base["accepted_histogram.png"]
    assert draw_plots(result(acceptance_length=1.2))["acceptance_by_context.png"] != base["acceptance_by_context.png"]
    assert draw_plots(result(speculative_s_per_token=0.005))["tokens_per_s.png"] != base["tokens_per_s.png"]


def test_slices_that_tell_prompts_apart_have_a_picture_and_what_was_not_measured_has_none() -> None:
    part = {"prompts": 5, "verifications": 40, "acceptance_length": 2.5, "acceptance_ci": [2.2, None]}
    timed = part | {"plain_tokens_per_s": 50.0, "speculative_tokens_per_s": 90.0, "speedup": 1.8}
    slices = {"dataset": {"gsm8k": timed, "humaneval": part}, "turn": {"1": part}, "kind": {"a": part}}
    drawn = draw_plots(result(slices=slices))
    assert "acceptance_by_slice.png" in drawn and "acceptance_by_context.png" not in drawn
    assert drawn["tokens_per_s.png"] != draw_plots(result())["tokens_per_s.png"]
    many = {"kind": {f"kind {index}": part for index in range(60)}}
    assert size_of(draw_plots(result(slices=many))["acceptance_by_slice.png"])[1] < 1800
    assert "tokens_per_s.png" not in draw_plots(result(plain_s_per_token=None, speculative_s_per_token=None, speedup=None))


ONE_BIN = {"0-31": {"verifications": 1, "acceptance_length": 2.0, "acceptance_ci": [None, None]}}


def test_what_has_no_interval_has_no_bar_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []
    original = Axes.errorbar

    def kept(axes: Axes, *arguments: Any, **more: Any) -> Any:
        bars.extend(more.get("yerr") or more["xerr"])
        return original(axes, *arguments, **more)

    said: list[str] = []
    label = Axes.set_xlabel
    monkeypatch.setattr(Axes, "errorbar", kept)
    monkeypatch.setattr(Axes, "set_xlabel", lambda axes, text: (said.append(text), label(axes, text))[1])
    known = {"prompts": 5, "verifications": 40, "acceptance_length": 2.5, "acceptance_ci": [2.0, 3.5]}
    alone = known | {"prompts": 1, "acceptance_ci": [None, None]}
    for name in ("kind", "context_tokens"):
        bars.clear()
        said.clear()
        draw_plots(result(slices={name: {"0-31": known, "32-63": alone}}))
        assert bars == [[0.5, pytest.approx(math.nan, nan_ok=True)], [1.0, pytest.approx(math.nan, nan_ok=True)]]
        assert [text for text in said if text.endswith("no interval")]
    said.clear()
    draw_plots(result())
    assert not [text for text in said if text.endswith("no interval")]


NOTHING_ACCEPTED = {
    "survival_per_position": (0.0, 0.0, 0.0),
    "conditional_per_position": (0.0, 0.0, 0.0),
    "acceptance_histogram": (80, 0, 0, 0),
    "accepted_length": 0.0,
    "acceptance_length": 1.0,
    "acceptance_ci": (1.0, 1.0),
}
ONE_DRAFT = {
    "block_size": 2,
    "survival_per_position": (1.0,),
    "conditional_per_position": (1.0,),
    "acceptance_histogram": (0, 80),
}


@pytest.mark.parametrize(
    "changes",
    [NOTHING_ACCEPTED, ONE_DRAFT, {"slices": {"kind": {}, "context_tokens": ONE_BIN}}, {"step": None, "drafter": "prompt_lookup"}],
)
def test_extreme_results_can_be_drawn(changes: dict[str, Any]) -> None:
    assert len(draw_plots(result(**changes))) == 4
