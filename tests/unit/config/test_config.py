"""The configuration tree: strict, frozen, overridable, and the same after a round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash.config import (
    Config,
    config_rows,
    dump_config,
    flat_params,
    load_config,
    parse_config,
    reference_markdown,
    section_hash,
)
from dflash.errors import EXIT_USER_ERROR, ConfigError
from tests.support.amount import amount

MINIMAL = """
target: {mask_token: "<|mask|>"}
data: {num_conversations: 10}
"""


def parsed(*overrides: str, text: str = MINIMAL) -> Config:
    return parse_config(text, origin="here.yaml", overrides=overrides)


def refused(*overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(*overrides, text=text)
    assert caught.value.remedy
    assert caught.value.exit_code == EXIT_USER_ERROR
    return caught.value.what


@pytest.mark.parametrize(
    ("override", "where", "nearest"),
    [
        ("trian.lr=1", "trian", "'train'"),
        ("train.learning_rate=1", "train.learning_rate", "known here"),
        ("train.epoch=1", "train.epoch", "'epochs'"),
        ("train.loss.gama=1", "train.loss.gama", "'gamma'"),
        ("target.expected.hiddensize=1", "target.expected.hiddensize", "'hidden_size'"),
        ("health.spike.loss_Z=4", "health.spike.loss_Z", "'loss_z'"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(override: str, where: str, nearest: str) -> None:
    message = refused(override)
    assert f"{where}: unknown key" in message
    assert nearest in message
    assert "here.yaml" in message


def test_every_bad_key_is_reported_at_once() -> None:
    message = refused("train.lrr=1", "plan.tokens=3", "data.seed=-1")
    assert all(part in message for part in ("train.lrr", "plan.tokens", "data.seed"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lr=0", ["train.lr", "greater than 0", "0"]),
        ("train.lr=fast", ["train.lr", "fast"]),
        ("train.lr=.nan", ["train.lr", "nan"]),
        ("train.clip_norm=.inf", ["train.clip_norm", "inf"]),
        ("train.epochs=1.5", ["train.epochs", "1.5"]),
        ("train.schedule=sine", ["train.schedule", "'sine'", "cosine"]),
        ("run.name='Bad Name'", ["run.name", "Bad Name"]),
        ("drafter.num_key_value_heads=3", ["num_attention_heads 4", "num_key_value_heads 3"]),
        ("drafter.head_dim=33", ["head_dim 33", "pairs"]),
        ("drafter.target_layer_ids=[1, 1]", ["[1, 1]", "duplicates"]),
        ("drafter.target_layer_ids=[2, 1]", ["[2, 1]", "increasing"]),
        ("drafter.layer_types=[sliding_attention]", ["sliding_window"]),
        ("drafter.layer_types=[full_attention, full_attention]", ["2 entries for 1 layers"]),
        ("drafter.max_position_embeddings=260", ["260", "256 + 8"]),
        ("target.mask_token_id=3", ["exactly one of mask_token and mask_token_id"]),
        ("target.mask_token=null", ["exactly one of mask_token and mask_token_id"]),
        ("data.bucket_edges_tokens=[64, 32]", ["[64, 32]", "increasing"]),
        ("data.max_length_tokens=300", ["256", "300"]),
        ("data.num_conversations=null", ["synthetic", "num_conversations"]),
        ("data.source=files", ["files is empty"]),
        ("evaluate.source=files", ["files is empty"]),
        ("plan.tokens_per_batch=200", ["200", "256"]),
        ("evaluate.block_size=16", ["evaluate.block_size 16", "8"]),
        ("checkpoint.soak_steps=100000", ["100000", "100 save intervals"]),
        ("cluster={replicas: 3, nodes: 2, rendezvous: 'a:1'}", ["replicas 3", "nodes 2"]),
        ("cluster={replicas: 2, nodes: 2}", ["2 nodes", "rendezvous"]),
        ("cluster.rendezvous=nowhere", ["cluster.rendezvous", "nowhere"]),
        ("train.compile=true", ["train.compile", "GPUs"]),
        ("train.skip_update_if_grad_over=1", ["train.skip_update_if_grad_over", "greater than 1"]),
        ("target.expected={hidden_size: 64, num_hidden_layers: 9, vocab_size: 9, num_parameters: 9}", ["128", "64"]),
        ("target.expected={hidden_size: 128, num_hidden_layers: 2, vocab_size: 9, num_parameters: 9}", ["layer 2", "2 layers"]),
    ],
)
def test_bad_value_is_refused_with_the_value_itself(override: str, parts: list[str]) -> None:
    message = refused(override)
    assert all(part in message for part in parts), message


def test_probes_take_no_device_from_the_training() -> None:
    gpus = ("cluster.device=cuda", "cluster.targets_per_replica=6", "probe.every_steps=100")
    assert "probe.device cuda:6 is one of the 7 GPUs" in refused(*gpus, "probe.device=cuda:6")
    assert parsed(*gpus, "probe.device=cuda:7").probe.device == "cuda:7"
    assert parsed(*gpus, "probe.device=cpu", "cluster.replicas=2").probe.device == "cpu"
    assert parsed("cluster.device=cuda", "probe.device=cuda:0").probe.every_steps == 0, "off by default, so nothing is taken"
    assert "probe.device" in refused("probe.device=cuda")


def test_last_layer_of_the_expected_target_may_not_be_tapped() -> None:
    """The tap of the last layer is only seen after the final norm, so no target can serve it."""
    expected = "target.expected={hidden_size: 128, num_hidden_layers: 3, vocab_size: 9, num_parameters: 9}"
    assert "layer 2" in refused(expected)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.lr", "'train.lr'"),
        ("=3", "'=3'"),
        ("train..lr=3", "'train..lr=3'"),
        ("train.lr.deep=3", "'lr' is a value"),
        ("train.lr=[1, 2", "not YAML"),
    ],
)
def test_malformed_override_is_quoted(override: str, named: str) -> None:
    assert named in refused("train.lr=0.1", override)


def test_overrides_reach_any_depth_and_the_last_one_wins() -> None:
    config = parsed(
        "train.loss.gamma=7", "train.lr=1e-3", "train.lr=3e-4", "data.template_flags.enable_thinking=false", "run.name=x"
    )
    assert (config.train.loss.gamma, config.train.lr, config.run.name) == (7.0, 3e-4, "x")
    assert config.data.template_flags == {"enable_thinking": False}
    assert parsed("data.answers={temperature: 0.7}").data.answers.temperature == 0.7


def test_scientific_numbers_without_a_dot_are_numbers() -> None:
    """YAML 1.1 reads `3e-4` as text; a learning rate written so must still be the number."""
    assert parsed("train.lr=3e-4").train.lr == 3e-4
    assert parsed(text=MINIMAL + "train: {lr: 6e-4}\n").train.lr == 6e-4


def test_other_schema_version_is_refused_before_its_keys_are_looked_at() -> None:
    message = refused(text="schema_version: 2\na_key_of_tomorrow: 1\n" + MINIMAL)
    assert "schema_version 2, this code reads 1" in message
    assert "a_key_of_tomorrow" not in message


@pytest.mark.parametrize(("text", "part"), [("a: [1", "not valid YAML"), ("- 1\n", "no mapping"), ("", "no mapping")])
def test_text_that_is_no_configuration(text: str, part: str) -> None:
    assert part in refused(text=text)


@pytest.mark.parametrize("text", ["train: 5\n", "train: [1]\n", "target: demo\n", "train: null\n"])
def test_value_where_a_section_belongs_is_one_clear_error(text: str) -> None:
    section = text.partition(":")[0]
    assert section in refused(text=text + "data: {num_conversations: 1}\n")


def test_override_into_a_section_that_is_a_value() -> None:
    assert "'target' is a value, not a section" in refused("target.path=x", text="target: demo\ndata: {num_conversations: 1}\n")


def test_missing_file_and_undecodable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("run: {name: café}".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_that_would_run_code_is_only_an_error() -> None:
    assert "not valid YAML" in refused(text="run: !!python/object/apply:os.system ['true']\n")


def test_sections_are_frozen() -> None:
    config = parsed()
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.run = config.run  # type: ignore[misc]


def test_defaults_are_validated_and_need_only_target_and_data() -> None:
    config = parsed()
    assert config.schema_version == 1
    assert config.cluster.devices_needed == 0
    assert parsed("cluster.device=cuda", "cluster.targets_per_replica=6").cluster.devices_needed == 7
    assert parsed("cluster.device=cuda", "cluster.targets_per_replica=6", "cluster.share_device=true").cluster.devices_needed == 1
    assert "target" in refused(text="data: {num_conversations: 1}\n")


def test_demo_is_the_folder_inside_the_package_and_other_paths_stay_as_given() -> None:
    assert (Path(parsed().target.location) / "config.json").is_file()
    assert parsed("target.path=org/model").target.location == "org/model"


@given(
    lr=st.floats(1e-9, 10, allow_nan=False),
    seed=st.integers(0, 2**40),
    taps=st.sets(st.integers(0, 60), min_size=1, max_size=6),
    flags=st.dictionaries(st.text(max_size=6), st.none() | st.booleans() | st.integers() | st.text(max_size=8), max_size=3),
    files=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3),
    prompt=st.none() | st.text(max_size=20),
)
@settings(max_examples=amount(16, full=80), deadline=None, derandomize=True)
def test_dump_and_parse_are_inverse(
    lr: float, seed: int, taps: set[int], flags: dict[str, Any], files: list[str], prompt: str | None
) -> None:
    tree = {
        "run": {"seed": seed},
        "target": {"mask_token_id": 7},
        "drafter": {"target_layer_ids": sorted(taps)},
        "data": {"source": "files", "files": files, "template_flags": flags, "system_prompt": prompt},
        "train": {"lr": lr},
    }
    config = Config.model_validate(tree)
    again = parse_config(dump_config(config), origin="dump")
    assert again == config
    assert section_hash(again) == section_hash(config)
    assert set(yaml.safe_load(dump_config(config))) == set(Config.model_fields), "every section is written out"


def test_hash_depends_on_values_alone_and_on_every_value() -> None:
    config = parsed()
    assert section_hash(config) == section_hash(parsed("train.lr=0.006"))
    assert section_hash(config.data, config.plan) == section_hash(parsed("train.lr=1").data, parsed("train.lr=1").plan)
    changed = {section_hash(config), section_hash(parsed("train.lr=0.007")), section_hash(parsed("data.seed=8"))}
    assert len(changed) == 3
    assert section_hash(config.data, config.plan) != section_hash(config.plan, config.data)
    assert len(section_hash(config)) == 64


def test_flat_params_hold_every_documented_key() -> None:
    params = flat_params(parsed("data.template_flags.enable_thinking=false"))
    documented = {key for key, _, _ in config_rows()}
    optional = {key for key in documented if key.startswith("target.expected.")}
    flags = {"data.template_flags"}
    listed = {key for key in documented if "[]." in key}  # a list of sections is one parameter
    assert documented - optional - flags - listed <= set(params)
    assert {key.partition("[]")[0] for key in listed} <= set(params)
    assert params["data.template_flags.enable_thinking"] == "False"
    assert params["drafter.target_layer_ids"] == "[0, 1, 2]"
    assert params["target.expected"] == "None"
    assert all(isinstance(value, str) for value in params.values())


def test_reference_documents_every_key_with_a_sentence() -> None:
    rows = list(config_rows())
    assert len({key for key, _, _ in rows}) == len(rows)
    assert all(description.strip() for _, _, description in rows)
    text = reference_markdown()
    for key in ("train.loss.gamma", "health.spike.loss_z", "target.expected.num_parameters", "schema_version"):
        assert f"| `{key}` |" in text


def test_a_key_that_stands_twice_is_refused_instead_of_the_last_one_winning() -> None:
    text = "target: {mask_token: x}\ndata: {num_conversations: 3}\ntrain:\n  epochs: 1\n  epochs: 2\n"
    with pytest.raises(ConfigError, match="'epochs' stands twice"):
        parse_config(text, origin="twice.yaml")
