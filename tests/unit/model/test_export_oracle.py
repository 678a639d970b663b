"""An independent consumer: transformers' own DFlash generation loads the export and makes our drafts, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import MASK, edit_config, export_tiny, saved_target
from model_fixtures import drafter_config, sliding_config, tiny_drafter
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.generation import DFlashTokenCandidateGenerator

from dflash.config import DrafterConfig
from dflash.model.drafter import Drafter
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo

NEW_TOKENS = 40
BOTH_WAYS = sliding_config(sliding_causal=False)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("oracle") / "target")


@pytest.fixture(scope="module")
def target(info: TargetInfo) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(info.location), info=info, target_layer_ids=(0, 1))


def generate_with_the_library(
    target: Target, folder: Path, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """Its greedy tokens, and for each block the tokens so far and the drafts."""
    assistant, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    blocks: list[tuple[list[int], list[int]]] = []
    original: Callable[..., Any] = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, input_ids, *args, **kwargs)
        tokens = input_ids[0].tolist()
        if found[0].shape[1] > len(tokens):
            blocks.append((tokens, found[0][0, len(tokens) :].tolist()))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, speculation_type="dflash")
    output = target.model.generate(prompt, assistant_model=assistant, generation_config=settings)
    return output[0].tolist(), blocks


@torch.no_grad()
def drafts_of_ours(target: Target, drafter: Drafter, tokens: list[int]) -> list[int]:
    start, size = len(tokens) - 1, drafter.config.block_size
    features = target.features(torch.tensor([tokens[:start]]), torch.tensor([start]))
    block = torch.full((1, size), MASK)
    block[0, 0] = tokens[-1]
    hidden = drafter.draft(target.embed(block), features, drafter.new_cache(), start)
    chosen: list[int] = target.logits(hidden[0, 1:]).argmax(-1).tolist()
    return chosen


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, MASK, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [drafter_config(), BOTH_WAYS], ids=["full", "mixed"])
def test_the_library_drafts_the_same_tokens_with_the_exported_drafter(
    config: DrafterConfig, target: Target, info: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_tiny(tmp_path / "out", config, info, layout="transformers")
    drafter, compared = tiny_drafter(config), 0
    for seed, length in enumerate((3, 14, 23)):  # below, around and beyond the window
        prompt = prompt_of(length, seed)
        output, blocks = generate_with_the_library(target, folder, prompt, monkeypatch)
        plain = target.model.generate(prompt, generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False))
        assert output == plain[0].tolist()
        for tokens, drafts in blocks:
            assert drafts == drafts_of_ours(target, drafter, tokens)
        compared += len(blocks)
    assert compared > 60


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.update(sliding_window=raw["sliding_window"] + 1),
        lambda raw: raw.update(target_layer_ids=[1, 2]),
        lambda raw: raw.update(mask_token_id=MASK - 1),
        lambda raw: raw["rope_parameters"].update(rope_theta=100.0),
    ],
    ids=["window", "taps", "mask", "rope"],
)
def test_the_comparison_notices_a_wrong_key(
    edit: Callable[[dict[str, Any]], object], target: Target, info: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_tiny(tmp_path / "out", BOTH_WAYS, info, layout="transformers")
    edit_config(folder, edit)
    _, blocks = generate_with_the_library(target, folder, prompt_of(23, 2), monkeypatch)
    drafter = tiny_drafter(BOTH_WAYS)
    assert any(drafts != drafts_of_ours(target, drafter, tokens) for tokens, drafts in blocks)
