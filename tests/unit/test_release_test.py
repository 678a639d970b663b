"""The release test: parts of a checkout, what passed is not run again, what failed is named and is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.test_full import covered_s, figures, parts, release_test

PASSES = "import os\n\n\ndef test_scale() -> None:\n    assert os.environ['DFLASH_FULL'] == '1'\n"
FAILS = "def test_good() -> None:\n    pass\n\n\ndef test_bad() -> None:\n    raise AssertionError\n"

# Seven pytest processes, each of which would load plugins that these tests need not.
SCALE = {"DFLASH_FULL": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}


def test_what_passed_is_kept_and_what_failed_is_named_and_run_again(tmp_path: Path) -> None:
    root, work = tmp_path / "checkout", tmp_path / "work"
    whole, broken = root / "tests" / "integration" / "test_whole.py", root / "tests" / "unit" / "room" / "test_broken.py"
    for file, text in ((whole, PASSES), (broken, FAILS)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    wanted = parts(root)
    assert wanted == ["tests/integration/test_whole.py", "tests/unit/room"]

    def run() -> dict[str, object]:
        return figures(release_test(root, wanted, work=work, lanes=2, scale=SCALE), revision="r", of=2)

    first = run()
    assert (first["passed"], first["skipped"], first["parts"]) == (2, 0, "2 of 2")
    assert first["failed"] == "tests.unit.room.test_broken::test_bad, tests/unit/room ended with code 1"
    second = run()
    assert second["failed"] == first["failed"]
    assert [line.count('"part": "tests/unit/room"') for line in (work / "parts.jsonl").read_text().splitlines()].count(1) == 2
    assert (work / "parts.jsonl").read_text().count("test_whole") == 1, "it had passed, and nothing has changed"

    broken.write_text(PASSES)
    with (work / "parts.jsonl").open("a") as file:
        file.write('{"part": "torn')
    assert run()["failed"] == "none", "and a torn line is no outcome"
    assert (work / "parts.jsonl").read_text().count("test_whole") == 1, "another part has changed"

    (root / "README.md").write_text("")
    assert run()["failed"] == "none"
    text = (work / "parts.jsonl").read_text()
    assert (text.count("test_whole"), text.count('"part": "tests/unit/room"')) == (1, 4), "tests of a unit may read pages"

    (root / "dflash").mkdir()
    (root / "dflash" / "code.py").write_text("")
    assert run()["failed"] == "none"
    assert (work / "parts.jsonl").read_text().count("test_whole") == 2, "the code has changed: everything runs again"


def test_wall_time_is_that_in_which_something_ran() -> None:
    assert covered_s([]) == 0
    assert covered_s([(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (3.0, 4.5)]) == 4.5 + 2.0
