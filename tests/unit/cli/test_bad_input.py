"""Bad input through the real command line: one clear message, a non-zero exit, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dflash.checkpoint import load_checkpoint
from dflash.cli import main
from dflash.errors import CheckpointError
from dflash.storage import sha256_file
from tests.support.sealing import rewrite, values_of
from tests.support.tiny_run import build_tiny_run
from tests.support.trainer_process import train_to_end

GOOD = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 it is"}]}
BASE = """
run: {name: bad, root: ROOT}
target: {path: demo, mask_token: "<|mask|>"}
drafter: {target_layer_ids: [0, 1, 2]}
data: {source: files, files: [FILE], answers: {regenerate: false}, over_long: error}
tracking: {enabled: false}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(
        BASE.replace("ROOT", str(tmp_path / "runs")).replace("FILE", str(tmp_path / "chats.jsonl")), encoding="utf-8"
    )
    write_rows(tmp_path, GOOD)
    return tmp_path


def write_rows(work: Path, *rows: object) -> None:
    (work / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail like a user error, and return its message."""
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert "-> " in captured.err, "an error names its remedy"
    assert "Traceback" not in captured.err
    return captured.err


def left_behind(work: Path) -> list[str]:
    """Whatever could be mistaken for a result."""
    found = [path for path in (work / "runs").rglob("*") if path.is_file() and path.name != ".lock"]
    return [str(path.relative_to(work)) for path in found if not path.name.endswith(("quarantine.jsonl", ".answers.jsonl"))]


@pytest.mark.parametrize("devices", ["0", "1", "-3"])
def test_devices_that_cannot_be_split_are_refused(devices: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--devices {devices} " in refused(capsys, "balance", work / "config.yaml", f"--devices={devices}")


def test_an_unknown_key_names_the_nearest_one(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "config", "check", work / "config.yaml", "train.epoch=2")
    assert "train.epoch: unknown key; did you mean 'epochs'?" in message


@pytest.mark.parametrize("command", [("data", "prepare"), ("train",), ("config", "show")])
def test_a_missing_configuration(command: tuple[str, ...], work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml does not exist" in refused(capsys, *command, work / "nowhere.yaml")


def test_a_missing_data_file(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "chats.jsonl").unlink()
    assert "chats.jsonl" in refused(capsys, "train", work / "config.yaml")
    assert left_behind(work) == []


def test_a_sample_that_is_longer_than_the_limit(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "word " * 400}]}
    write_rows(work, GOOD, long)
    message = refused(capsys, "data", "prepare", work / "config.yaml")
    assert "chats.jsonl:2" in message
    assert "256" in message
    assert left_behind(work) == []


def test_an_empty_conversation(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(work, GOOD, {"messages": []})
    assert "chats.jsonl:2" in refused(capsys, "data", "prepare", work / "config.yaml")
    assert left_behind(work) == []


def test_a_mask_token_that_the_corpus_uses(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = "target.mask_token=4"  # a digit: an ordinary row, and the answer above holds it
    assert "mask" in refused(capsys, "data", "prepare", work / "config.yaml", override)
    assert left_behind(work) == []


def test_a_target_whose_hidden_size_does_not_fit_the_drafter(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "train", work / "config.yaml", "drafter.hidden_size=96")
    assert "96" in message
    assert "128" in message
    assert left_behind(work) == []


def test_more_gpus_than_the_machine_has(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = refused(capsys, "train", work / "config.yaml", "cluster.device=cuda", "cluster.targets_per_replica=5")
    assert "6 CUDA devices" in message
    assert left_behind(work) == []


def test_a_parquet_file_of_another_schema_version(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(work / "config.yaml"), "--json"]) == 0
    data_dir = Path(json.loads(capsys.readouterr().out)["location"])
    shard = next(data_dir.rglob("part-*.parquet"))
    table = pq.read_table(shard)
    pq.write_table(table.replace_schema_metadata({"dflash_schema_version": "99"}), shard)
    manifest = values_of(data_dir / "manifest.json")
    for entry in manifest["shards"]:
        file = data_dir / entry["path"]
        entry.update(size_bytes=file.stat().st_size, sha256=sha256_file(file))  # as another version of the code would have
    for file in (data_dir / "manifest.json", *data_dir.glob("manifests/*.json")):
        rewrite(file, **manifest)
    message = refused(capsys, "train", work / "config.yaml")
    assert "schema version" in message
    assert "99" in message
    assert not list(work.rglob("train_log.jsonl"))
    assert not list(work.rglob("epoch-*.npy"))


def test_a_checkpoint_with_a_flipped_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_tiny_run(tmp_path)
    train_to_end(run)
    checkpoint = max(run.paths.checkpoints_dir.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    weights = bytearray((checkpoint / "drafter.safetensors").read_bytes())
    weights[-1] ^= 1
    (checkpoint / "drafter.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors"):
        load_checkpoint(checkpoint)
    assert not run.paths.eval_dir.exists()
