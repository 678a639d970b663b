"""The configurations in `configs/`: valid, and what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash.config import Config, load_config
from dflash.data.synthetic import generate_conversations
from dflash.errors import DflashError
from dflash.model.parameters import drafter_parameter_count
from dflash.model.target_info import check_drafter_fits, read_target_info
from dflash.train.doctor import describe_config, require_ready
from dflash.train.memory import memory_plan

CONFIGS = Path(__file__).parents[3] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def shipped(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides=overrides)


def test_the_promised_configurations_exist() -> None:
    assert {"demo", "smollm2", "train-v2"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_valid_and_describes_itself(name: str) -> None:
    config = shipped(name)
    assert config.run.name == name
    text = describe_config(config).text
    assert "trainable parameters" in text
    assert "total" in text
    assert "NOT FIT" not in text


@pytest.mark.parametrize("name", NAMES)
def test_six_buckets_and_the_decay_that_belongs_to_the_block_size(name: str) -> None:
    config = shipped(name)
    assert len(config.data.bucket_edges_tokens) == (4 if name == "drill" else 6), "a drill's epoch is short: fewer, fuller buckets"
    assert config.train.loss.gamma == {16: 7.0, 10: 5.0, 8: 4.0, 5: 3.0}[config.drafter.block_size]


def test_train_v2_is_the_published_drafter_on_seven_of_eight_gpus() -> None:
    config = shipped("train-v2")
    drafter = config.drafter
    assert drafter_parameter_count(drafter, 5120) == 1_730_213_120
    assert drafter.target_layer_ids == (1, 16, 31, 46, 61)
    assert drafter.resolved_layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert (drafter.block_size, drafter.sliding_window, drafter.rope_theta) == (16, 2048, 1e7)
    assert config.target.mask_token_id == 248_070
    assert (config.cluster.devices_needed, config.cluster.targets_per_replica) == (7, 6)
    assert config.data.bucket_edges_tokens[-1] == config.data.max_length_tokens == 8192
    assert not config.data.answers.regenerate
    assert (config.train.lr, config.checkpoint.interval_steps, config.train.anchors.max_per_sequence) == (6e-4, 2000, 512)


def test_train_v2_prints_its_plan_for_each_device() -> None:
    text = describe_config(shipped("train-v2")).text
    for part in (
        "1.73 B trainable",
        "26.90 B frozen",
        "target GPU x 6, each",
        "drafter GPU",
        "host memory",
        "disk",
        "every device fits",
    ):
        assert part in text
    places = {place.name: place for place in memory_plan(shipped("train-v2")).places}
    assert 53.8e9 < places["target GPU"].total_bytes < 70e9
    assert 31e9 < places["drafter GPU"].total_bytes < 96e9
    assert "DOES NOT FIT" in describe_config(shipped("train-v2", "cluster.device_memory_bytes=48_000_000_000")).text


def test_demo_fits_the_shipped_target_and_a_small_machine(tmp_path: Path) -> None:
    config = shipped("demo", f"run.root={tmp_path}")
    info = read_target_info(config.target)
    check_drafter_fits(config.drafter, info)
    assert config.drafter.rope_theta == info.rope_theta
    require_ready(config)
    assert memory_plan(config).places[0].total_bytes < 3 * 2**30


def test_demo_buckets_share_the_conversations_fairly() -> None:
    config = shipped("demo")
    tokenizer = AutoTokenizer.from_pretrained(config.target.location)
    counts = [0] * 6
    for chat in generate_conversations(seed=config.data.seed, count=300, split="train"):
        length = len(tokenizer.apply_chat_template(chat.as_messages(), return_dict=False))
        counts[next(k for k, edge in enumerate(config.data.bucket_edges_tokens) if length <= edge)] += 1
    assert min(counts) >= 0.08 * 300, counts


def test_smollm2_names_what_must_be_given_when_it_is_not(tmp_path: Path) -> None:
    info = ["target.path=demo", "target.expected=null", "drafter.hidden_size=128", "drafter.target_layer_ids=[0, 1]"]
    with pytest.raises(DflashError) as caught:
        require_ready(shipped("smollm2", *info))
    assert "SET-data.files-TO-YOUR-PROMPTS.jsonl" in caught.value.what
    assert "data.files=[" in caught.value.remedy
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    with pytest.raises(DflashError) as caught:
        require_ready(shipped("smollm2", *info, f"data.files=[{prompts}]"))
    assert "SET-evaluate.files-TO-HELD-OUT-PROMPTS.jsonl" in caught.value.what
    require_ready(shipped("smollm2", *info, f"data.files=[{prompts}]", f"evaluate.files=[{prompts}]"))


def test_smollm2_without_its_target_says_how_to_fetch_it() -> None:
    with pytest.raises(DflashError) as caught:
        require_ready(shipped("smollm2", "target.path=./nowhere/smollm2"))
    assert "fetch-target smollm2" in caught.value.remedy
