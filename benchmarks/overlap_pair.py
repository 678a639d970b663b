"""A target and a drafter of about equal cost on one machine, trained one after the other and side by side.

The target's depth is chosen so that one batch takes it as long as the drafter's step takes: the case in which overlap can
give most, and the one that a good split of devices aims at.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from dflash.config import Config, parse_config
from dflash.data.reader import Batch
from dflash.records import PlannedBatch
from dflash.train.features import FeatureBatch, make_maker
from dflash.train.group import Alone
from dflash.train.models import Models, load_models
from dflash.train.replica import FeatureSupply
from dflash.train.step import Stepper, Update

VOCAB_SIZE = 8192
MASK_TOKEN_ID = VOCAB_SIZE - 1
WIDTH = 256
SEQUENCES = 2
TOKENS = 256
TRIAL_LAYERS = 10
MAX_LAYERS = 40
CALIBRATION_STEPS = 5
LR = 1e-4

CONFIG = """
run: {{name: overlap, root: {root}}}
target: {{path: {target}, mask_token_id: {mask}}}
drafter:
  num_hidden_layers: 2
  hidden_size: 256
  intermediate_size: 768
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 64
  block_size: 16
  target_layer_ids: [1, {last_tap}]
  max_position_embeddings: 1024
data: {{source: synthetic, num_conversations: 10, max_length_tokens: 256, bucket_edges_tokens: [256]}}
plan: {{tokens_per_batch: 1024}}
train:
  anchors: {{per_supervised_token: 1.0, max_per_sequence: 32, max_per_batch: 256}}
"""


class OverlapPair:
    """The two models and the batches they train on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._load(TRIAL_LAYERS)

    def calibrate(self) -> tuple[float, float]:
        """Choose the target's depth; returns the seconds that target and drafter then take for a batch."""
        target_s, drafter_s = self._costs()
        # The layer after the last tap never runs.
        layers = max(4, min(MAX_LAYERS, 1 + round((TRIAL_LAYERS - 1) * drafter_s / target_s)))
        self._load(layers)
        return self._costs()

    def sequential(self, steps: int) -> float:
        """Seconds for `steps` batches, target and drafter taking turns."""
        begin_s = time.perf_counter()
        for batch in _batches(steps):
            self._step(self._maker.make(batch))
        return time.perf_counter() - begin_s

    def pipelined(self, steps: int) -> tuple[float, float]:
        """Seconds for the same through the pipeline, filling it included, and of them those that the drafter waited."""
        supply: FeatureSupply[Batch, FeatureBatch] = FeatureSupply(
            _batches(steps), makers=[self._maker.make], threads=1, queues=self._config.train.queues
        )
        begin_s, waited_s = time.perf_counter(), 0.0
        supply.start()
        for _ in range(steps):
            features, wait_s = supply.next()
            waited_s += wait_s
            self._step(features)
        wall_s = time.perf_counter() - begin_s
        supply.shut_down()
        return wall_s, waited_s

    def repeated_step(self) -> Callable[[], None]:
        """A drafter's step on one fixed batch."""
        features = self._maker.make(next(_batches(1)))
        self._step(features)
        return lambda: self._step(features)

    def one_update(self) -> tuple[Update, list[FeatureBatch]]:
        """What one step gives the log."""
        features = self._maker.make(next(_batches(1)))
        self._stepper.accumulate(features)
        return self._stepper.update(lr=LR, norm_limit=math.inf), [features]

    def _load(self, layers: int) -> None:
        self._config = _config(self._folder, layers)
        self._models: Models = load_models(self._config)
        self._models.drafter.init_weights(0)
        self._maker = make_maker(
            target=self._models.targets[0],
            target_index=0,
            config=self._config,
            mask_token_id=MASK_TOKEN_ID,
            drafter_device=self._models.device,
            dtype=self._models.compute_dtype,
        )
        self._stepper = Stepper(
            self._models.drafter,
            self._models.optimizer,
            head=self._models.head(),
            loss=self._config.train.loss,
            clip_norm=self._config.train.clip_norm,
            autocast_dtype=None,
            group=Alone(),
        )

    def _step(self, features: FeatureBatch) -> None:
        self._stepper.accumulate(features)
        self._stepper.update(lr=LR, norm_limit=math.inf)

    def _costs(self) -> tuple[float, float]:
        batch = next(_batches(1))
        features = self._maker.make(batch)
        self._step(features)
        return _median_s(lambda: self._maker.make(batch)), _median_s(lambda: self._step(features))


def _median_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(CALIBRATION_STEPS):
        begin_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def _config(folder: Path, layers: int) -> Config:
    disable_progress_bar()
    target = folder / f"target-{layers}"
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * TOKENS,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(shape).float().save_pretrained(target, safe_serialization=True)
    text = CONFIG.format(root=json.dumps(str(folder)), target=json.dumps(str(target)), mask=MASK_TOKEN_ID, last_tap=layers - 2)
    return parse_config(text, origin="overlap", overrides=())


def _batches(count: int) -> Generator[Batch, None, None]:
    for number in range(count):
        generator = np.random.default_rng(number)
        yield Batch(
            planned=PlannedBatch(position=number, epoch=0, bucket=0, rows=tuple(range(SEQUENCES)), padded_length_tokens=TOKENS),
            input_ids=generator.integers(1, MASK_TOKEN_ID, (SEQUENCES, TOKENS), dtype=np.int64),
            loss_mask=np.ones((SEQUENCES, TOKENS), dtype=bool),
            lengths=np.full(SEQUENCES, TOKENS, dtype=np.int64),
        )
