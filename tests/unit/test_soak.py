"""What the soak calls flat."""

from __future__ import annotations

import pytest

from benchmarks.soak import Usage, quarters


def test_the_second_quarter_is_compared_with_the_last() -> None:
    assert quarters([9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12]) == (3, 11)


@pytest.mark.parametrize(
    ("memory_mb", "descriptors", "flat"),
    [
        ([300, 400, 400, 401], [20, 30, 30, 30], True),  # what is loaded once at the beginning is no leak
        ([300, 400, 420, 440], [20, 30, 30, 30], False),
        ([300, 400, 400, 400], [20, 30, 31, 33], False),
        ([400, 400, 400, 200], [30, 30, 30, 10], True),
    ],
)
def test_growth_is_told_from_loading(memory_mb: list[int], descriptors: list[int], *, flat: bool) -> None:
    usage = Usage([value * 10**6 for value in memory_mb], descriptors)
    assert usage.figures("it")["it_flat"] is flat
