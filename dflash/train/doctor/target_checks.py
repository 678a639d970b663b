"""Checks of the loaded target: tap convention, mask token, vocabulary and head, RoPE.

Invariant: each `judge_*` function is pure and takes what was measured, so that every fault can be shown to be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo
from dflash.records import CheckResult

PROBE_TOKENS = 16
TAP_TOLERANCE = 1e-3


@torch.no_grad()
def taps_check(target: Target, *, layer_ids: Sequence[int], seed: int) -> CheckResult:
    """Compare every tap with all hidden states of the model: tap l must be `hidden_states[l+1]` and nothing else.

    Args:
        target: loaded target.
        layer_ids: what the drafter section names.
        seed: of the probed tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.info.vocab_size, (1, PROBE_TOKENS), generator=generator).to(target.device)
    states = target.model.get_decoder()(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    taps = target.features(ids, torch.tensor([PROBE_TOKENS])).chunk(len(target.target_layer_ids), dim=-1)
    return judge_taps(taps, states, layer_ids=layer_ids)


def judge_taps(taps: Sequence[Tensor], states: Sequence[Tensor], *, layer_ids: Sequence[int]) -> CheckResult:
    """Find the hidden state that each tap really is.

    Args:
        taps: one [B, S, D] a tapped layer.
        states: all hidden states, the embedding first.
        layer_ids: 0-based layers that the taps should be outputs of.
    """
    if len(taps) != len(layer_ids):
        message = f"the target gives {len(taps)} taps, drafter.target_layer_ids names {len(layer_ids)}"
        return CheckResult("taps", "fail", message, "load the target with drafter.target_layer_ids")
    worst = 0.0
    for layer_id, tap in zip(layer_ids, taps, strict=True):
        distances = [_distance(tap, state) for state in states]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        if nearest != layer_id + 1 or not distances[nearest] <= TAP_TOLERANCE:
            return CheckResult(
                "taps",
                "fail",
                f"tap {layer_id} should be hidden_states[{layer_id + 1}] and is nearest to hidden_states[{nearest}] "
                f"(off by {distances[nearest]:.2g})",
                "layer ids are 0-based outputs of decoder layers; ids that count hidden states are one higher",
            )
        worst = max(worst, distances[nearest])
    return CheckResult("taps", "ok", f"layers {list(layer_ids)} are hidden_states[l+1], within {worst:.1g}", "")


def judge_mask_token(
    mask_token_id: int, *, special: Mapping[str, Iterable[int]], row: Tensor | None, uses_in_data: int | None
) -> CheckResult:
    """Judge the mask token.

    Args:
        mask_token_id: its id.
        special: ids of the target's special tokens by role (pad, eos, unk, bos).
        row: its embedding [D]; None if the vocabulary has no such row.
        uses_in_data: how often the data set holds it; None where there is no data set yet.
    """
    remedy = "name another existing token that no text uses: target.mask_token or target.mask_token_id"
    if row is None:
        return CheckResult("mask token", "fail", f"{mask_token_id} is no row of the target's embedding", remedy)
    for role, ids in special.items():
        if mask_token_id in ids:
            return CheckResult("mask token", "fail", f"{mask_token_id} is the target's {role} token", remedy)
    norm = float(row.float().norm())
    if not 0 < norm < float("inf"):
        return CheckResult("mask token", "fail", f"the embedding of {mask_token_id} has norm {norm:g}", remedy)
    if uses_in_data:
        return CheckResult("mask token", "fail", f"{mask_token_id} stands {uses_in_data} times in the data set", remedy)
    data = "no data set yet" if uses_in_data is None else "unused by the data set"
    return CheckResult("mask token", "ok", f"{mask_token_id} is a row of norm {norm:.2g}, no special token, {data}", "")


def vocabulary_check(target: Target, *, tokenizer_size: int, manifest_vocab_size: int | None) -> CheckResult:
    """Rows of embedding and head against the tokenizer, the config and the data set."""
    embedding = target.model.get_input_embeddings().weight
    head = target.head_weight
    return judge_vocabulary(
        target.info,
        rows=(len(embedding), len(head)),
        tied=embedding.data_ptr() == head.data_ptr(),
        tokenizer_size=tokenizer_size,
        manifest_vocab_size=manifest_vocab_size,
    )


def judge_vocabulary(
    info: TargetInfo, *, rows: tuple[int, int], tied: bool, tokenizer_size: int, manifest_vocab_size: int | None
) -> CheckResult:
    """Judge the vocabulary.

    Args:
        info: the target's own description.
        rows: of the embedding and of the head.
        tied: they are one tensor.
        tokenizer_size: tokens that the tokenizer knows.
        manifest_vocab_size: what the data set was made for; None where there is none.
    """
    name, wanted = "vocabulary", info.vocab_size
    if rows != (wanted, wanted):
        message = f"embedding and head have {rows[0]} and {rows[1]} rows, the config says {wanted}"
        return CheckResult(name, "fail", message, "save the target with a config that matches its weights")
    if tokenizer_size > wanted:
        message = f"the tokenizer knows {tokenizer_size} tokens, the target has {wanted} rows"
        return CheckResult(name, "fail", message, "use the tokenizer that belongs to this target")
    if manifest_vocab_size not in (None, wanted):
        message = f"the data set was made for {manifest_vocab_size} rows, the target has {wanted}"
        return CheckResult(name, "fail", message, "prepare the data again with this target")
    padding = wanted - tokenizer_size
    return CheckResult(name, "ok", f"{wanted} rows, {padding} of them padding; head {'tied' if tied else 'of its own'}", "")


def judge_rope(
    drafter: DrafterConfig, *, rope_theta: float | None, target_positions: int | None, longest_tokens: int
) -> CheckResult:
    """Judge RoPE base and positions.

    Args:
        drafter: the drafter section.
        rope_theta: the target's base; None if its config names none.
        target_positions: longest position of the target; None if unknown.
        longest_tokens: longest sequence that is trained or evaluated, blocks included.
    """
    if target_positions is not None and longest_tokens > target_positions:
        message = f"sequences reach {longest_tokens} tokens, the target has {target_positions} positions"
        return CheckResult("rope", "fail", message, "lower data.max_length_tokens or evaluate.max_new_tokens")
    if longest_tokens > drafter.max_position_embeddings:
        message = f"sequences reach {longest_tokens} tokens, the drafter is exported for {drafter.max_position_embeddings}"
        return CheckResult("rope", "warn", message, f"set drafter.max_position_embeddings={longest_tokens} or more")
    if rope_theta is None:
        return CheckResult("rope", "warn", "the target's config names no RoPE base", "compare drafter.rope_theta by hand")
    if drafter.rope_theta != rope_theta:
        message = f"drafter.rope_theta {drafter.rope_theta:g} differs from the target's {rope_theta:g}"
        return CheckResult("rope", "warn", message, f"set drafter.rope_theta={rope_theta:g}")
    return CheckResult("rope", "ok", f"base {rope_theta:g} as the target's; sequences reach {longest_tokens} tokens", "")


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first.float() - second.float()).norm() / second.float().norm().clamp_min(1e-30))
