"""How many more tokens a second decoding gives with eight rows at once, and how much of it is spent outside the models.

CPU time of one thread, prefill left out, all ways alternating in one run. Two scenes: `demo` is the shipped target on its own
held-out prompts, whose answers differ in length (10 to 128 tokens): where one has ended the next prompt joins. `wide` is a random
target of Qwen3 form, 8 layers of width 256 and 32,000 tokens of vocabulary. The drafter does all of its work with random weights
and an oracle's drafts of known quality take its place. `outside_frac` is what an iteration spends outside the target's forward, the
drafter's, and the head over its slots.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decode import SETTING, Meter, SpoiledOracle, build
from benchmarks.report import ROOT, benchmark_parser, publish
from benchmarks.step_setting import MASK_ID
from dflash.config import load_config
from dflash.data.conversations import synthetic_conversations
from dflash.data.render import ChatRenderer
from dflash.data.tokenizer import load_tokenizer, stop_token_ids
from dflash.evaluate import proposers
from dflash.evaluate.decode import DecodeLimits, PlainTrace, SpeculativeTrace, plain_decode_batch, speculative_decode_batch
from dflash.evaluate.proposers import DrafterProposer, OracleProposer
from dflash.model.drafter import Drafter
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY
from dflash.model.screened_head import ScreenedHead
from dflash.model.target import Target, load_target

NAME = "decode_throughput"
RIGHT_FRAC = 0.85
ROWS = 8
HEADROOM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Scene:
    """A target with its drafter, prompts, and what it answers to them."""

    target: Target
    proposer: SpoiledOracle
    drafter: Drafter
    prompts: list[list[int]]
    keys: list[str]
    answers: list[list[int]]
    limits: DecodeLimits


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    publish(NAME, measure(arguments), arguments)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both scenes, one after the other."""
    demo, wide, rounds = (12, 8, 1) if arguments.quick else (64, 32, 3)
    figures: dict[str, Any] = {"rows": ROWS, "rounds": rounds}
    for name, scene in (("demo", demo_scene(demo)), ("wide", wide_scene(wide, tokens=24 if arguments.quick else 64))):
        figures |= {f"{name}_{key}": value for key, value in measured(scene, rounds).items()}
    return figures


def demo_scene(prompts: int) -> Scene:
    """The shipped target and the questions that it was not trained on."""
    config = load_config(ROOT / "configs" / "demo.yaml")
    tokenizer = load_tokenizer(config.target)
    target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=torch.device("cpu"))
    drafter = Drafter(config.drafter, target_hidden_size=target.info.hidden_size)
    drafter.init_weights(1)
    renderer = ChatRenderer(
        tokenizer,
        supervise=config.data.supervise,
        supervise_reasoning=config.data.supervise_reasoning,
        template_flags=config.data.template_flags,
    )
    system = config.data.system_prompt
    chats = synthetic_conversations(seed=config.evaluate.seed, count=prompts, split="heldout", system_prompt=system)
    asked = [list(renderer.prompt_ids(chat.messages[:-1], chat.tools)) for chat in chats]
    limits = DecodeLimits(config.evaluate.max_new_tokens, frozenset(stop_token_ids(tokenizer, config.target)))
    mask = tokenizer.convert_tokens_to_ids(config.target.mask_token)
    return _scene(target, drafter.eval(), asked, limits, mask_token_id=int(mask))


def wide_scene(prompts: int, *, tokens: int) -> Scene:
    """The random target; some tokens of its answers end them, so that they differ in length."""
    target, drafter = build()
    generator = torch.Generator().manual_seed(2)
    asked = [
        torch.randint(MASK_ID + 1, SETTING.vocab, (96 + 8 * (row % 8),), generator=generator).tolist() for row in range(prompts)
    ]
    keys = [f"row {row}" for row in range(prompts)]
    free = generate_batch(target, asked, keys=keys, max_new_tokens=tokens, temperature=0.0, seed=0, stop_ids=())
    ends = {answer[(row % 4 + 1) * tokens // 4 - 1] for row, answer in enumerate(free)}
    return _scene(target, drafter, asked, DecodeLimits(tokens, frozenset(ends)), mask_token_id=MASK_ID)


def measured(scene: Scene, rounds: int) -> dict[str, Any]:
    """Figures of a scene: medians over the rounds, and the spread of the two that have goals."""
    meter = Meter()
    for owner, name, label in (
        (scene.target, "prefill", "prefill"),
        (scene.target.model, "forward", "target"),
        (scene.drafter, "draft", "drafter"),
        (proposers, "draft_ragged", "drafter"),
        (proposers, "refill_ragged", "drafter"),
        (scene.target, "embed", "drafter"),
        (scene.target, "logits", "head"),
        (ScreenedHead, "argmax", "head"),
        (scene.proposer, "scripted", "oracle"),
    ):
        meter.around(owner, name, label)
    ways: dict[str, Callable[[], Sequence[PlainTrace] | Sequence[SpeculativeTrace]]] = {
        f"{kind}_{rows}": _way(scene, kind, rows) for kind in ("plain", "drafted") for rows in (1, ROWS)
    }
    for way in ways.values():
        way()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(_spent(scene, meter, way))
    gains = {kind: _ratios(found[f"{kind}_{ROWS}"], found[f"{kind}_1"]) for kind in ("plain", "drafted")}
    both = _ratios(found[f"drafted_{ROWS}"], found["plain_1"])
    lengths = sorted(len(answer) for answer in scene.answers)
    return {
        "prompts": len(scene.prompts),
        "answer_tokens": [lengths[0], int(statistics.median(lengths)), lengths[-1]],
        "batched_vs_single_drafted": statistics.median(gains["drafted"]),
        "batched_vs_single_drafted_spread": [min(gains["drafted"]), max(gains["drafted"])],
        "batched_vs_single_plain": statistics.median(gains["plain"]),
        "batched_drafted_vs_single_plain": statistics.median(both),
        "single_outside_frac": statistics.median(one["outside_frac"] for one in found["drafted_1"]),
        "batched_outside_frac": statistics.median(one["outside_frac"] for one in found[f"drafted_{ROWS}"]),
        "batched_outside_frac_worst": max(one["outside_frac"] for one in found[f"drafted_{ROWS}"]),
        "single_drafted_tokens_per_cpu_s": statistics.median(one["tokens_per_s"] for one in found["drafted_1"]),
        "batched_drafted_tokens_per_cpu_s": statistics.median(one["tokens_per_s"] for one in found[f"drafted_{ROWS}"]),
    }


def _scene(target: Target, drafter: Drafter, asked: list[list[int]], limits: DecodeLimits, *, mask_token_id: int) -> Scene:
    keys = [f"row {row}" for row in range(len(asked))]
    known = generate_batch(
        target, asked, keys=keys, max_new_tokens=limits.max_new_tokens + HEADROOM_TOKENS, temperature=0.0, seed=0, stop_ids=()
    )  # fmt: skip
    lengths = {key: len(ids) for key, ids in zip(keys, asked, strict=True)}
    block = drafter.config.block_size
    oracle = OracleProposer(
        target, dict(zip(keys, known, strict=True)), lengths, max_drafts=block - 1, right_frac=RIGHT_FRAC, seed=3
    )  # fmt: skip
    own = DrafterProposer(target, drafter, block_size=block, mask_token_id=mask_token_id, drawing=GREEDY)
    answers = [answer[: limits.reaching(answer, have=0)[0]] for answer in known]
    return Scene(target, SpoiledOracle(own, oracle), drafter, asked, keys, answers, limits)


def _way(scene: Scene, kind: str, rows: int) -> Callable[[], Sequence[PlainTrace] | Sequence[SpeculativeTrace]]:
    settings: dict[str, Any] = {"keys": scene.keys, "limits": scene.limits, "sampling": GREEDY, "rows": rows}
    if kind == "plain":
        return lambda: plain_decode_batch(scene.target, scene.prompts, **settings)
    return lambda: speculative_decode_batch(
        scene.target, scene.proposer, scene.prompts, rollback=scene.target.keep, **settings
    )  # fmt: skip


def _spent(scene: Scene, meter: Meter, way: Callable[[], Sequence[PlainTrace] | Sequence[SpeculativeTrace]]) -> dict[str, float]:
    """Where one pass over all prompts spends its CPU time; the answers are checked."""
    meter.seconds.clear()
    begin_s = time.process_time()
    traces = way()
    spent = meter.seconds
    total_s = time.process_time() - begin_s - spent["prefill"] - spent.get("oracle", 0.0)
    assert [list(trace.tokens) for trace in traces] == scene.answers
    inside_s = sum(spent.get(name, 0.0) for name in ("target", "drafter", "head"))
    tokens = sum(len(trace.tokens) - 1 for trace in traces)
    return {"tokens_per_s": tokens / total_s, "outside_frac": (total_s - inside_s) / total_s}


def _ratios(ours: list[dict[str, float]], others: list[dict[str, float]]) -> list[float]:
    return [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(ours, others, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
