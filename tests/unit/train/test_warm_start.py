"""A run that starts from a published drafter: its bits, or a list of everything that does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dflash.config import DrafterConfig, TargetConfig, parse_config
from dflash.errors import DrafterError
from dflash.model.drafter import Drafter
from dflash.model.export import describe_export, export_drafter
from dflash.model.export_fields import DtypeName, LayoutName
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import TargetInfo, read_target_info
from dflash.train.doctor import run_checks
from dflash.train.warm_start import FREE_KEYS, check_warm_start, config_differences, warm_start
from tests.support.tiny_run import MASK_TOKEN_ID, TINY_CONFIG, tiny_target


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    folder = tiny_target(tmp_path_factory.mktemp("warm") / "target")
    return read_target_info(TargetConfig(path=str(folder), mask_token_id=MASK_TOKEN_ID))


def config_of(root: Path, info: TargetInfo, *overrides: str) -> DrafterConfig:
    text = TINY_CONFIG.format(root=root, target=info.location, samples=4)
    return parse_config(text, origin="test", overrides=overrides).drafter


def publish(folder: Path, config: DrafterConfig, info: TargetInfo, *, layout: LayoutName, dtype: DtypeName) -> Drafter:
    drafter = Drafter(config, target_hidden_size=info.hidden_size)
    drafter.init_weights(9)
    tables = frozen_tables(Path(info.location)) if layout == "speculators" else None
    description = describe_export(config, info, mask_token_id=MASK_TOKEN_ID, target_name="t")
    export_drafter(drafter, folder, description=description, layout=layout, dtype=dtype, tables=tables)
    return drafter


@pytest.mark.parametrize("layout", ["zlab", "speculators", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_any_layout_become_the_first_weights(
    layout: LayoutName, dtype: DtypeName, info: TargetInfo, tmp_path: Path
) -> None:
    config = config_of(tmp_path, info)
    published = publish(tmp_path / "published", config, info, layout=layout, dtype=dtype)
    drafter = Drafter(config, target_hidden_size=info.hidden_size)
    warm_start(drafter, tmp_path / "published", mask_token_id=MASK_TOKEN_ID, info=info)
    rounded = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    for name, value in published.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], value.to(rounded).float())
        assert drafter.state_dict()[name].dtype == torch.float32


def test_every_difference_is_listed_at_once(info: TargetInfo, tmp_path: Path) -> None:
    publish(tmp_path / "published", config_of(tmp_path, info), info, layout="zlab", dtype="float32")
    other = config_of(tmp_path, info, "drafter.rope_theta=5", "drafter.head_dim=4", "drafter.target_layer_ids=[1]")
    with pytest.raises(DrafterError) as caught:
        check_warm_start(tmp_path / "published", other)
    for line in (
        "head_dim: published 8, configured 4",
        "rope_theta: published 1000000.0, configured 5.0",
        "target_layer_ids: published [0, 1], configured [1]",
    ):
        assert line in caught.value.what
    assert len(caught.value.what.splitlines()) == 4


def test_what_gives_no_weight_another_meaning_may_differ(
    info: TargetInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, info)
    publish(tmp_path / "published", config, info, layout="zlab", dtype="float32")
    free = config_of(tmp_path, info, "drafter.block_size=6", "drafter.max_position_embeddings=500", "drafter.sliding_causal=false")
    assert config_differences(config, free) == []
    warm_start(Drafter(free, target_hidden_size=16), tmp_path / "published", mask_token_id=MASK_TOKEN_ID, info=info)
    assert "trained with block size 4, this run trains 6" in caplog.text
    sliding = config.model_copy(update={"layer_types": ("sliding_attention",), "sliding_window": 5})
    assert [line.split(":")[0] for line in config_differences(config, sliding)] == ["layer_types", "sliding_window"]


def test_another_mask_token_or_target_is_refused(info: TargetInfo, tmp_path: Path) -> None:
    config = config_of(tmp_path, info)
    publish(tmp_path / "published", config, info, layout="zlab", dtype="float32")
    drafter = Drafter(config, target_hidden_size=16)
    with pytest.raises(DrafterError, match="mask token id: published 47, run 3"):
        warm_start(drafter, tmp_path / "published", mask_token_id=3, info=info)
    larger = tiny_target(tmp_path / "larger", num_hidden_layers=5)
    other = read_target_info(TargetConfig(path=str(larger), mask_token_id=MASK_TOKEN_ID))
    with pytest.raises(DrafterError, match="target layers: published 3, run 5"):
        warm_start(drafter, tmp_path / "published", mask_token_id=MASK_TOKEN_ID, info=other)


def test_the_pre_flight_finds_it_before_anything_starts(info: TargetInfo, tmp_path: Path) -> None:
    publish(tmp_path / "published", config_of(tmp_path, info), info, layout="zlab", dtype="float32")
    text = TINY_CONFIG.format(root=tmp_path / "runs", target=info.location, samples=4)
    named = f"train.init_from={tmp_path / 'published'}"
    found = {result.name: result for result in run_checks(parse_config(text, origin="t", overrides=[named]))}
    assert found["inputs"].status == "ok"
    assert "the drafter starts from" in found["inputs"].message
    config = parse_config(text, origin="t", overrides=[named, "drafter.head_dim=4"])
    found = {result.name: result for result in run_checks(config)}
    assert found["inputs"].status == "fail"
    assert "head_dim: published 8, configured 4" in found["inputs"].message


OTHER_VALUES: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "target_layer_ids": (0,),
    "layer_types": ("sliding_attention",),
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_each_key_that_changes_a_meaning_is_named(key: str, info: TargetInfo, tmp_path: Path) -> None:
    config = config_of(tmp_path, info)
    other = config.model_copy(update={key: OTHER_VALUES[key]} | ({"sliding_window": 9} if key == "layer_types" else {}))
    lines = config_differences(config, other)
    named = {line.split(":")[0] for line in lines}
    allowed = {"num_hidden_layers": {"layer_types"}, "layer_types": {"sliding_window"}}.get(key, set())
    assert key in named
    assert named - {key} <= allowed
    assert all("published" in line and "configured" in line for line in lines)


def test_every_key_is_either_free_or_compared() -> None:
    """A key that is added later must be put on one of the two lists."""
    sliding = {"sliding_window", "sliding_causal"}
    assert {*OTHER_VALUES, *FREE_KEYS, *sliding} == set(DrafterConfig.model_fields)


def test_the_window_and_its_direction_are_compared_where_something_slides(info: TargetInfo, tmp_path: Path) -> None:
    slides = {"layer_types": ("sliding_attention",), "sliding_window": 9, "sliding_causal": True}
    config = config_of(tmp_path, info).model_copy(update=slides)
    for key, value in (("sliding_window", 8), ("sliding_causal", False)):
        (line,) = config_differences(config, config.model_copy(update={key: value}))
        assert line.startswith(key)


def test_a_drafter_whose_taps_are_wider_than_the_target_is_refused(info: TargetInfo, tmp_path: Path) -> None:
    """Same drafter section, but the context projection was made for taps of another width."""
    config = config_of(tmp_path, info)
    wider = dataclasses.replace(info, hidden_size=2 * info.hidden_size)
    publish(tmp_path / "published", config, wider, layout="zlab", dtype="float32")
    check_warm_start(tmp_path / "published", config)
    drafter = Drafter(config, target_hidden_size=info.hidden_size)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(DrafterError, match="target hidden size: published 32, run 16"):
        warm_start(drafter, tmp_path / "published", mask_token_id=MASK_TOKEN_ID, info=info)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_a_damaged_drafter_changes_no_weight(info: TargetInfo, tmp_path: Path) -> None:
    config = config_of(tmp_path, info)
    publish(tmp_path / "published", config, info, layout="zlab", dtype="float32")
    file = tmp_path / "published" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    drafter = Drafter(config, target_hidden_size=info.hidden_size)
    drafter.init_weights(1)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(DrafterError, match="cannot be read"):
        warm_start(drafter, tmp_path / "published", mask_token_id=MASK_TOKEN_ID, info=info)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
