"""AdamW against Muon (`train.optimizer.kind`: matrices by Muon, the rest by AdamW) on the demo's drafter, equal steps.

Both see the same features of the same batches in the same order, take turns step by step in one process, and have the demo's
schedule, clipping and objective. First each one's peak learning rate is chosen among several by a shorter training, so that
neither is judged at the other's; then both train in full with several seeds and decode the same held-out prompts.
Needs a run whose data and plan are there (`make demo`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import Config
from dflash.data.reader import Batch, collate
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.decode import DecodeLimits, plain_decode
from dflash.evaluate.run import evaluate_candidates
from dflash.model.drafter import Drafter
from dflash.model.head import FrozenHead
from dflash.model.loss import block_loss
from dflash.records import PlannedBatch
from dflash.stages.evaluate import EvaluationBench, open_bench
from dflash.stages.run import list_runs, reopen_run
from dflash.train.features import FeatureBatch, FeatureMaker, make_maker
from dflash.train.group import Alone
from dflash.train.inputs import Inputs, open_inputs
from dflash.train.optimizer import build_optimizer
from dflash.train.schedule import lr_at
from dflash.train.step import Stepper

NAME = "optimizers"
KINDS = ("adamw", "muon")
RATES = {"adamw": (3e-3, 6e-3, 1.2e-2), "muon": (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)}
SCAN_STEPS = 500
SEEDS = (20260, 20261, 20262)
END_STEPS = 100
HELD_OUT_BATCH = 16


@dataclass(slots=True)
class Contestant:
    """One drafter in training; `seconds`: CPU time of its steps."""

    kind: str
    drafter: Drafter
    stepper: Stepper
    config: Config
    ce: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def train(self, batch: FeatureBatch, *, steps: int) -> None:
        """One optimizer step."""
        lr = lr_at(self.config.train, step=len(self.ce), total_steps=steps, lr_scale=1.0)
        begin_s = time.process_time()
        self.stepper.accumulate(batch)
        update = self.stepper.update(lr=lr, norm_limit=math.inf)
        self.seconds += time.process_time() - begin_s
        self.ce.append(update.ce)


@dataclass(frozen=True, slots=True)
class Ground:
    """What all trainings share."""

    inputs: Inputs
    bench: EvaluationBench
    head: FrozenHead

    def config(self, seed: int, lr: float) -> Config:
        """The run's configuration with another seed and peak rate."""
        config = self.inputs.config
        return config.model_copy(
            update={
                "run": config.run.model_copy(update={"seed": seed}),
                "train": config.train.model_copy(update={"lr": lr}),
            }
        )

    def contestant(self, kind: str, *, seed: int, lr: float) -> Contestant:
        """An untrained drafter with its optimizer."""
        config = self.config(seed, lr)
        drafter = Drafter(config.drafter, target_hidden_size=self.bench.target.info.hidden_size)
        drafter.init_weights(seed)
        stepper = Stepper(
            drafter,
            build_optimizer(drafter, config.train.optimizer.model_copy(update={"kind": kind}), lr=lr),
            head=self.head,
            loss=config.train.loss,
            clip_norm=config.train.clip_norm,
            autocast_dtype=None,
            group=Alone(),
        )
        return Contestant(kind, drafter, stepper, config)

    def maker(self, seed: int) -> FeatureMaker:
        """Features with the anchors of a seed."""
        return make_maker(
            target=self.bench.target,
            target_index=0,
            config=self.config(seed, 1.0),
            mask_token_id=self.bench.manifest.mask_token_id,
            drafter_device=torch.device("cpu"),
            dtype=torch.float32,
        )

    def features(self, seed: int, steps: int) -> Iterator[FeatureBatch]:
        """The batches of a training, in the order of the plan."""
        maker = self.maker(seed)
        for position in range(steps):
            yield maker.make(collate(self.inputs.plan[position], self.inputs.store, pad_id=0))

    def held_out(self) -> list[FeatureBatch]:
        """The held-out prompts with the target's own answers, as batches; the answers are what counts."""
        settings, target = self.inputs.config.evaluate, self.bench.target
        limits = DecodeLimits(settings.max_new_tokens, frozenset(self.bench.stop_ids))
        texts = [(one.prompt_ids, plain_decode(target, one.prompt_ids, limits=limits).tokens) for one in self.bench.prompts]
        return [
            _batch(self.maker(SEEDS[0]), texts[start : start + HELD_OUT_BATCH], number)
            for number, start in enumerate(range(0, len(texts), HELD_OUT_BATCH))
        ]

    def ce(self, drafter: Drafter, batches: Sequence[FeatureBatch]) -> float:
        """Plain mean cross-entropy a predicted token."""
        total, tokens = 0.0, 0
        for batch in batches:
            hidden = drafter(batch.features, batch.block_embeds, batch.anchors.positions, batch.anchors.keep)
            sums = block_loss(hidden, batch.labels, batch.anchors.keep, self.head, loss=self.inputs.config.train.loss, target=None)
            total += float(sums.ce_sum)
            tokens += sums.n_tokens
        return total / tokens


def _batch(maker: FeatureMaker, texts: Sequence[tuple[Sequence[int], Sequence[int]]], number: int) -> FeatureBatch:
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in texts], dtype=np.int64)
    ids = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for row, (prompt, answer) in enumerate(texts):
        ids[row, : lengths[row]] = (*prompt, *answer)
        mask[row, len(prompt) : lengths[row]] = True
    planned = PlannedBatch(position=number, epoch=0, bucket=0, rows=tuple(range(len(texts))), padded_length_tokens=ids.shape[1])
    return maker.make(Batch(planned=planned, input_ids=ids, loss_mask=mask, lengths=lengths))


@contextmanager
def open_ground(run_dir: Path | None) -> Iterator[Ground]:
    """Data, plan, target and prompts of a run; of the newest one under runs/ if none is named."""
    folder = run_dir or max(list_runs(ROOT / "runs"), key=lambda found: (found / "config.yaml").stat().st_mtime)
    run = reopen_run(folder)
    bench, inputs = open_bench(run), open_inputs(run.config, run.paths)
    with inputs.store:
        yield Ground(inputs, bench, FrozenHead(bench.target.head_weight.detach(), bench.target.logit_rule))


def run_on_ground(name: str, description: str, figures: Callable[[Ground, argparse.Namespace], dict[str, Any]]) -> int:
    """Run a benchmark that trains on a run's data, as its command line says; returns the exit code."""
    parser = benchmark_parser(description)
    parser.add_argument("--run", type=Path, help="run folder with data and plan; the newest under runs/ if absent")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open_ground(arguments.run) as ground:
        publish(name, figures(ground, arguments), arguments)
    return 0


def main() -> int:
    """Run the benchmark; see `--help`."""
    return run_on_ground(NAME, __doc__ or "", _figures)


def _figures(ground: Ground, arguments: argparse.Namespace) -> dict[str, Any]:
    total = min(len(ground.inputs.plan), ground.inputs.config.train.max_steps or len(ground.inputs.plan))
    scan_steps, steps, seeds = (20, 30, SEEDS[:1]) if arguments.quick else (SCAN_STEPS, total, SEEDS)
    figures: dict[str, Any] = {"steps": steps, "seeds": len(seeds), "scan_steps": scan_steps}
    best = _scan(ground, scan_steps, figures)
    held_out = ground.held_out()
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in seeds:
        pair = [ground.contestant(kind, seed=seed, lr=best[kind]) for kind in KINDS]
        for batch in ground.features(seed, steps):
            for contestant in pair:
                contestant.train(batch, steps=steps)
        for contestant, row in zip(pair, _measure(ground, pair, held_out, quick=arguments.quick), strict=True):
            rows[contestant.kind].append(row)
            print(seed, contestant.kind, row, file=sys.stderr, flush=True)
    for kind, found in rows.items():
        for key in found[0]:
            figures[f"{kind}_{key}"] = round(statistics.fmean(row[key] for row in found), 4)
            figures[f"{kind}_{key}_each"] = [round(row[key], 4) for row in found]
    figures["muon_cpu_over_adamw"] = round(figures["muon_cpu_s"] / figures["adamw_cpu_s"], 3)
    return figures


def _scan(ground: Ground, steps: int, figures: dict[str, Any]) -> dict[str, float]:
    """The peak rate of each kind with the lowest loss at the end of a shorter training."""
    everyone = [ground.contestant(kind, seed=SEEDS[0], lr=lr) for kind in KINDS for lr in RATES[kind]]
    for batch in ground.features(SEEDS[0], steps):
        for contestant in everyone:
            contestant.train(batch, steps=steps)
    ends = {(one.kind, one.config.train.lr): statistics.fmean(one.ce[-END_STEPS:]) for one in everyone}
    figures["scan_ce"] = {f"{kind} {lr:g}": round(ce, 4) for (kind, lr), ce in ends.items()}
    print(figures["scan_ce"], file=sys.stderr, flush=True)
    return {kind: min(RATES[kind], key=lambda lr: ends[kind, lr]) for kind in KINDS}


def _measure(
    ground: Ground, pair: Sequence[Contestant], held_out: Sequence[FeatureBatch], *, quick: bool
) -> list[dict[str, float]]:
    """What each of the trained drafters is worth on prompts that nobody trained on."""
    bench, settings = ground.bench, ground.inputs.config.evaluate
    candidates = [
        drafter_candidate(
            bench.target,
            one.drafter.eval(),
            block_size=settings.block_size,
            mask_token_id=bench.manifest.mask_token_id,
            label=one.kind,
            step=len(one.ce),
        )
        for one in pair
    ]
    prompts = bench.prompts[:3] if quick else bench.prompts
    evaluations = evaluate_candidates(
        bench.target, candidates, prompts, evaluate=settings, stop_ids=bench.stop_ids, progress=lambda *_: None
    )
    return [
        {
            "acceptance_length": found.result.acceptance_length,
            "held_out_ce": ground.ce(one.drafter, held_out),
            "final_train_ce": statistics.fmean(one.ce[-END_STEPS:]),
            "cpu_s": one.seconds,
        }
        for one, found in zip(pair, evaluations, strict=True)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
