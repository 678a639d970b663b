"""Models that bring code: it runs only where `target.trust_remote_code` says so, and a chat template stays in its sandbox."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.config import TargetConfig
from dflash.data.quarantine import BadRowError
from dflash.data.render_template import ChatTemplate
from dflash.data.tokenizer import load_tokenizer
from dflash.errors import TargetError
from dflash.model.target import load_target
from dflash.model.target_info import HUB_PATTERNS, read_target_info

CODE = """
from pathlib import Path
from transformers import PreTrainedConfig
Path({canary!r}).touch()
class EvilConfig(PreTrainedConfig):
    model_type = "evil"
"""
MAP = {name: f"evil.Evil{name.removeprefix('Auto')}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def evil(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped target with a module that leaves a trace when it is imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(str(files("dflash") / "demo" / "target"), folder)
    (folder / "evil.py").write_text(CODE.format(canary=str(canary)))
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def target_of(folder: Path, **more: Any) -> TargetConfig:
    return TargetConfig(path=str(folder), mask_token="<|mask|>", local_files_only=True, **more)


@pytest.mark.parametrize("model_type", ["evil", None])
def test_a_configuration_with_code_of_its_own_is_refused(model_type: str | None, evil: Path, canary: Path) -> None:
    raw = json.loads((evil / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.EvilConfig"}}
    raw = {**raw, "model_type": model_type} if model_type else {key: value for key, value in raw.items() if key != "model_type"}
    (evil / "config.json").write_text(json.dumps(raw))
    with pytest.raises(TargetError, match="trust_remote_code"):
        read_target_info(target_of(evil))
    assert not canary.exists()


def test_code_beside_a_known_model_type_is_left_alone(evil: Path, canary: Path) -> None:
    """Many repositories bring modules for old libraries; what the library itself knows is built from its own classes."""
    change(evil / "config.json", auto_map=MAP)
    change(evil / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]})
    info = read_target_info(target_of(evil))
    layers = (0, info.num_hidden_layers - 2)
    assert load_target(target_of(evil), target_layer_ids=layers, device=torch.device("cpu")).info == info
    try:
        load_tokenizer(target_of(evil))
    except TargetError as error:
        assert "trust_remote_code" in error.what  # noqa: PT017 - either is safe
    assert not canary.exists()


def test_a_tokenizer_with_code_of_its_own_is_refused(evil: Path, canary: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    change(evil / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="EvilTokenizer")
    try:
        load_tokenizer(target_of(evil))
    except TargetError as error:
        assert "trust_remote_code" in error.what  # noqa: PT017 - either is safe
    assert not canary.exists()


def test_the_same_code_runs_where_it_is_trusted(evil: Path, canary: Path) -> None:
    change(evil / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    read_target_info(target_of(evil, trust_remote_code=True))
    assert canary.exists(), "so that the tests above prove something"


def test_a_download_fetches_no_code() -> None:
    assert not any(Path("modeling_evil.py").match(pattern) or Path("x.bin").match(pattern) for pattern in HUB_PATTERNS)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
        "{{ messages.append(messages) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_out_is_a_bad_row(template: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(TargetConfig(path="demo", mask_token="<|mask|>", local_files_only=True))
    tokenizer.chat_template = template
    with pytest.raises(BadRowError):
        ChatTemplate(tokenizer, {}).text([{"role": "user", "content": "q"}], [], for_generation=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "sub/x.safetensors"])
def test_an_index_names_only_files_beside_it(name: str, evil: Path) -> None:
    shutil.copy(evil / "model.safetensors", evil.parent / "outside.safetensors")
    (evil / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(TargetError, match=r"outside the folder|lacks"):
        read_target_info(target_of(evil))
