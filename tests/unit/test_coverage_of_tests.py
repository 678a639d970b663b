"""The shares that the coverage page gives, from counts made up here."""

from __future__ import annotations

from benchmarks.coverage_of_tests import covered_frac, figures_of


def counts(lines: int, of_lines: int, branches: int, of_branches: int) -> dict[str, int]:
    return {"covered_lines": lines, "num_statements": of_lines, "covered_branches": branches, "num_branches": of_branches}


FILES = {
    "dflash/errors.py": counts(10, 10, 0, 0),
    "dflash/data/plan.py": counts(6, 10, 1, 4),
    "dflash/data/reader.py": counts(20, 20, 6, 6),
    "dflash/train/child.py": counts(0, 10, 0, 2),
}


def test_lines_and_branches_count_together_and_apart() -> None:
    figures = figures_of(FILES)
    assert figures["covered_frac"] == round((36 + 7) / (50 + 12), 4)
    assert figures["statements_frac"] == 0.72
    assert figures["branches_frac"] == round(7 / 12, 4)
    assert (figures["statements"], figures["branches"]) == (50, 12)


def test_every_room_has_its_share_and_the_least_covered_come_first() -> None:
    figures = figures_of(FILES)
    assert figures["top_frac"] == 1.0
    assert figures["data_frac"] == round(33 / 40, 4)
    assert figures["train_frac"] == 0.0
    assert list(figures["least_covered"]) == [
        "dflash/train/child.py",
        "dflash/data/plan.py",
        "dflash/data/reader.py",
        "dflash/errors.py",
    ]


def test_a_file_without_statements_lacks_nothing() -> None:
    assert covered_frac([counts(0, 0, 0, 0)]) == 1.0
