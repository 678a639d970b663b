"""Every layout and every way between them: the same bits, the same hidden states, and what a layout cannot say is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import MASK, description_of, edit_config, edit_tensors, export_tiny, saved_target, shard
from model_fixtures import VOCAB, WIDTH, drafter_config, sliding_config, tiny_drafter
from safetensors.torch import load_file

from dflash.config import DrafterConfig
from dflash.errors import DrafterError
from dflash.model.export import export_drafter, import_drafter
from dflash.model.export_fields import LayoutName
from dflash.model.export_layouts import LAYOUTS
from dflash.model.export_transformers import transformers_config
from dflash.model.frozen_tables import frozen_tables
from dflash.model.target_info import TargetInfo

LAYOUT_NAMES: tuple[LayoutName, ...] = ("zlab", "speculators", "transformers")
BOTH_WAYS = sliding_config(sliding_causal=False)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("targets") / "tied")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("targets") / "untied", "llama", seed=1)


def hidden_of(drafter: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    anchors = torch.tensor([[5, 19]])
    features = torch.randn(1, 24, 2 * WIDTH, generator=generator)
    embeds = torch.randn(1, 2, 6, WIDTH, generator=generator)
    with torch.no_grad():
        output: torch.Tensor = drafter(features, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool))
    return output


@pytest.mark.parametrize("config", [drafter_config(), BOTH_WAYS], ids=["full", "mixed"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUT_NAMES, repeat=2)), ids="-".join)
def test_any_layout_goes_into_any_other_and_back_bit_for_bit(
    first: LayoutName, second: LayoutName, config: DrafterConfig, info: TargetInfo, tmp_path: Path
) -> None:
    tables = frozen_tables(Path(info.location))
    one = import_drafter(export_tiny(tmp_path / "one", config, info, layout=first), tables=tables)
    folder = export_drafter(
        one.drafter, tmp_path / "two", description=one.description, layout=second, dtype=one.dtype, tables=tables
    )
    two = import_drafter(folder, tables=tables)
    assert two.layout == second
    assert two.drafter.config.resolved_layer_types == config.resolved_layer_types
    drafter = tiny_drafter(config)
    assert torch.equal(hidden_of(two.drafter), hidden_of(drafter)), "the same bits give the same hidden states"
    state = two.drafter.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_bfloat16_is_the_cast_of_every_weight_in_every_layout(layout: LayoutName, info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", BOTH_WAYS, info, layout=layout, dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")
    for name, value in tiny_drafter(BOTH_WAYS).state_dict().items():
        assert torch.equal(stored[LAYOUTS[layout].file_name(name)], value.bfloat16())
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


def test_the_speculators_config_counts_hidden_states_and_holds_every_key(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", sliding_config(), info, layout="speculators")
    raw = json.loads((folder / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 2]  # our taps 0 and 1
    assert (raw["speculators_model_type"], raw["block_size"], raw["mask_token_id"]) == ("dflash", 6, MASK)
    assert raw["draft_vocab_size"] == raw["transformer_layer_config"]["vocab_size"] == VOCAB
    assert raw["sliding_window_non_causal"] is False
    assert raw["sample_from_anchor"] is False
    assert raw["transformer_layer_config"]["layer_types"] == ["sliding_attention", "full_attention"]
    settings = raw["speculators_config"]
    assert settings["algorithm"] == "dflash"
    assert settings["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert settings["verifier"] == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}


def test_the_targets_tables_are_added_for_speculators_and_left_out_on_the_way_back(
    info: TargetInfo, untied: TargetInfo, tmp_path: Path
) -> None:
    for place, target in (("tied", info), ("untied", untied)):
        folder = export_tiny(tmp_path / place, drafter_config(), target, layout="speculators")
        stored, tables = load_file(folder / "model.safetensors"), frozen_tables(Path(target.location))
        assert len(stored) == 27
        for name in ("embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(stored[name], tables[name])
        assert torch.equal(stored["embed_tokens.weight"], stored["lm_head.weight"]) == (place == "tied")
        assert len(import_drafter(folder, tables=tables).drafter.state_dict()) == 25


def test_a_speculators_folder_without_copies_of_the_tables_is_complete(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="speculators")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")])
    again = import_drafter(folder, tables=frozen_tables(Path(info.location)))
    assert torch.equal(hidden_of(again.drafter), hidden_of(tiny_drafter(drafter_config())))


def test_a_copy_that_is_not_the_targets_own_table_is_refused(info: TargetInfo, untied: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="speculators")
    with pytest.raises(DrafterError, match=r"embed_tokens\.weight in .* is not the target's own table"):
        import_drafter(folder, tables=frozen_tables(Path(untied.location)))
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"][3].add_(1e-3))
    with pytest.raises(DrafterError, match=r"lm_head\.weight in .* is not the target's own table"):
        import_drafter(folder, tables=frozen_tables(Path(info.location)))
    import_drafter(folder, tables=None)  # without the target there is nothing to compare with, and the copy is left out


def test_speculators_without_the_target_at_hand_is_refused(info: TargetInfo, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="the target is not at hand"):
        export_drafter(
            tiny_drafter(drafter_config()),
            tmp_path / "out",
            description=description_of(drafter_config(), info),
            layout="speculators",
            dtype="float32",
            tables=None,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw.update(draft_vocab_size=32), "pruned vocabulary: draft_vocab_size 32 of the target's 61"),
        (lambda raw: raw.update(aux_hidden_state_layer_ids=[0, 1]), "hidden state 0 is the embedding"),
        (lambda raw: raw.update(aux_hidden_state_layer_ids=[1, 4]), "taps layer 3 of a target with 4 layers"),
        (lambda raw: raw.pop("aux_hidden_state_layer_ids"), "lacks 'aux_hidden_state_layer_ids'"),
        (lambda raw: raw.pop("mask_token_id"), "lacks 'mask_token_id'"),
        (lambda raw: raw.update(mask_token_id=VOCAB), "outside its vocabulary"),
        (lambda raw: raw.pop("block_size"), "lacks 'block_size'"),
        (lambda raw: raw.update(sample_from_anchor=True), "a draft at the anchor's own slot"),
        (lambda raw: raw.update(projector_type="domino"), "projector_type"),
        (lambda raw: raw.update(shift_label=True), "labels shifted by one"),
        (lambda raw: raw.update(speculators_model_type="eagle3"), "speculators_model_type"),
        (lambda raw: raw.pop("transformer_layer_config"), "lacks 'transformer_layer_config'"),
        (lambda raw: raw["transformer_layer_config"].update(attention_bias=True), "attention_bias"),
    ],
)
def test_speculators_configs_that_mean_something_else_are_refused(
    edit: Callable[[dict[str, Any]], object], message: str, info: TargetInfo, tmp_path: Path
) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="speculators")
    edit_config(folder, edit)
    with pytest.raises(DrafterError, match=message):
        import_drafter(folder, tables=None)


def test_vocabulary_maps_are_refused_unless_every_token_is_itself(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="speculators")
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    edit_tensors(folder, lambda tensors: tensors.update(identity))
    import_drafter(folder, tables=None)
    edit_tensors(folder, lambda tensors: tensors["d2t"][7].add_(2))
    with pytest.raises(DrafterError, match="d2t maps a pruned or renumbered draft vocabulary"):
        import_drafter(folder, tables=None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (sliding_config(), "sliding layers that are causal inside a block"),
        (sliding_config(sliding_causal=False, sliding_window=5), "a window of 5 under a block of 6"),
    ],
)
def test_what_the_transformers_drafter_cannot_say_is_refused(
    config: DrafterConfig, message: str, info: TargetInfo, tmp_path: Path
) -> None:
    with pytest.raises(DrafterError, match=message):
        export_tiny(tmp_path / "out", config, info, layout="transformers")
    assert list(tmp_path.iterdir()) == []


def test_the_transformers_window_is_inclusive_and_one_less(info: TargetInfo) -> None:
    raw = transformers_config(description_of(BOTH_WAYS, info), dtype="float32")
    assert raw["sliding_window"] == 8
    assert raw["target_layer_ids"] == [0, 1]
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_sharded_weights_are_read_through_their_index(layout: LayoutName, info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout=layout)
    shard(folder, parts=3)
    assert torch.equal(hidden_of(import_drafter(folder, tables=None).drafter), hidden_of(tiny_drafter(drafter_config())))


def test_an_index_and_its_shards_must_agree(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    shard(folder, parts=2)
    index = folder / "model.safetensors.index.json"
    whole = index.read_text()
    for edit, message in (
        (lambda named: named.pop("norm.weight"), r"disagree about 1 tensors: norm\.weight"),
        (lambda named: named.update({"extra.weight": "model-00001-of-00002.safetensors"}), r"extra\.weight"),
        (lambda named: named.update({"norm.weight": "../model-00001-of-00002.safetensors"}), "no weight_map of file names"),
    ):
        raw = json.loads(whole)
        edit(raw["weight_map"])
        index.write_text(json.dumps(raw))
        with pytest.raises(DrafterError, match=message):
            import_drafter(folder, tables=None)
    index.write_text(whole)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(folder, tables=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.update({"normal.weight": tensors.pop("norm.weight")}),
            r"missing norm\.weight; unknown normal\.weight",
        ),
        (lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].half()}), "stores its weights as float16, float32"),
        (lambda tensors: tensors.update({n: v.double() for n, v in tensors.items()}), "stores its weights as F64"),
    ],
)
def test_renamed_tensors_and_mixed_dtypes_are_refused(
    edit: Callable[[dict[str, Any]], object], message: str, info: TargetInfo, tmp_path: Path
) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    edit_tensors(folder, edit)
    with pytest.raises(DrafterError, match=message):
        import_drafter(folder, tables=None)


def test_a_truncated_file_is_refused(info: TargetInfo, tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "out", drafter_config(), info, layout="zlab")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DrafterError, match="cannot be read"):
        import_drafter(folder, tables=None)


def test_a_contradiction_about_causality_is_refused(info: TargetInfo, tmp_path: Path) -> None:
    config = sliding_config(layer_types=("sliding_attention",) * 2)
    folder = export_tiny(tmp_path / "out", config, info, layout="zlab")
    edit_config(folder, lambda raw: raw["dflash_config"].update(causal=False))
    with pytest.raises(DrafterError, match="says causal False and sliding_causal True"):
        import_drafter(folder, tables=None)
    edit_config(folder, lambda raw: raw["dflash_config"].pop("sliding_causal"))
    assert not import_drafter(folder, tables=None).description.config.sliding_causal


def test_a_target_without_tables_or_with_two_of_them_is_refused(untied: TargetInfo, tmp_path: Path) -> None:
    saved_target(tmp_path / "target", "llama")
    edit_tensors(tmp_path / "target", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(DrafterError, match=r"holds no lm_head\.weight and its config does not tie"):
        frozen_tables(tmp_path / "target")
    edit_tensors(tmp_path / "target", lambda tensors: tensors.update({"other.embed_tokens.weight": torch.zeros(2)}))
    with pytest.raises(DrafterError, match=r"several embed_tokens\.weight"):
        frozen_tables(tmp_path / "target")
