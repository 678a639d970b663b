"""How much of a decoding iteration is spent outside both models, and what batching rows of different acceptance gives.

Target: Qwen3 form, 8 layers of width 256, vocabulary 32,000; drafter: 2 layers, block 16; fp32, CPU, one thread. Weights are
random, so a random drafter would never be right: the drafter does all of its work, then an oracle's drafts of known quality
take its place. `outside_frac` is the CPU time of an iteration outside the target's forward and the drafter's (its embedding
and the head over its slots included); `outside_frac_head_apart` counts the drafter's head as outside, too. The plain loop is the
common way of writing it on the library's own interface: hidden states of all layers, cumulative product, one `item()` a step.
The last two figures are a hybrid target's rollback, of the same size, by rerunning its mixers and by feeding the tokens again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import benchmark_parser, publish
from benchmarks.step_setting import MASK_ID, Setting
from dflash.config import DrafterConfig
from dflash.evaluate.decode import DecodeLimits, SpeculativeTrace, speculative_decode_batch
from dflash.evaluate.proposal import Committed, Joining, Proposal
from dflash.evaluate.proposers import DrafterProposer, OracleProposer
from dflash.model.drafter import Drafter
from dflash.model.generate import generate_batch
from dflash.model.sampling import GREEDY
from dflash.model.screened_head import ScreenedHead
from dflash.model.target import Target
from dflash.model.target_cache import TargetCache
from dflash.model.target_info import TargetInfo

NAME = "decode"
SETTING = Setting(tokens=0, anchors=0)
RIGHT_FRAC = 0.85
"""Chance of each draft to be right: about 5.5 tokens a verification."""
ROWS = 8


class SpoiledOracle:
    """The drafter's work, the oracle's drafts."""

    needs_features = True

    def __init__(self, drafter: DrafterProposer, oracle: OracleProposer) -> None:
        self._drafter, self._oracle = drafter, oracle
        self.max_drafts = drafter.max_drafts

    def begin(self, keys: Sequence[str]) -> None:
        """Start both."""
        self._drafter.begin(keys)
        self._oracle.begin(keys)

    def replace_rows(self, joining: Sequence[Joining]) -> None:
        """Rows join both."""
        self._drafter.replace_rows(joining)
        self._oracle.replace_rows(joining)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Drop rows of both."""
        self._drafter.select_rows(rows)
        self._oracle.select_rows(rows)

    def propose(self, committed: Committed) -> Proposal:
        """Draft with both, keep the oracle's."""
        self._drafter.propose(committed)
        return self.scripted(committed)

    def scripted(self, committed: Committed) -> Proposal:
        """The oracle's part, which no real decoding has."""
        return self._oracle.propose(committed)


class Meter:
    """CPU time inside of functions; what a metered function calls belongs to itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def around(self, owner: Any, name: str, label: str) -> None:
        """Meter a method from now on."""
        inner = getattr(owner, name)

        def metered(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return inner(*arguments, **named)
            self._inside = True
            begin_s = time.process_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.process_time() - begin_s
                self._inside = False

        setattr(owner, name, metered)


def main() -> int:
    """Run the benchmark; see `--help`."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    publish(NAME, measure(arguments), arguments)
    return 0


def build() -> tuple[Target, Drafter]:
    """The random target and drafter."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": SETTING.vocab, "hidden_size": SETTING.width, "intermediate_size": SETTING.intermediate,
        "num_attention_heads": SETTING.heads, "num_key_value_heads": SETTING.key_heads, "head_dim": SETTING.head_dim,
    }  # fmt: skip
    config = Qwen3Config(**shape, num_hidden_layers=SETTING.target_layers, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    info = TargetInfo("random", "0" * 64, "qwen3", SETTING.width, SETTING.target_layers, SETTING.vocab, SETTING.rope_theta, None, 0)
    target = Target(model, info=info, target_layer_ids=SETTING.taps)
    drafter_shape = {name: value for name, value in shape.items() if name != "vocab_size"}
    drafter = Drafter(
        DrafterConfig(
            **drafter_shape, num_hidden_layers=SETTING.layers, block_size=SETTING.block_size, target_layer_ids=SETTING.taps
        ),
        target_hidden_size=SETTING.width,
    )
    drafter.init_weights(1)
    return target, drafter.eval()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every figure, with the loops alternating."""
    target, drafter = build()
    tokens, rounds = (64, 3) if arguments.quick else (192, 9)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(MASK_ID + 1, SETTING.vocab, (96 + 8 * row,), generator=generator).tolist() for row in range(ROWS)]
    keys = [f"row {row}" for row in range(ROWS)]
    answers = generate_batch(target, prompts, keys=keys, max_new_tokens=tokens + 16, temperature=0.0, seed=0, stop_ids=())
    oracle = OracleProposer(
        target, dict(zip(keys, answers, strict=True)), {key: len(prompt) for key, prompt in zip(keys, prompts, strict=True)},
        max_drafts=SETTING.block_size - 1, right_frac=RIGHT_FRAC, seed=3,
    )  # fmt: skip
    proposer = SpoiledOracle(
        DrafterProposer(target, drafter, block_size=SETTING.block_size, mask_token_id=MASK_ID, drawing=GREEDY), oracle
    )
    limits = DecodeLimits(tokens, frozenset())
    meter = Meter()
    meter.around(target, "prefill", "prefill")
    meter.around(target.model, "forward", "target")
    meter.around(drafter, "draft", "drafter")
    meter.around(target, "embed", "drafter")
    meter.around(target, "logits", "head")
    meter.around(ScreenedHead, "argmax", "head")
    meter.around(oracle, "propose", "oracle")

    def decode(rows: Sequence[int]) -> list[SpeculativeTrace]:
        return speculative_decode_batch(
            target, proposer, [prompts[row] for row in rows], keys=[keys[row] for row in rows], limits=limits, sampling=GREEDY,
            rollback=target.keep,
        )  # fmt: skip

    def ours() -> int:
        (trace,) = decode([0])
        assert list(trace.tokens) == answers[0][:tokens]
        return len(trace.verifications)

    def common() -> int:
        oracle.begin(keys[:1])
        found, verifications = common_loop(target, drafter, oracle, prompts[0], tokens)
        assert found == answers[0][:tokens]
        return verifications

    ours(), common()
    shares: dict[str, list[dict[str, float]]] = {"ours": [], "common": []}
    for _ in range(rounds):
        for name, loop in (("ours", ours), ("common", common)):
            shares[name].append(split(meter, loop))
    figures: dict[str, Any] = {"tokens_per_verification": (tokens - 1) / ours()}
    for name, prefix in (("ours", ""), ("common", "common_loop_")):
        for key in ("outside_frac", "outside_frac_head_apart", "iteration_ms"):
            figures[prefix + key] = statistics.median(share[key] for share in shares[name])
    spread = [share["outside_frac"] for share in shares["ours"]]
    figures["outside_frac_spread"] = [min(spread), max(spread)]
    figures["iteration_vs_common"] = figures["iteration_ms"] / figures["common_loop_iteration_ms"]
    batched = [
        throughput(decode, answers, tokens, together=together) for _ in range(max(1, rounds // 3)) for together in (True, False)
    ]
    figures["batch_rows"] = ROWS
    figures["batched_vs_single_throughput"] = statistics.median(batched[::2]) / statistics.median(batched[1::2])
    return figures | rollback_cost(rounds)


def rollback_cost(rounds: int) -> dict[str, float]:
    """CPU time of rolling a hybrid target back to 5 of 16 tokens, as a share of the verification's forward."""
    torch.manual_seed(0)
    shape = {name: getattr(SETTING, name) for name in ("head_dim",)}
    config = Qwen3_5TextConfig(
        **shape, vocab_size=SETTING.vocab, hidden_size=SETTING.width, intermediate_size=SETTING.intermediate,
        num_attention_heads=SETTING.heads, num_key_value_heads=SETTING.key_heads, num_hidden_layers=SETTING.target_layers,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    info = TargetInfo("random", "0" * 64, "qwen3_5", SETTING.width, SETTING.target_layers, SETTING.vocab, None, None, 0)
    target = Target(Qwen3_5ForCausalLM(config), info=info, target_layer_ids=SETTING.taps)
    assert target.replays_mixers
    ids = torch.randint(SETTING.vocab, (1, SETTING.block_size), generator=torch.Generator().manual_seed(4))
    recipe = target.new_cache().recipe
    ways = {"rollback_by_mixers_frac": recipe, "rollback_by_feeding_again_frac": replace(recipe, mixers=None)}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            cache = TargetCache(way)
            target.logits_cached(ids.repeat(1, 8), cache)
            begin_s = time.process_time()
            target.logits_cached(ids, cache)
            fed_s = time.process_time()
            target.keep(cache, [5])
            shares[name].append((time.process_time() - fed_s) / (fed_s - begin_s))
    return {name: statistics.median(found[1:]) for name, found in shares.items()}


def split(meter: Meter, loop: Callable[[], int]) -> dict[str, float]:
    """Where the CPU time of an iteration goes."""
    meter.seconds.clear()
    begin_s = time.process_time()
    verifications = loop()
    spent = meter.seconds
    total_s = time.process_time() - begin_s - spent["prefill"] - spent["oracle"]
    inside_s = spent["target"] + spent["drafter"]
    return {
        "outside_frac": (total_s - inside_s - spent["head"]) / total_s,
        "outside_frac_head_apart": (total_s - inside_s) / total_s,
        "iteration_ms": 1e3 * total_s / verifications,
    }


def throughput(
    decode: Callable[[Sequence[int]], list[SpeculativeTrace]], answers: list[list[int]], tokens: int, *, together: bool
) -> float:
    """Tokens a CPU second, all rows in one batch or one after the other."""
    begin_s = time.process_time()
    groups = [list(range(ROWS))] if together else [[row] for row in range(ROWS)]
    traces = [trace for group in groups for trace in decode(group)]
    seconds = time.process_time() - begin_s
    assert all(list(trace.tokens) == answer[:tokens] for trace, answer in zip(traces, answers, strict=True))
    return ROWS * tokens / seconds


@torch.inference_mode()
def common_loop(target: Target, drafter: Drafter, oracle: OracleProposer, prompt: list[int], tokens: int) -> tuple[list[int], int]:
    """The usual loop on the library's interface; the prefill counts as one here as well."""
    model, head, embed = target.model, target.logits, target.embed
    cache = DynamicCache(config=model.config)
    ids = torch.full((1, len(prompt) + tokens + 2 * SETTING.block_size), MASK_ID)
    ids[0, : len(prompt)] = torch.tensor(prompt)
    positions = torch.arange(ids.shape[1])[None]
    logits, taps, _ = target.prefill([prompt], with_taps=True)
    model(input_ids=ids[:, : len(prompt)], position_ids=positions[:, : len(prompt)], cache=cache, use_cache=True, logits_to_keep=1)
    start, verifications = len(prompt), 0
    ids[0, start] = logits.argmax(-1)
    context = drafter.new_cache()
    stop = torch.tensor([-1])
    while start < len(prompt) + tokens - 1:
        block = torch.cat((ids[:, start : start + 1], torch.full((1, SETTING.block_size - 1), MASK_ID)), dim=1)
        draft_logits = head(drafter.draft(embed(block), taps, context, start)[:, 1:])
        block[:, 1:] = draft_logits.argmax(-1)
        text = ids[0, : start + 1].tolist()
        block[:, 1:] = oracle.propose(Committed([text], block[:, :1], None, [0])).tokens
        output = model(
            input_ids=block, position_ids=positions[:, start : start + SETTING.block_size], cache=cache, use_cache=True,
            output_hidden_states=True,
        )  # fmt: skip
        posterior = output.logits.argmax(-1)
        accepted = int((block[:, 1:] == posterior[:, :-1]).cumprod(dim=1).sum(dim=1)[0].item())
        ids[:, start : start + accepted + 1] = block[:, : accepted + 1]
        ids[:, start + accepted + 1] = posterior[:, accepted]
        cache.crop(-(SETTING.block_size - accepted - 1))
        taps = torch.cat([output.hidden_states[layer + 1] for layer in SETTING.taps], dim=-1)[:, : accepted + 1]
        start += accepted + 1
        verifications += 1
        if torch.isin(ids[0, len(prompt) :], stop).any():
            break
    return ids[0, len(prompt) : len(prompt) + tokens].tolist(), verifications


if __name__ == "__main__":
    raise SystemExit(main())
