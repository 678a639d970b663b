"""Pre-flight: what this machine lacks is said before anything starts, and a plan is readable anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash.config import Config, parse_config
from dflash.errors import DataError, DeviceError, DflashError, DrafterError, StorageError, TargetError
from dflash.train.doctor import CheckResult, check_devices, describe_config, render_checks, require_ready, run_checks

BASE = """
target: {mask_token: "<|mask|>"}
drafter: {rope_theta: 1000000}
data: {num_conversations: 10}
"""


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [f"run.root={tmp_path / 'runs'}"]


def config_of(base: list[str], *overrides: str) -> Config:
    return parse_config(BASE, origin="test", overrides=[*base, *overrides])


@pytest.fixture(autouse=True)
def _memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on the machine is not these tests' business."""
    monkeypatch.setattr("dflash.train.doctor.machine.free_bytes", lambda _place: None)


def failures(config: Config) -> dict[str, CheckResult]:
    return {result.name: result for result in run_checks(config) if result.status == "fail"}


def test_more_gpus_than_there_are_is_refused_with_both_numbers(base: list[str]) -> None:
    found = torch.cuda.device_count()
    config = config_of(base, "cluster.device=cuda", f"cluster.targets_per_replica={found + 5}")
    with pytest.raises(DeviceError) as caught:
        check_devices(config)
    assert f"asks for {found + 6} CUDA devices" in caught.value.what
    assert f"this machine has {found}" in caught.value.what
    assert "cluster.targets_per_replica" in caught.value.remedy
    assert failures(config)["devices"].message == caught.value.what


def test_cpu_configuration_needs_no_gpu(base: list[str]) -> None:
    check_devices(config_of(base, "cluster.targets_per_replica=9"))


def test_demo_configuration_passes_every_check_and_writes_nothing(base: list[str], tmp_path: Path) -> None:
    config = config_of(base)
    results = run_checks(config)
    assert [(result.name, result.status) for result in results] == [
        ("devices", "ok"),
        ("target", "ok"),
        ("rope", "ok"),
        ("inputs", "ok"),
        ("memory", "ok"),
        ("disk", "ok"),
    ]
    require_ready(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "check", "kind", "named"),
    [
        (["target.path=./no/such/folder"], "target", TargetError, "./no/such/folder"),
        (["drafter.hidden_size=64"], "target", DrafterError, "64 differs from the target's hidden size 128"),
        (["drafter.target_layer_ids=[1, 3]"], "target", DrafterError, "layer 3"),
        (["data.source=files", "data.files=[no-such.jsonl]"], "inputs", DataError, "no-such.jsonl"),
        (["evaluate.source=files", "evaluate.files=[held-out.jsonl]"], "inputs", DataError, "held-out.jsonl"),
        (
            ["evaluate.source=sets", "evaluate.sets=[gsm8k, {name: mine, file: mine.jsonl}]"],
            "inputs",
            DataError,
            "evaluate.sets names 'mine.jsonl'",
        ),
        (["data.source=files", "data.files=['no-*.jsonl']"], "inputs", DataError, "no-*.jsonl"),
        (["train.init_from=no/such/drafter"], "inputs", DrafterError, "no/such/drafter"),
        (["cluster.device_memory_bytes=1000000"], "memory", DeviceError, "it has 0.00 GB"),
        (["checkpoint.keep_clean=1000000000000"], "disk", StorageError, "GB free"),
    ],
)
def test_each_lack_is_found_and_raised_as_its_own_error(
    base: list[str], overrides: list[str], check: str, kind: type[DflashError], named: str
) -> None:
    config = config_of(base, *overrides)
    found = failures(config)[check]
    assert named in found.message
    assert found.remedy
    with pytest.raises(kind) as caught:
        require_ready(config)
    assert named in caught.value.what


def test_broken_target_folder_fails_the_target_check(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = failures(config_of(base, f"target.path={tmp_path / 'model'}"))
    assert "no config.json" in found["target"].message


def test_hub_name_is_a_warning_and_files_on_other_stores_are_not_looked_for(base: list[str]) -> None:
    expected = "target.expected={hidden_size: 128, num_hidden_layers: 9, vocab_size: 512, num_parameters: 1000000}"
    config = config_of(base, "target.path=some-org/Some-Model_1.5", expected, "data.source=files", "data.files=['s3://bucket/key']")
    results = {result.name: result for result in run_checks(config)}
    assert results["target"].status == "warn"
    assert results["inputs"].status == "ok"


def test_another_rope_base_than_the_targets_is_a_warning(base: list[str]) -> None:
    config = config_of(base, "drafter.rope_theta=10000")
    (warning,) = [result for result in run_checks(config) if result.status == "warn"]
    assert "10000 differs from the target's 1e+06" in warning.message
    text = render_checks(run_checks(config))
    assert "warn  rope" in text
    assert "-> set drafter.rope_theta=1e+06" in text


def test_description_holds_counts_and_plan_and_is_json(base: list[str]) -> None:
    config = config_of(base, "cluster.device_memory_bytes=4000000000")
    description = describe_config(config)
    payload = json.loads(json.dumps(description.payload))
    assert payload["trainable_parameters"] == 246_336
    assert payload["memory_plan"]["fits"] is True
    for part in ("246,336", "1 layer,", "taps 0, 1, 2", "every device fits", "of 4.0 GB: fits"):
        assert part in description.text


def test_description_without_a_known_target_still_counts_the_drafter(base: list[str]) -> None:
    description = describe_config(
        config_of(base, "target.path=some-org/some-model", "cluster.device=cuda", "cluster.targets_per_replica=6")
    )
    assert description.payload["memory_plan"] is None
    assert "246,336" in description.text
    assert "7 CUDA devices: 1 replica x (6 targets + 1 drafter)" in description.text
    assert "no memory plan: target 'some-org/some-model'" in description.text
