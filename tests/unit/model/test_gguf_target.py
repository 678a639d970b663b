"""A GGUF file as `target.path`: converted once, then an ordinary target for every room."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from dflash.config import TargetConfig, parse_config
from dflash.data.tokenizer import load_tokenizer, resolve_mask_token_id
from dflash.errors import TargetError
from dflash.model import gguf
from dflash.model.gguf import convert_once, gguf_to_hf
from dflash.model.target import load_target
from dflash.model.target_info import read_target_info
from dflash.train.doctor import examine, run_checks
from tests.support import tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.random_weights(seed=1, tied=True), types={})


def config_of(file: Path) -> TargetConfig:
    return TargetConfig(path=str(file), mask_token="<repo_name>")


def test_it_is_converted_once_and_loads_as_the_converted_folder(file: Path, cache: Path, tmp_path: Path) -> None:
    config = config_of(file)
    assert config.gguf_file == file
    assert Path(config.location).parent == cache
    target = load_target(config, target_layer_ids=(0,), device=CPU)
    gguf_to_hf(file, tmp_path / "hf")
    other = load_target(config.model_copy(update={"path": str(tmp_path / "hf")}), target_layer_ids=(0,), device=CPU)
    assert target.info.fingerprint == other.info.fingerprint
    ids = torch.arange(4, 20)[None]
    assert torch.equal(target.model(input_ids=ids).logits, other.model(input_ids=ids).logits)
    (made,) = cache.iterdir()
    stamp = made.stat().st_mtime_ns
    assert read_target_info(config).location == str(made)
    assert made.stat().st_mtime_ns == stamp
    tokenizer = load_tokenizer(config)
    assert resolve_mask_token_id(config, tokenizer, vocab_size=target.info.vocab_size) == 3


def test_another_file_at_the_same_place_is_another_folder(file: Path, cache: Path) -> None:
    first = read_target_info(config_of(file))
    tiny_gguf.write_gguf(file, tiny_gguf.random_weights(seed=2, tied=True), types={})
    os.utime(file, ns=(1, 1))
    second = read_target_info(config_of(file))
    assert first.location != second.location
    assert first.fingerprint != second.fingerprint
    assert len(list(cache.iterdir())) == 2


def test_a_relative_path_and_a_link_name_the_same_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_of(Path("tiny.gguf")).location == config_of(file).location
    assert "~" not in config_of(file).location


def test_several_at_once_make_one_folder(file: Path, cache: Path) -> None:
    folder = Path(config_of(file).location)
    failures: list[BaseException] = []
    together = threading.Barrier(3)

    def convert() -> None:
        together.wait()
        try:
            convert_once(file, folder)
        except BaseException as error:  # noqa: BLE001 - whatever a thread meets is this test's failure
            failures.append(error)

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert (folder / "model.safetensors").is_file()


def test_a_broken_or_missing_file_is_one_error_and_leaves_no_folder(tmp_path: Path, cache: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x00" * 40)
    with pytest.raises(TargetError, match=r"is not a complete GGUF file|holds the architecture"):
        load_target(config_of(broken), target_layer_ids=(0,), device=CPU)
    assert not cache.exists() or list(cache.iterdir()) == []
    with pytest.raises(TargetError, match=r"GGUF file .*absent\.gguf does not exist"):
        read_target_info(config_of(tmp_path / "absent.gguf"))


def test_a_cache_that_cannot_be_written_names_its_variable(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(TargetError) as caught:
        read_target_info(config_of(file))
    assert "cannot be converted into" in caught.value.what
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_a_conversion_that_dies_half_way_is_made_again(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gguf.save_file

    def dying(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "save_file", dying)
    with pytest.raises(KeyboardInterrupt):
        read_target_info(config_of(file))
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(gguf, "save_file", real)
    assert read_target_info(config_of(file)).model_type == "llama"


def test_the_examination_reads_it_like_any_other_target(file: Path, tmp_path: Path) -> None:
    text = f"""
run: {{root: {tmp_path / "runs"}}}
target: {{path: {file}, mask_token: "<repo_name>"}}
drafter: {{hidden_size: 64, intermediate_size: 96, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, block_size: 4,
          target_layer_ids: [0], rope_theta: 10000, max_position_embeddings: 256}}
data: {{num_conversations: 4, max_length_tokens: 128, bucket_edges_tokens: [64, 128]}}
"""
    config = parse_config(text, origin="test")
    found = {result.name: result for result in run_checks(config)}
    assert (found["target"].status, found["rope"].status) == ("ok", "ok")
    results = {result.name: result for result in examine(config, parts=("start",), paths=None, overfit_limit_s=1.0).results}
    assert {results[name].status for name in ("taps", "mask token", "vocabulary")} == {"ok"}
    missing = parse_config(text.replace("tiny.gguf", "other.gguf"), origin="test")
    found = {result.name: result for result in run_checks(missing)}
    assert found["target"].status == "fail"
    assert "other.gguf does not exist" in found["target"].message


def test_code_that_comes_with_a_model_is_not_run_unless_the_config_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "their_own", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}'
    )
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert not TargetConfig(path="demo", mask_token_id=1).trust_remote_code
    with pytest.raises(TargetError) as caught:
        read_target_info(TargetConfig(path=str(folder), mask_token_id=1))
    assert "trust_remote_code" in caught.value.remedy
    assert not (tmp_path / "ran").exists()
