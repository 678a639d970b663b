"""The live-record rule, against its definition on random histories of crashes and resumes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.health.live import LiveSteps


def live_by_definition(records: list[tuple[int, int]], starts: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """A record at s is live iff no later segment starts at or before s."""
    return {(segment, step) for segment, step in records if not any(other > segment and start <= step for other, start in starts)}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    stretches=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 15), st.sets(st.integers(0, 14), max_size=3)), min_size=1, max_size=7
    )
)
def test_streaming_agrees_with_the_definition(stretches: list[tuple[int, int, set[int]]]) -> None:
    live = LiveSteps()
    records: list[tuple[int, int]] = []
    starts: list[tuple[int, int]] = []
    next_step = 0
    for segment, (back, length, lost) in enumerate(stretches):
        start = 0 if segment == 0 else max(0, next_step - back)
        starts.append((segment, start))
        assert live.begins_segment(segment)
        live.begin_segment(segment, start)
        for step in (start + i for i in range(length) if i not in lost):
            assert live.arrive(segment, step).kind in ("next", "gap")
            records.append((segment, step))
            next_step = step + 1
    expected = live_by_definition(records, starts)
    assert live.covered() == len(expected)
    assert live.dead == len(records) - len(expected)
    if expected:
        newest = max(step for _, step in expected)
        missing = {step for first, last in live.gaps for step in range(first, last + 1)}
        assert set(range(newest + 1)) - missing == {step for _, step in expected}


def test_what_is_out_of_order_is_not_live() -> None:
    live = LiveSteps()
    live.begin_segment(0, 0)
    assert [live.arrive(0, step).kind for step in (0, 1, 1, 0, 4, 3, 5)] == [
        "next", "next", "duplicate", "backwards", "gap", "backwards", "next",
    ]  # fmt: skip
    assert live.gaps == [(2, 3)]
    live.begin_segment(1, 6)
    assert live.arrive(0, 6).kind == "abandoned"
    assert live.arrive(1, 6).kind == "next"


def test_countless_gaps_are_counted_in_bounded_memory() -> None:
    live = LiveSteps()
    live.begin_segment(0, 0)
    for step in range(0, 3000, 3):
        live.arrive(0, step)
    assert live.covered() == 1000
    assert len(live.gaps) <= 256
