"""A run from data to checkpoints on the device, resumed bit for bit; and decoding that loses nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.setting import Figures, Setting, require
from benchmarks.gpu.shapes import randomize
from dflash.checkpoint import load_checkpoint
from dflash.config import DrafterConfig
from dflash.evaluate.decode import DecodeLimits, plain_decode, speculative_decode_batch
from dflash.evaluate.lossless import explain_difference
from dflash.evaluate.proposal import Proposer
from dflash.evaluate.proposers import DrafterProposer, OracleProposer
from dflash.evaluate.state_proof import prove_state
from dflash.model.drafter import Drafter
from dflash.model.sampling import GREEDY
from dflash.model.target import Target
from dflash.model.target_info import TargetInfo
from dflash.train.group import Alone
from dflash.train.inputs import open_inputs
from dflash.train.models import load_models
from dflash.train.segment import run_segment
from tests.support.tiny_run import TinyRun, build_tiny_run, tiny_target

WIDTH, TARGET_LAYERS, SAMPLES = 64, 4, 16
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": WIDTH}
VOCABULARY, MASK_ID, BLOCK = 101, 100, 6
LIMITS = DecodeLimits(max_new_tokens=24, stop_ids=frozenset())
NEAR_TIE_FACTOR = 4.0


def resumed_run(setting: Setting) -> Figures:
    """Data set, plan, reader, target, drafter, log, checkpoints: once to the end, once more, and once from the middle."""
    os.environ.setdefault("LOCAL_RANK", "0")
    tiny_target(setting.folder / "target", hidden_size=WIDTH, num_hidden_layers=TARGET_LAYERS)
    overrides = [f"drafter.{key}={value}" for key, value in HEADS.items()] + ["drafter.intermediate_size=96", "train.epochs=1"]
    if setting.cuda:
        overrides += ["cluster.device=cuda", "cluster.share_device=true"]
    runs = [build_tiny_run(setting.folder, samples=SAMPLES, overrides=overrides) for _ in range(2)]
    last = [_train(run, segment=0, resume_step=None) for run in runs]
    finals = [_weights(run, last[0]) for run in runs]
    begin = runs[1].config.checkpoint.interval_steps
    require(last[0] == last[1] > begin, f"the runs ended after {last} steps")
    _train(runs[1], segment=1, resume_step=begin)
    resumed = _weights(runs[1], last[0])
    repeat, resume = (_differing(finals[0], found) for found in (finals[1], resumed))
    require(
        not repeat,
        f"the same run twice: {len(repeat)} of {len(resumed)} tensors differ, e.g. {repeat[:1]}: kernels are not repeatable",
    )
    require(not resume, f"resumed at step {begin}: {len(resume)} of {len(resumed)} tensors differ, e.g. {resume[:1]}")
    return {"steps": last[0], "resumed_at": begin, "tensors_equal": len(resumed)}


def _train(run: TinyRun, *, segment: int, resume_step: int | None) -> int:
    inputs = open_inputs(run.config, run.paths)
    with inputs.store:
        models = load_models(run.config)
        state = run_segment(
            inputs,
            models,
            segment=segment,
            resume_step=resume_step,
            stop=threading.Event(),
            on_operation=lambda _name: None,
            group=Alone(),
        )
    return state.step


def _weights(run: TinyRun, step: int) -> dict[str, Tensor]:
    loaded = load_checkpoint(run.paths.checkpoint(step))
    return {**loaded.drafter, **loaded.optimizer}


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]


def decoding(setting: Setting) -> Figures:
    """Dense and hybrid targets: one row and ragged batches, a drafter and an oracle of known quality, state and tokens."""
    figures: Figures = {}
    for family in ("qwen3", "qwen3_5_hybrid"):
        target = _target(setting, family)
        for rows in (1, 3):
            proof = prove_state(target, _prompts(rows), block_size=BLOCK, seed=0)
            require(proof.judged and proof.holds, f"{family}, {rows} rows: the rolled-back state is off: {proof}")
            figures[f"{family}_state_off_{rows}"] = proof.relative
        figures[f"{family}_accepted_mean"] = _compare(target, setting, family)
    lower = _target(setting, "qwen3")
    lower.model.to(torch.bfloat16)
    figures["bfloat16_differing_prompts"] = len(_differing_answers(lower, _oracle(lower, _prompts(4))))
    return figures


def _compare(target: Target, setting: Setting, family: str) -> float:
    """Both proposers against plain decoding; returns the oracle's mean accepted drafts."""
    prompts = _prompts(4)
    for proposer in (_drafter(setting, target), _oracle(target, prompts)):
        for prompt, plain, answer in _differing_answers(target, proposer):
            tie = explain_difference(
                target,
                prompt,
                answers=(plain, answer),
                limits=LIMITS,
                sampling=GREEDY,
                key="",
                block_size=BLOCK,
                near_tie_factor=NEAR_TIE_FACTOR,
            )
            require(tie.excused, f"{family}, {type(proposer).__name__}: token {tie.position} differs by more than rounding: {tie}")
    traces = speculative_decode_batch(
        target, _oracle(target, prompts), prompts, keys=_keys(prompts), limits=LIMITS, sampling=GREEDY, rollback=target.keep
    )
    accepted = [one.accepted for trace in traces for one in trace.verifications]
    require(max(accepted) > 0, "an oracle that is right two times in three had nothing accepted")
    return sum(accepted) / len(accepted)


def _differing_answers(target: Target, proposer: Proposer) -> list[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """(prompt, plain answer, speculative answer) where these differ, alone and in one ragged batch."""
    prompts = _prompts(4)
    plain = [plain_decode(target, prompt, limits=LIMITS).tokens for prompt in prompts]
    batches = [[number] for number in range(2)] + [list(range(len(prompts)))]
    found = []
    for rows in batches:
        chosen, keys = [prompts[row] for row in rows], _keys(prompts)
        traces = speculative_decode_batch(
            target, proposer, chosen, keys=[keys[row] for row in rows], limits=LIMITS, sampling=GREEDY, rollback=target.keep
        )
        found += [
            (prompts[row], plain[row], trace.tokens) for row, trace in zip(rows, traces, strict=True) if trace.tokens != plain[row]
        ]
    return found


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(MASK_ID, (5 + 3 * number,), generator=generator).tolist() for number in range(count)]


def _keys(prompts: Sequence[Sequence[int]]) -> list[str]:
    return [str(number) for number in range(len(prompts))]


def _oracle(target: Target, prompts: Sequence[Sequence[int]]) -> OracleProposer:
    answers = {key: plain_decode(target, prompt, limits=LIMITS).tokens for key, prompt in zip(_keys(prompts), prompts, strict=True)}
    lengths = {key: len(prompt) for key, prompt in zip(_keys(prompts), prompts, strict=True)}
    return OracleProposer(target, answers, lengths, max_drafts=BLOCK - 1, right_frac=2 / 3, seed=0)


def _drafter(setting: Setting, target: Target) -> DrafterProposer:
    config = DrafterConfig(
        **HEADS, num_hidden_layers=2, intermediate_size=96, block_size=BLOCK, target_layer_ids=(0, 2),
        layer_types=("sliding_attention", "full_attention"), sliding_window=8,
    )  # fmt: skip
    drafter = Drafter(config, target_hidden_size=WIDTH).to(setting.device).eval()
    randomize(drafter, setting.generator(1))
    return DrafterProposer(target, drafter, block_size=BLOCK, mask_token_id=MASK_ID, drawing=GREEDY)


def _target(setting: Setting, family: str) -> Target:
    """A random float32 target whose greedy answers are not constant."""
    shape = {
        **HEADS, "vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": TARGET_LAYERS,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        kinds = ["linear_attention"] * (TARGET_LAYERS - 1) + ["full_attention"]
        linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **linear, layer_types=kinds))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith("conv1d.weight"):
                parameter.mul_(10.0)
    info = TargetInfo(
        location=family, fingerprint="0" * 64, model_type=family, hidden_size=WIDTH, num_hidden_layers=TARGET_LAYERS,
        vocab_size=VOCABULARY, rope_theta=10_000.0, max_position_embeddings=256,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )  # fmt: skip
    return Target(model.float().to(setting.device), info=info, target_layer_ids=(0, 2))
