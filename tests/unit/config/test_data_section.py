"""The data section: every bound and every choice, refused by its dotted name; what only schedules is no content."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.config import Config, parse_config, section_hash
from dflash.config.data import DataConfig
from dflash.errors import ConfigError

BASE = 'target: {mask_token: "<|mask|>"}\ndata: {num_conversations: 10}\n'


def parsed(*overrides: str) -> Config:
    return parse_config(BASE, origin="here.yaml", overrides=overrides)


LOWEST = {
    "data.num_conversations": 1,
    "data.seed": 0,
    "data.workers": 1,
    "data.max_length_tokens": 4,
    "data.num_buckets": 1,
    "data.rows_per_shard": 1,
    "data.rows_per_group": 1,
    "data.max_bad_frac": 0,
    "data.answers.max_new_tokens": 1,
    "data.answers.temperature": 0,
    "data.answers.batch_size": 1,
    "data.answers.server.concurrency": 1,
    "data.answers.server.max_retries": 0,
    "data.reader.cache_mib": 1,
    "data.reader.prefetch_batches": 0,
    "data.reader.threads": 1,
    "plan.max_sequences": 1,
    "plan.pad_multiple_tokens": 1,
    "plan.max_padded_lengths": 1,
    "plan.sort_window_samples": 1,
    "plan.max_bucket_run": 1,
}
HIGHEST = {"data.max_bad_frac": 1, "data.num_buckets": 64}
ABOVE_ZERO = ("data.answers.server.request_timeout_s", "data.answers.server.backoff_s")
CHOICES = {
    "data.source": ("synthetic",),
    "data.runner": ("local",),
    "data.answers.engine": ("in_process",),
    "data.supervise": ("all", "last"),
    "data.over_long": ("error", "drop", "truncate", "split"),
    "data.bad_rows": ("error", "quarantine"),
    "data.bucket_edges_tokens": ("auto", "equal_mass"),
    "data.reader.verify": ("sizes", "sampled", "full"),
    "plan.order": ("interleave", "shuffle", "sorted", "random"),
}


def value_at(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("key", "lowest"), LOWEST.items(), ids=LOWEST)
def test_the_lowest_value_is_allowed_and_one_less_is_refused_by_name(key: str, lowest: int) -> None:
    assert value_at(parsed(f"{key}={lowest}"), key) == lowest
    with pytest.raises(ConfigError) as caught:
        parsed(f"{key}={lowest - 1}")
    assert f"{key}: " in caught.value.what
    assert f"greater than or equal to {lowest}" in caught.value.what
    assert f"(got {lowest - 1})" in caught.value.what


@pytest.mark.parametrize(("key", "highest"), HIGHEST.items(), ids=HIGHEST)
def test_the_highest_value_is_allowed_and_one_more_is_refused_by_name(key: str, highest: int) -> None:
    assert value_at(parsed(f"{key}={highest}"), key) == highest
    with pytest.raises(ConfigError, match=rf"{key}: .*less than or equal to {highest}"):
        parsed(f"{key}={highest + 1}")


@pytest.mark.parametrize("key", ABOVE_ZERO)
@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf"])
def test_times_are_above_zero_and_finite(key: str, value: str) -> None:
    assert value_at(parsed(f"{key}=0.5"), key) == 0.5
    with pytest.raises(ConfigError, match=key):
        parsed(f"{key}={value}")


@pytest.mark.parametrize(("key", "choices"), CHOICES.items(), ids=CHOICES)
def test_choices_are_taken_and_others_refused_with_the_list(key: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert value_at(parsed(f"{key}={choice}"), key) == choice
    with pytest.raises(ConfigError, match=key) as caught:
        parsed(f"{key}=nonsense")
    assert "nonsense" in caught.value.what
    assert all(choice in caught.value.what for choice in choices)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.answers.engine=server"], "set server.url"),
        (["data.runner=dask"], "every worker would load the target"),
        (["data.runner=ray"], "every worker would load the target"),
        (["data.source=files"], "source is `files` but files is empty"),
        (["data.num_conversations=null"], "set num_conversations"),
        (["data.bucket_edges_tokens=[]"], "strictly increasing"),
        (["data.bucket_edges_tokens=[1, 256]"], "at least 2"),
        (["data.bucket_edges_tokens=[64, 64, 256]"], "[64, 64, 256] must be strictly increasing"),
        (["data.bucket_edges_tokens=[64, 255]"], "the last bucket edge 255 is below max_length_tokens 256"),
        (["data.bucket_edges_tokens=[64.5, 256]"], "data.bucket_edges_tokens"),
        (["data.files=a.jsonl", "data.source=files"], "data.files"),
    ],
)
def test_what_does_not_fit_together_is_said(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*overrides)
    assert said in caught.value.what
    assert "here.yaml" in caught.value.what


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.answers.engine=server", "data.answers.server.url=http://x/v1"],
        ["data.answers.engine=server", "data.answers.regenerate=false"],
        ["data.runner=dask", "data.answers.regenerate=false"],
        ["data.runner=ray", "data.answers.engine=server", "data.answers.server.url=http://x/v1"],
        ["data.bucket_edges_tokens=[256]"],
        ["data.bucket_edges_tokens=auto", "data.max_length_tokens=100"],
        ["data.source=files", "data.files=[a.jsonl]", "data.num_conversations=null"],
    ],
)
def test_what_fits_is_taken(overrides: list[str]) -> None:
    assert isinstance(parsed(*overrides), Config)


@pytest.mark.parametrize(
    ("edges", "limit", "longest"), [((8, 32), 16, 32), ((8, 16), 16, 16), ("auto", 16, 16), ("equal_mass", 9, 9)]
)
def test_the_longest_sample_is_that_of_the_last_edge_or_the_limit(edges: Any, limit: int, longest: int) -> None:
    data = DataConfig(num_conversations=1, bucket_edges_tokens=edges, max_length_tokens=limit)
    assert data.longest_sample_tokens == longest
    assert section_hash(data) == section_hash(DataConfig.model_validate_json(data.model_dump_json()))
    assert section_hash(data) != section_hash(data.model_copy(update={"max_length_tokens": limit + 1}))
