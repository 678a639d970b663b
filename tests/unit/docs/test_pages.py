"""The pages: every one can be reached, every picture is shown, every key, detector, module and configuration on them exists."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.pictures_concept import concept_svg
from dflash.config import load_config
from dflash.config.reference import config_rows
from dflash.evaluate.table import WIDTH
from dflash.health import detectors
from dflash.health.advice import WHAT_TO_DO

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")
SECTIONS = {key.split(".")[0] for key, _, _ in config_rows() if "." in key}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def linked(path: Path) -> set[Path]:
    return {(path.parent / link).resolve() for link, _ in LINK.findall(text_of(path)) if "://" not in link}


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_page_can_be_reached(start: str) -> None:
    seen: set[Path] = set()
    ahead = [ROOT / start]
    while ahead:
        page = ahead.pop()
        if page not in seen and page.suffix == ".md" and page.is_file():
            seen.add(page)
            ahead += linked(page)
    assert not {page.name for page in PAGES} - {page.name for page in seen}
    assert ROOT / "infra/README.md" in seen


def test_the_index_names_every_page_itself() -> None:
    assert {page.name for page in PAGES} - {"index.md"} <= {page.name for page in linked(DOCS / "index.md")}


def test_every_picture_is_shown_and_every_shown_one_is_there() -> None:
    shown = {path for page in PAGES for path in linked(page) if path.parent.name == "img"}
    assert shown == set((DOCS / "img").iterdir())
    for path in shown:
        head = path.read_bytes()[:8]
        assert head == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else head.startswith(b"<svg ")
    for page in PAGES:  # a picture that cannot be seen is told
        assert not re.search(r"!\[\s*\]\(", text_of(page)), page.name


def test_the_drawing_of_the_concepts_is_what_its_script_draws() -> None:
    drawn = concept_svg()
    assert text_of(DOCS / "img/concept.svg") == drawn, "run `python -m benchmarks.pictures`"
    assert f"{len(WHAT_TO_DO)} detectors" in drawn


def test_anchors_lead_to_headings() -> None:
    for page in (ROOT / "README.md", *PAGES):
        for link, anchor in LINK.findall(text_of(page)):
            if anchor and "://" not in link:
                headings = re.findall(r"^#+ (.*)$", text_of((page.parent / link).resolve()), flags=re.MULTILINE)
                slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{page.name}: {link}#{anchor}"


def test_keys_of_the_configuration_exist() -> None:
    keys = {key for key, _, _ in config_rows()}
    known = keys | {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    for page in (*PAGES, ROOT / "README.md"):
        for code in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[ =:][^`]*)?`", text_of(page)):
            if code.split(".")[0] in SECTIONS and not code.endswith((".py", ".json", ".jsonl", ".yaml", ".out", ".md", ".png")):
                assert code in known, f"{page.name}: {code}"


@pytest.mark.parametrize("page", ["health.md", "troubleshooting.md"])
def test_detectors_on_the_pages_exist(page: str) -> None:
    names = {getattr(detectors, name).name for name in detectors.__all__ if name != "Detector"} | {"stale log"}
    assert names == set(WHAT_TO_DO)
    rows = re.findall(r"detectors? ((?:`[a-z -]+`(?:, )?)+)", text_of(DOCS / page))
    if page == "health.md":
        table = text_of(DOCS / page).split("## What is looked for")[1].split("\n\n")[1]
        found = set(re.findall(r"`([a-z -]+)`", table))
        assert found == names, "the page names every detector"
        return
    found = {name for row in rows for name in re.findall(r"`([a-z -]+)`", row)}
    assert len(found) > 10 and found <= names


def test_every_failure_of_the_specification_has_its_row() -> None:
    """The failures that others met, by what each is called on the page."""
    text = text_of(DOCS / "troubleshooting.md").lower()
    for words in (
        "the context leaks", "a tap is off by one layer", "wrong mask token", "the vocabulary", "one rank waits for the others",
        "the loss becomes nan", "out of memory", "the state was not restored", "thinking mode or template differ",
        "empty or wrong loss masks", "longer than anything trained on",
    ):  # fmt: skip
        assert words in text, words
    for line in text_of(DOCS / "troubleshooting.md").splitlines():
        if line.startswith("| ") and not line.startswith("| symptom"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 3 and all(cells), line


def test_decisions_name_modules_that_state_a_reason() -> None:
    modules = {path for path in linked(DOCS / "decisions.md") if path.suffix == ".py"}
    assert len(modules) > 30
    for path in modules:
        assert text_of(path).startswith(('"""', 'r"""')), path.name
    paragraphs = [part for part in text_of(DOCS / "decisions.md").split("\n\n") if part.startswith("**")]
    assert all(".py)" in part for part in paragraphs)


def test_the_configuration_of_the_guide_is_valid(tmp_path: Path) -> None:
    page = text_of(DOCS / "train-your-own.md")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    config = load_config(tmp_path / "mine.yaml")
    assert config.run.name == "mine"
    assert config.cluster.devices_needed <= 8


def test_the_table_of_the_readme_is_what_the_demo_was_measured_to_give() -> None:
    (table,) = re.findall(r"<!-- closing-table -->\n```text\n(.*?)```", text_of(ROOT / "README.md"), flags=re.DOTALL)
    figures = json.loads(text_of(ROOT / "benchmarks/results/demo_run.json"))["figures"]
    before, after, (low, high) = (figures[f"acceptance_{name}"] for name in ("length_untrained", "length", "ci95"))
    assert f"{before:.2f} -> {after:.2f}   (95 % interval {low:.2f} to {high:.2f})" in table
    assert f"{figures['padding_efficiency']:.1%} of the trained tokens" in table
    assert all(len(line) <= WIDTH for line in table.splitlines())


def test_what_the_readme_says_of_a_real_target_was_measured() -> None:
    (text,) = re.findall(r"## A real target\n(.*?)\n## ", text_of(ROOT / "README.md"), flags=re.DOTALL)
    figures = json.loads(text_of(ROOT / "benchmarks/results/acceptance.json"))["figures"]
    for run in ("smollm2", "code"):
        low, high = figures[f"{run}_ci"]
        assert f"{figures[f'{run}_acceptance_length']:.2f} (95 % interval {low:.2f} to {high:.2f})" in text
    assert f"{figures['smollm2_speedup']:.2f} times as fast" in text
    assert f"{figures['smollm2_trained_supervised_tokens']:,} tokens" in text
    assert f"{figures['smollm2_train_time_s'] / 60:.0f} minutes of training" in text
    assert f"{figures['smollm2_drafter_parameters'] / 1e6:.1f} M parameters" in text


def test_scripts_that_the_pages_call_exist() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "infra/README.md"):
        for module in re.findall(r"python -m ((?:benchmarks|flows)[\w.]*)", text_of(page)):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {module}"


def test_the_steps_of_the_guide_come_in_order() -> None:
    headings = re.findall(r"^## (\d+)\. ", text_of(DOCS / "train-your-own.md"), flags=re.MULTILINE)
    assert headings == [str(number) for number in range(1, len(headings) + 1)]
