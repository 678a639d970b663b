from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BUILDERS, RECURRENT, drafting, make_drafter, make_target, prompts, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.config import DrafterConfig
from dflash.errors import EvaluationError
from dflash.evaluate.decode import DecodeLimits, plain_decode, speculative_decode
from dflash.evaluate.judge import agreeing_prefix
from dflash.evaluate.proposers import DrafterProposer, LookupProposer
from dflash.evaluate.state_proof import broken_rollbacks
from dflash.model.drafter import Drafter
from dflash.model.sampling import GREEDY
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "full"
LONG = DecodeLimits(max_new_tokens=32, stop_ids=frozenset())
shared = cache(make_target)
"""No test here changes a target."""


@cache
def long_answers(family: str) -> list[tuple[list[int], tuple[int, ...]]]:
    """Two prompts and their plain answers."""
    return [(prompt, plain_decode(shared(family), prompt, limits=LONG).tokens) for prompt in prompts(2)]


@pytest.fixture(scope="module")
def golden() -> tuple[Target, Drafter, dict[str, Any]]:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    shape = dict(expected["target_config"])
    rope = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, rope_parameters=rope))
    model.load_state_dict(load_file(GOLDEN / "target.safetensors"))
    draft = expected["draft_config"]
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = DrafterConfig(
        **{name: draft[name] for name in names},
        block_size=draft["block_size"],
        target_layer_ids=tuple(draft["dflash_config"]["target_layer_ids"]),
        rope_theta=draft["rope_theta"],
    )
    info = TargetInfo("golden", "0" * 64, "qwen3", 48, 8, 61, rope["rope_theta"], 512, 0)
    target = Target(model, info=info, target_layer_ids=config.target_layer_ids)
    drafter = Drafter(config, target_hidden_size=48)
    drafter.load_state_dict(load_file(GOLDEN / "draft.safetensors"))
    return target, drafter.eval(), expected


def test_the_reference_loop_is_reproduced_token_by_token_and_block_by_block(golden: tuple[Target, Drafter, dict[str, Any]]) -> None:
    target, drafter, expected = golden
    mask_id = expected["draft_config"]["dflash_config"]["mask_token_id"]
    proposer = DrafterProposer(target, drafter, block_size=8, mask_token_id=mask_id, drawing=GREEDY)
    lengths: list[int] = []
    for case in expected["decode"]:
        wanted = case["output"][len(case["prompt"]) :]
        # The reference goes on until its anchor lies outside the limit: one verification more when a block fills it exactly.
        limits = DecodeLimits(max_new_tokens=len(wanted) + 1, stop_ids=frozenset())
        trace = speculative_decode(target, proposer, case["prompt"], limits=limits, rollback=target.keep)
        assert [step.committed for step in trace.verifications] == case["acceptance_lengths"]
        assert list(trace.tokens[: len(wanted)]) == wanted
        lengths += [step.committed for step in trace.verifications]
    assert sum(lengths) / len(lengths) == pytest.approx(expected["decode_tau_pooled"])


@pytest.mark.parametrize("family", BUILDERS)
def test_decoding_is_lossless_on_every_cache_family(family: str) -> None:
    target = shared(family)
    seen: set[int] = set()
    for number, (prompt, answer) in enumerate(long_answers(family)):
        script = scripted(target, prompt, answer, max_drafts=5, right_frac=0.75, seed=number)
        trace = speculative_decode(target, script, prompt, limits=LONG, rollback=target.keep)
        assert trace.tokens == answer
        seen |= {step.accepted for step in trace.verifications}
    assert len(seen) >= 4, "the script was meant to exercise many rollback lengths"


@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"])
def test_drafter_and_lookup_decode_losslessly(family: str) -> None:
    target, drafter = shared(family), make_drafter()
    limits = DecodeLimits(max_new_tokens=14, stop_ids=frozenset())
    for prompt in prompts(2, seed=8):
        plain = plain_decode(target, prompt, limits=limits)
        for proposer in (
            drafting(target, drafter, block_size=6),
            drafting(target, drafter, block_size=3),
            LookupProposer(target, block_size=6),
        ):
            trace = speculative_decode(target, proposer, prompt, limits=limits, rollback=target.keep)
            assert trace.tokens == plain.tokens
            assert all(step.drafted <= proposer.max_drafts for step in trace.verifications)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_sliding", "qwen3_5_hybrid"])
@pytest.mark.parametrize("control", ["no_crop", "crop_off_by_one", "crop_only", "no_restore"])
def test_a_broken_rollback_changes_the_tokens(family: str, control: str) -> None:
    target = shared(family)
    rollbacks = broken_rollbacks(target, ragged=False)
    if control not in rollbacks:
        assert control in ("crop_only", "no_restore") and family not in RECURRENT
        return
    differing = 0
    for number, (prompt, answer) in enumerate(long_answers(family)):
        script = scripted(target, prompt, answer, max_drafts=5, right_frac=0.5, seed=number)
        trace = speculative_decode(target, script, prompt, limits=LONG, rollback=rollbacks[control])
        differing += trace.tokens != answer
    assert differing > 0


def test_nothing_behind_the_first_stop_id_is_returned_and_both_conventions_are_kept() -> None:
    target = shared("qwen3")
    (prompt,) = prompts(1, seed=5)
    free = plain_decode(target, prompt, limits=LONG).tokens
    stop = next(token for index, token in enumerate(free) if index >= 3 and free.index(token) == index)
    end = free.index(stop)
    limits = DecodeLimits(max_new_tokens=32, stop_ids=frozenset({stop}))
    plain = plain_decode(target, prompt, limits=limits)
    script = scripted(target, prompt, free, max_drafts=20, right_frac=1.0, seed=0)
    trace = speculative_decode(target, script, prompt, limits=limits, rollback=target.keep)
    assert trace.tokens == plain.tokens == free[: end + 1]
    (step,) = trace.verifications
    assert step.counted == end  # the prefill made the first token
    assert step.accepted == 20 and step.committed == 21


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_the_length_limit_holds_for_both_loops(length: int) -> None:
    target = shared("llama")
    (prompt,) = prompts(1, seed=6)
    limits = DecodeLimits(max_new_tokens=length, stop_ids=frozenset())
    plain = plain_decode(target, prompt, limits=limits)
    script = scripted(target, prompt, [*plain.tokens, *[0] * 9], max_drafts=5, right_frac=1.0, seed=0)
    trace = speculative_decode(target, script, prompt, limits=limits, rollback=target.keep)
    assert len(plain.tokens) == length and trace.tokens == plain.tokens
    assert sum(step.counted for step in trace.verifications) == length - 1


def test_an_answer_that_stops_at_once_needs_no_verification() -> None:
    target = shared("qwen3")
    (prompt,) = prompts(1)
    first = plain_decode(target, prompt, limits=LONG).tokens[0]
    limits = DecodeLimits(max_new_tokens=9, stop_ids=frozenset({first}))
    trace = speculative_decode(target, LookupProposer(target, block_size=4), prompt, limits=limits, rollback=target.keep)
    assert trace.tokens == (first,) and trace.verifications == ()


def test_each_verification_knows_the_context_in_front_of_its_anchor() -> None:
    target = shared("qwen3")
    (prompt,) = prompts(1)
    trace = speculative_decode(target, LookupProposer(target, block_size=4), prompt, limits=LONG, rollback=target.keep)
    context = len(prompt)
    for step in trace.verifications:
        assert step.context_tokens == context
        context += step.counted


def test_the_plain_loop_equals_the_librarys_own_greedy_generation() -> None:
    for family in ("qwen3", "mistral_sliding", "lfm2_conv"):
        target = shared(family)
        (prompt,) = prompts(1, seed=9)
        ids = torch.tensor([prompt])
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0
        )
        ours = plain_decode(target, prompt, limits=DecodeLimits(20, frozenset()))
        assert list(ours.tokens) == theirs[0, len(prompt) :].tolist()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 5), st.integers(1, 8))
def test_reaching_counts_like_a_token_by_token_loop(new: list[int], have: int, limit: int) -> None:
    limits = DecodeLimits(max_new_tokens=max(limit, have + 1), stop_ids=frozenset({2}))
    taken, ended = 0, False
    for token in new:
        taken += 1
        ended = token == 2 or have + taken == limits.max_new_tokens
        if ended:
            break
    assert limits.reaching(new, have=have) == (taken, ended)


def test_agreeing_prefix_ends_at_the_first_difference() -> None:
    assert agreeing_prefix([], [4]) == 0
    assert agreeing_prefix([4, 5, 6], [4, 5, 7, 8]) == 2
    assert agreeing_prefix([4, 5, 6], [4, 5, 6, 8]) == 3
    assert agreeing_prefix([9, 5, 6], [4, 5, 6, 8]) == 0


def test_a_block_larger_than_the_trained_one_is_refused() -> None:
    target = shared("qwen3")
    with pytest.raises(EvaluationError, match="block size 7 at decode does not fit a drafter trained with 6"):
        drafting(target, make_drafter(), block_size=7)
