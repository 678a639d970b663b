from __future__ import annotations

import math

import pytest
import torch
from families import BUILDERS, RECURRENT, VOCAB, make_target, prompts

from dflash.evaluate.decode import DecodeLimits, plain_decode
from dflash.evaluate.lossless import explain_difference, teacher_forced_logits
from dflash.evaluate.state_proof import STATE_TOLERANCE, StateProof, prove_state, state_difference
from dflash.model.sampling import GREEDY

torch.set_num_threads(1)
LIMITS = DecodeLimits(max_new_tokens=12, stop_ids=frozenset())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", BUILDERS)
def test_the_rolled_back_cache_equals_a_fresh_one_and_every_broken_rollback_is_noticed(family: str, rows: int) -> None:
    proof = prove_state(make_target(family), prompts(rows), block_size=6, seed=0)
    assert proof.judged and proof.holds
    assert proof.relative <= STATE_TOLERANCE
    assert {"no_crop", "crop_off_by_one"} <= set(proof.controls)
    assert ("no_restore" in proof.controls) == (family in RECURRENT)
    assert ("crop_only" in proof.controls) == (family in RECURRENT or family == "lfm2_conv")
    assert ("shift_without_keys" in proof.controls) == (rows > 1)
    assert all(value > 100 * STATE_TOLERANCE for value in proof.controls.values())


def test_a_cache_that_kept_the_wrong_token_is_noticed_though_its_length_is_right() -> None:
    target = make_target("qwen3")

    def keeps_the_last_instead_of_the_first(cache, kept) -> None:
        remove = cache.fed_tokens - kept[0]
        if not remove:
            return
        for layer in cache.kv.layers:
            layer.keys = torch.cat([layer.keys[..., : -remove - 1, :], layer.keys[..., -1:, :]], dim=-2)
            layer.values = torch.cat([layer.values[..., : -remove - 1, :], layer.values[..., -1:, :]], dim=-2)
        cache.length_tokens -= remove

    wrong = state_difference(target, prompts(1), block_size=6, seed=0, rollback=keeps_the_last_instead_of_the_first)
    assert STATE_TOLERANCE < wrong < math.inf


def test_a_blind_control_voids_the_proof() -> None:
    assert StateProof(1e-6, {"no_crop": math.inf}, judged=True).holds
    blind = StateProof(1e-6, {"no_crop": math.inf, "no_restore": 1e-7}, judged=True)
    assert not blind.holds and blind.blind_controls == ("no_restore",)
    assert not StateProof(2e-3, {"no_crop": math.inf}, judged=True).holds


def test_outside_float32_the_state_is_reported_but_not_judged() -> None:
    target = make_target("qwen3")
    target.model.to(torch.bfloat16)
    proof = prove_state(target, prompts(1), block_size=6, seed=0)
    assert not proof.judged and proof.holds
    assert proof.relative > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"])
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_teacher_forced_logits_do_not_depend_on_the_chunk(family: str, chunk: int) -> None:
    target = make_target(family)
    (prompt,) = prompts(1)
    answer = plain_decode(target, prompt, limits=LIMITS).tokens
    logits = teacher_forced_logits(target, prompt, answer, chunk_tokens=chunk)
    assert logits.shape == (len(answer), VOCAB)
    assert logits.argmax(-1).tolist() == list(answer)
    whole = target.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    assert torch.allclose(logits, whole, rtol=1e-3, atol=2e-3 * float(whole.abs().max()))


def explained(target, prompt, plain, speculative, factor: float):
    return explain_difference(
        target, prompt, answers=(plain, speculative), limits=LIMITS, sampling=GREEDY, key="", block_size=5, near_tie_factor=factor
    )


def test_a_difference_is_excused_only_within_the_factor_of_the_measured_rounding() -> None:
    target = make_target("qwen3")
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, limits=LIMITS).tokens
    logits = teacher_forced_logits(target, prompt, plain, chunk_tokens=1)
    # The second choice at token 6, and greedy from there on.
    second = int(logits[6].topk(2).indices[1])
    rest = plain_decode(target, [*prompt, *plain[:6], second], limits=DecodeLimits(5, frozenset())).tokens
    other = (*plain[:6], second, *rest)
    judged = explained(target, prompt, plain, other, 4.0)
    assert judged.position == 6
    assert judged.margin == pytest.approx(float(logits[6].max() - logits[6, second]), rel=1e-3)
    assert 0 < judged.rounding < 1e-2
    assert not judged.excused, "a real preference of the target is no near-tie"
    needed = judged.margin / judged.rounding
    assert not explained(target, prompt, plain, other, needed * 0.99).excused
    assert explained(target, prompt, plain, other, needed * 1.01).excused


def test_a_wrong_token_behind_an_excusable_one_is_not_excused() -> None:
    target = make_target("qwen3")
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, limits=LIMITS).tokens
    logits = teacher_forced_logits(target, prompt, plain, chunk_tokens=1)
    worst = int(logits[9].argmin())
    first_gap = explained(target, prompt, plain, (*plain[:9], worst, *plain[10:]), 4.0)
    assert first_gap.position == 9 and not first_gap.excused
    assert first_gap.margin >= float(logits[9].max() - logits[9].min()) * 0.99


def test_an_answer_that_is_cut_short_is_never_excused() -> None:
    target = make_target("qwen3")
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, limits=LIMITS).tokens
    for short in (plain[:7], plain[:11]):
        judged = explained(target, prompt, plain, short, 1e9)
        assert judged.position == len(short) and not judged.excused


def test_large_differences_between_correct_paths_excuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose cached forward depends on the chunk is broken, and must not excuse itself."""
    target = make_target("qwen3")
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, limits=LIMITS).tokens
    original = target.logits_cached

    def noisy(ids, cache):
        return original(ids, cache) * (1.2 if ids.shape[1] > 1 else 1.0)

    monkeypatch.setattr(target, "logits_cached", noisy)
    other = (*plain[:-1], (plain[-1] + 1) % VOCAB)
    judged = explained(target, prompt, plain, other, 1e9)
    assert judged.rounding > 0 and not judged.excused
