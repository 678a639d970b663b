"""What the feature cache saves: seconds of a training step that computes the target's features, and of one that reads them.

SmolLM2 and the drafter of configs/smollm2.yaml (`python -m dflash data fetch-target smollm2` first), batches of two sequences of
256 random tokens, through the trainer's own pipeline on as many cores as there are. `computed` is a first epoch without a
cache, `filling` one that stores as well, `cached` any later one; each with one torch thread and with two. Every variant is a
process of its own; they take turns, so what slows the machine slows all. A full run takes about ten minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import ROOT, benchmark_parser, publish
from dflash.config import Config, load_config
from dflash.data.reader import Batch
from dflash.records import PlannedBatch
from dflash.train.feature_cache import FeatureCache
from dflash.train.features import FeatureMaker, make_maker, states_width
from dflash.train.group import Alone
from dflash.train.models import Models, load_models
from dflash.train.replica import FeatureSupply
from dflash.train.step import Stepper

NAME = "feature_cache"
VARIANTS = ("computed", "filling", "cached")
THREADS = (1, 2)
SEQUENCES = 2
TOKENS = 256
ANSWER_BEGIN = 96
WARM_STEPS = 2
LR = 1e-4


def main() -> int:
    """Run the benchmark; see `--help`."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14, help="timed steps of every variant and round")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant is not None:
        print(json.dumps(_measure(arguments.variant, arguments.threads, arguments.steps, arguments.folder)))
        return 0
    rounds, steps = (1, 3) if arguments.quick else (arguments.rounds, arguments.steps)
    threads = THREADS[:1] if arguments.quick else THREADS
    seconds: dict[str, list[float]] = {f"{variant}_{count}": [] for count in threads for variant in VARIANTS}
    for _ in range(rounds):
        for count in threads:
            with tempfile.TemporaryDirectory() as folder:
                for variant in VARIANTS:
                    seconds[f"{variant}_{count}"].append(_in_process(variant, count, steps, folder))
    publish(NAME, _figures(seconds, threads), arguments)
    return 0


def _in_process(variant: str, threads: int, steps: int, folder: str) -> float:
    command = [sys.executable, "-m", "benchmarks.feature_cache", "--variant", variant, "--threads", str(threads)]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--folder", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


def _figures(seconds: dict[str, list[float]], threads: tuple[int, ...]) -> dict[str, Any]:
    figures: dict[str, Any] = {f"step_s.{name}_threads": round(statistics.median(values), 3) for name, values in seconds.items()}
    for count in threads:
        for variant in ("filling", "cached"):
            pairs = zip(seconds[f"{variant}_{count}"], seconds[f"computed_{count}"], strict=True)
            figures[f"{variant}_to_computed.{count}_threads"] = round(statistics.median(own / other for own, other in pairs), 3)
    best = [min(statistics.median(seconds[f"{variant}_{count}"]) for count in threads) for variant in ("cached", "computed")]
    return figures | {"best_cached_to_best_computed": round(best[0] / best[1], 3)}


def _measure(variant: str, threads: int, steps: int, folder: Path) -> dict[str, float]:
    torch.set_num_threads(threads)
    config = load_config(
        str(ROOT / "configs" / "smollm2.yaml"), overrides=("data.files=[none.jsonl]", "evaluate.files=[none.jsonl]")
    )
    models = load_models(config)
    models.drafter.init_weights(0)
    maker = _maker(config, models)
    if variant != "computed":
        count = (WARM_STEPS + steps) * SEQUENCES
        cache = FeatureCache(
            folder,
            lengths=np.full(count, TOKENS, np.int32),
            width=states_width(config, maker.target),
            dtype=models.compute_dtype,
            max_bytes=2**40,
        )
        maker = dataclasses.replace(maker, cache=cache)
    return {"step_s": _train(config, models, maker, steps=steps)}


def _train(config: Config, models: Models, maker: FeatureMaker, *, steps: int) -> float:
    """Seconds of a step in the steady pipeline."""
    stepper = Stepper(
        models.drafter,
        models.optimizer,
        head=models.head(),
        loss=config.train.loss,
        clip_norm=config.train.clip_norm,
        autocast_dtype=None,
        group=Alone(),
    )
    supply = FeatureSupply(
        _batches(WARM_STEPS + steps, mask_token_id=maker.mask_token_id), makers=[maker.make], threads=1, queues=config.train.queues
    )
    supply.start()
    begin_s = 0.0
    for number in range(WARM_STEPS + steps):
        if number == WARM_STEPS:
            begin_s = time.perf_counter()
        features, _ = supply.next()
        stepper.accumulate(features)
        stepper.update(lr=LR, norm_limit=math.inf)
    spent_s = time.perf_counter() - begin_s
    supply.shut_down()
    return spent_s / steps


def _maker(config: Config, models: Models) -> FeatureMaker:
    return make_maker(
        target=models.targets[0],
        target_index=0,
        config=config,
        mask_token_id=int(config.target.mask_token_id or 0),
        drafter_device=models.device,
        dtype=models.compute_dtype,
    )


def _batches(count: int, *, mask_token_id: int) -> Generator[Batch, None, None]:
    draw = np.random.default_rng(0)
    for number in range(count):
        loss_mask = np.zeros((SEQUENCES, TOKENS), np.bool_)
        loss_mask[:, ANSWER_BEGIN:] = True
        rows = tuple(range(number * SEQUENCES, (number + 1) * SEQUENCES))
        yield Batch(
            PlannedBatch(position=number, epoch=0, bucket=0, padded_length_tokens=TOKENS, rows=rows),
            draw.integers(mask_token_id + 1, 40_000, (SEQUENCES, TOKENS)),
            loss_mask,
            np.full(SEQUENCES, TOKENS, np.int64),
        )


if __name__ == "__main__":
    raise SystemExit(main())
