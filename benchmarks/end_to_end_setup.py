"""The work of `end_to_end.py`, made once and read by all systems: the demo's, and one of the sizes of `train_step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.end_to_end_worker import setting_text
from benchmarks.step_setting import GAMMA, LR, MASK_ID, SETTINGS, Setting, draw_anchors, make_inputs
from benchmarks.system_process import SystemProcess
from dflash.config import AnchorConfig, Config, DrafterConfig, ProbeConfig
from dflash.data.conversations import synthetic_conversations
from dflash.data.render import ChatRenderer
from dflash.data.tokenizer import load_tokenizer, resolve_mask_token_id, stop_token_ids
from dflash.evaluate.candidates import drafter_candidate
from dflash.evaluate.probe import probe_drafter
from dflash.evaluate.prompts import EvalPrompt
from dflash.model.anchors import sample_anchors
from dflash.model.drafter import Drafter
from dflash.model.generate import generate_batch
from dflash.model.target import Target, load_target
from dflash.records import ProbeFigures
from dflash.train.schedule import lr_at

LARGE = "2x2048_64"
LARGE_BATCHES = 2
ANSWER_TOKENS = 96
SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done: chats, steps and held-out prompts of the demo; steps of the large size."""

    chats: int
    steps: int
    heldout: int
    large_steps: int


def training_loop(system: str, work: Path) -> SystemProcess:
    """A system that trains on work written here when it is asked, in a process of its own."""
    return SystemProcess("benchmarks.end_to_end_worker", system, ["--work", str(work)], environment={})


def write_large(path: Path, steps: int) -> list[int]:
    """Write steps of the large size, on random ids and features; returns the tokens of every step."""
    setting = SETTINGS[LARGE]
    inputs, generator = make_inputs(setting), torch.Generator().manual_seed(1)
    rows = (setting.batch, setting.tokens)
    tensors = {f"weights.{name}": tensor for name, tensor in inputs.weights.items()}
    tensors |= {"embedding": inputs.embedding, "head": inputs.head}
    for number in range(LARGE_BATCHES):
        tensors[f"ids.{number}"] = torch.randint(MASK_ID + 1, setting.vocab, rows, generator=generator)
        tensors[f"features.{number}"] = torch.randn(*rows, len(setting.taps) * setting.width, generator=generator)
        tensors[f"mask.{number}"] = torch.ones(rows, dtype=torch.bool)
        tensors[f"lengths.{number}"] = torch.full((setting.batch,), setting.tokens)
    for step in range(steps):
        tensors[f"anchors.{step}"] = draw_anchors(setting, generator)
        tensors[f"keep.{step}"] = torch.ones((setting.batch, setting.anchors), dtype=torch.bool)
    tensors |= {"lr": torch.full((steps,), LR, dtype=torch.float64), "order": torch.arange(steps) % LARGE_BATCHES}
    meta = {"setting": setting_text(setting), "mask_id": str(MASK_ID), "gamma": str(GAMMA), "batches": str(LARGE_BATCHES)}
    save_file(tensors, path, metadata=meta)
    return [setting.batch * setting.tokens] * steps


class Setup:
    """The demo's target, its answers and its drafter's shape."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(config.target)
        self._target: Target = load_target(
            config.target, target_layer_ids=config.drafter.target_layer_ids, device=torch.device("cpu")
        )
        self._stop_ids = stop_token_ids(self._tokenizer, config.target)
        self._mask_id = resolve_mask_token_id(config.target, self._tokenizer, vocab_size=self._target.info.vocab_size)
        self._renderer = ChatRenderer(self._tokenizer, supervise="all", supervise_reasoning=False, template_flags={})
        self._batches: list[dict[str, Tensor]] | None = None

    def write_work(self, path: Path, size: Size, *, seed: int, weights_seed: int) -> list[int]:
        """Write the whole work; returns the real tokens of every step.

        Args:
            path: file to write.
            size: how much.
            seed: of order and anchors.
            weights_seed: of the first weights, added to the configuration's.
        """
        if self._batches is None:
            self._batches = self._answered(size.chats)
        generator = np.random.default_rng(seed)
        epochs = -(-size.steps // len(self._batches))
        order = np.concatenate([generator.permutation(len(self._batches)) for _ in range(epochs)])[: size.steps].tolist()
        tensors = {f"{part}.{n}": tensor for n, batch in enumerate(self._batches) for part, tensor in batch.items()}
        widest = 1
        for step, number in enumerate(order):
            drawn = self._anchors(self._batches[number], seed=seed, step=step)
            tensors[f"anchors.{step}"], tensors[f"keep.{step}"] = drawn
            widest = max(widest, drawn[0].shape[1])
        train = self.config.train.model_copy(update={"max_steps": size.steps})
        rates = [lr_at(train, step=step, total_steps=size.steps, lr_scale=1.0) for step in range(size.steps)]
        tensors |= {"lr": torch.tensor(rates, dtype=torch.float64), "order": torch.tensor(order)}
        tensors |= {f"weights.{name}": tensor for name, tensor in self._first_weights(weights_seed).items()}
        every_token = torch.arange(self._target.info.vocab_size)
        tensors |= {"embedding": self._target.embed(every_token), "head": self._target.head_weight.detach().clone()}
        meta = {"setting": setting_text(self._setting(widest)), "mask_id": str(self._mask_id), "batches": str(len(self._batches))}
        save_file(tensors, path, metadata=meta | {"gamma": str(self.config.train.loss.gamma)})
        return [int(self._batches[number]["lengths"].sum()) for number in order]

    def prompts(self, count: int) -> list[EvalPrompt]:
        """Held-out prompts."""
        chats = synthetic_conversations(seed=self.config.evaluate.seed, count=count, split="heldout", system_prompt=None)
        asked = ((chat, tuple(self._renderer.prompt_ids(chat.messages[:-1]))) for chat in chats)
        return [EvalPrompt(chat.id, chat.kind, "synthetic", ids, "", {}) for chat, ids in asked]

    def probe(self, weights: Path, prompts: Sequence[EvalPrompt]) -> ProbeFigures:
        """Acceptance of trained weights by our decoder."""
        drafter = Drafter(self.config.drafter, target_hidden_size=self._target.info.hidden_size)
        drafter.load_state_dict(load_file(weights))
        candidate = drafter_candidate(
            self._target, drafter.eval(), block_size=None, mask_token_id=self._mask_id, label=weights.stem, step=None
        )
        probe = ProbeConfig(max_new_tokens=ANSWER_TOKENS, batch_size=SEQUENCES)
        return probe_drafter(
            self._target, candidate.proposer, prompts, probe=probe, evaluate=self.config.evaluate, stop_ids=self._stop_ids
        )

    def _answered(self, chats: int) -> list[dict[str, Tensor]]:
        """Prompts with the target's own answers, sorted by length into batches, with their features."""
        asked = synthetic_conversations(seed=self.config.data.seed, count=chats, split="train", system_prompt=None)
        prompts = [self._renderer.prompt_ids(chat.messages[:-1]) for chat in asked]
        texts: list[tuple[list[int], list[int]]] = []
        for first in range(0, len(prompts), 4 * SEQUENCES):
            part = prompts[first : first + 4 * SEQUENCES]
            answers = generate_batch(
                self._target, part, keys=[str(n) for n in range(len(part))], max_new_tokens=ANSWER_TOKENS, temperature=0.0, seed=0,
                stop_ids=self._stop_ids,
            )  # fmt: skip
            texts += [(prompt, answer) for prompt, answer in zip(part, answers, strict=True) if len(answer) > 1]
        texts.sort(key=lambda text: len(text[0]) + len(text[1]))
        return [self._batch(texts[first : first + SEQUENCES]) for first in range(0, len(texts), SEQUENCES)]

    def _batch(self, texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in texts])
        ids = torch.zeros((len(texts), int(lengths.max())), dtype=torch.long)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(texts):
            ids[row, : int(lengths[row])] = torch.tensor([*prompt, *answer])
            mask[row, len(prompt) : int(lengths[row])] = True
        return {"ids": ids, "mask": mask, "lengths": lengths, "features": self._target.features(ids, lengths)}

    def _anchors(self, batch: dict[str, Tensor], *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        rule: AnchorConfig = self.config.train.anchors
        return sample_anchors(batch["mask"], batch["lengths"], anchors=rule, seed=seed, epoch=0, batch_id=step)

    def _first_weights(self, seed: int) -> dict[str, Tensor]:
        drafter = Drafter(self.config.drafter, target_hidden_size=self._target.info.hidden_size)
        drafter.init_weights(self.config.run.seed + seed)
        return {name: tensor.detach().clone() for name, tensor in drafter.named_parameters()}

    def _setting(self, anchors: int) -> Setting:
        shape: DrafterConfig = self.config.drafter
        return Setting(
            tokens=self.config.data.max_length_tokens,
            anchors=anchors,
            batch=SEQUENCES,
            block_size=shape.block_size,
            vocab=self._target.info.vocab_size,
            width=shape.hidden_size,
            intermediate=shape.intermediate_size,
            heads=shape.num_attention_heads,
            key_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            layers=shape.num_hidden_layers,
            taps=shape.target_layer_ids,
            rope_theta=shape.rope_theta,
            eps=shape.rms_norm_eps,
            target_layers=self._target.info.num_hidden_layers,
        )
