"""Any text as a configuration is accepted or refused, and what is accepted means the same once it has been written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from dflash.config import dump_config, flat_params, parse_config
from dflash.errors import ConfigError
from tests.support.fuzz import TIMEOUT_S, VALUES, changed_bytes, changed_json, explained, fuzz

ROOT = Path(__file__).parents[2]
FILES = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
TREES = [yaml.safe_load(data) for data in FILES]
KEYS = [
    "run.name",
    "train.lr",
    "data.files",
    "tracking.uri",
    "target.path",
    "data.bucket_edges_tokens",
    "x.y",
    "data.template_flags",
]
OVERRIDES = st.lists(
    st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=8), VALUES.map(str) | st.sampled_from(["[", "*a", "0x_"])),
    max_size=2,
)

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def check(case: tuple[str, list[str]]) -> None:
    text, overrides = case
    try:
        config = parse_config(text, origin="fuzzed.yaml", overrides=overrides)
    except ConfigError as error:
        explained(error)
        return
    written = dump_config(config)
    assert parse_config(written, origin="written") == config
    assert all(isinstance(value, str) for value in flat_params(config).values())


def test_any_bytes() -> None:
    texts = changed_bytes(FILES).map(lambda data: data.decode("utf-8", errors="replace"))
    fuzz(st.tuples(texts, OVERRIDES), check, usual=25, share=0.5)


def test_any_values() -> None:
    def text_of(tree: object) -> str:
        try:
            return yaml.safe_dump(tree)
        except yaml.YAMLError:
            return str(tree)

    fuzz(st.tuples(changed_json(TREES).map(text_of), OVERRIDES), check, usual=25, share=0.5)
