"""One system's training loop for `end_to_end.py`: trains the batches it is told to and says what that cost.

Requests are lines on stdin, answers JSON lines on stdout: `steps FIRST END` -> CPU and wall seconds and losses, `save PATH` -> the
weights. Ours is the trainer's own step with its metrics and its run log; SpecForge's is its public model with the loop around
it that its trainer has. Both read the same file: batches, features, anchors, learning rates, first weights, frozen tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.step_setting import CLIP_NORM, Inputs, Setting
from benchmarks.system_process import serve

CHUNK_BLOCKS = {"specforge": 128, "specforge_0": 0}
"""`objective_chunk_blocks` of the peer's variants."""


class Work:
    """The work of all systems, from the file that the benchmark wrote."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        meta = self._file.metadata()
        self.setting = Setting(**json.loads(meta["setting"], object_hook=_with_tuples))
        self.mask_id, self.gamma = int(meta["mask_id"]), float(meta["gamma"])
        names = sorted(self._file.keys())
        self.weights = {name.removeprefix("weights."): self.tensor(name) for name in names if name.startswith("weights.")}
        self.embedding, self.head = self.tensor("embedding"), self.tensor("head")
        self.lr, self.order = self.tensor("lr").tolist(), self.tensor("order").tolist()
        parts = ("ids", "mask", "lengths", "features")
        self.batches = [{part: self.tensor(f"{part}.{number}") for part in parts} for number in range(int(meta["batches"]))]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        found: Tensor = self._file.get_tensor(name)
        return found


class Ours:
    """The trainer's step: labels, embedding, drafter, loss, update, metrics, log."""

    def __init__(self, work: Work, folder: Path) -> None:
        from benchmarks.step_ours import our_drafter
        from dflash.config import LossConfig, OptimizerConfig
        from dflash.model.head import FrozenHead
        from dflash.model.logit_rule import LogitRule
        from dflash.train.group import Alone
        from dflash.train.optimizer import build_optimizer
        from dflash.train.run_log import RunLog
        from dflash.train.step import Stepper

        self._work = work
        self.model = our_drafter(work.setting, work.weights)
        self._stepper = Stepper(
            self.model,
            build_optimizer(self.model, OptimizerConfig(), lr=work.lr[0]),
            head=FrozenHead(work.head, LogitRule(scale=1.0, soft_cap=None)),
            loss=LossConfig(objective="decay", gamma=work.gamma),
            clip_norm=CLIP_NORM,
            autocast_dtype=None,
            group=Alone(),
        )
        log = folder / f"log-{id(self)}.jsonl"
        self._log = RunLog(log, segment=0, capacity_records=1024, heartbeat_s=60.0, on_defect=_fail)

    def step(self, number: int) -> float:
        """Train step `number`; returns its objective."""
        from dflash.train.metrics import BatchFacts, RankReport, StepContext, step_record

        began_s = time.perf_counter()
        batch = self._batch(number)
        self._stepper.accumulate(batch)
        update = self._stepper.update(lr=self._work.lr[number], norm_limit=math.inf)
        now_s = time.perf_counter()
        context = StepContext(
            segment=0, step=number, wall_time_s=time.time(), mono_time_s=now_s, lr=self._work.lr[number], warmup_factor=1.0,
            plan_position=number + 1, step_time_s=now_s - began_s,
        )  # fmt: skip
        report = RankReport(batches=(BatchFacts.of(batch),), wait_time_s=0.0, depths=(1, 1), finished=(1,), stop=False)
        self._log.step(step_record(context, update, [report]))
        return update.objective

    def _batch(self, number: int) -> Any:
        from dflash.model.anchors import AnchorSet, block_labels, block_token_ids, covered_tokens
        from dflash.records import PlannedBatch
        from dflash.train.features import FeatureBatch

        work, given = self._work, self._work.batches[self._work.order[number]]
        size = work.setting.block_size
        anchors = AnchorSet(work.tensor(f"anchors.{number}"), work.tensor(f"keep.{number}"))
        labels = block_labels(given["ids"], given["mask"], given["lengths"], anchors, block_size=size)
        tokens = block_token_ids(given["ids"], anchors, block_size=size, mask_token_id=work.mask_id)
        length = given["ids"].shape[1]
        rows = tuple(range(len(given["ids"])))
        return FeatureBatch(
            planned=PlannedBatch(position=number, epoch=0, bucket=0, rows=rows, padded_length_tokens=length),
            features=given["features"],
            block_embeds=torch.nn.functional.embedding(tokens, work.embedding),
            anchors=anchors,
            labels=labels,
            target_states=None,
            lengths=tuple(given["lengths"].tolist()),
            supervised_tokens=int(given["mask"].sum()),
            covered_tokens=covered_tokens(labels, anchors, tokens=length),
            target_index=0,
        )


class SpecForge:
    """SpecForge's model, loss, clipping and AdamW on the same anchors."""

    def __init__(self, work: Work, *, chunk_blocks: int) -> None:
        from benchmarks.step_peers import SpecForgeStep

        self._work = work
        first = work.batches[0]
        inputs = Inputs(work.weights, work.embedding, work.head, first["ids"], first["features"], work.tensor("anchors.0"))
        self._peer = SpecForgeStep(work.setting, inputs, chunk_blocks=chunk_blocks)
        online = self._peer._online  # noqa: SLF001
        online.mask_token_id, online.loss_decay_gamma = work.mask_id, work.gamma
        self.model = self._peer.model
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self, number: int) -> float:
        """Train step `number`; returns its loss."""
        work, given = self._work, self._work.batches[self._work.order[number]]
        keep = work.tensor(f"keep.{number}")
        drawn = (torch.where(keep, work.tensor(f"anchors.{number}"), 0), keep)
        online, optimizer = self._peer._online, self._peer.optimizer  # noqa: SLF001
        online._sample_anchor_positions = lambda *_: drawn  # noqa: SLF001
        for group in optimizer.param_groups:
            group["lr"] = work.lr[number]
        loss, _, _ = online(input_ids=given["ids"], hidden_states=given["features"], loss_mask=given["mask"].float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def main() -> int:
    """Serve requests until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True, choices=["ours", *CHUNK_BLOCKS])
    parser.add_argument("--work", required=True, type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    serve(lambda: _build(arguments.system, arguments.work), _answer)
    return 0


def _build(system: str, file: Path) -> Ours | SpecForge:
    work = Work(file)
    return Ours(work, file.parent) if system == "ours" else SpecForge(work, chunk_blocks=CHUNK_BLOCKS[system])


def _answer(system: Any, request: list[str]) -> dict[str, Any]:
    if request[0] == "save":
        save_file({name: tensor.detach().contiguous() for name, tensor in system.model.named_parameters()}, request[1])
        return {"saved": request[1]}
    began_s, cpu_s = time.perf_counter(), time.process_time()
    losses = [system.step(number) for number in range(int(request[1]), int(request[2]))]
    return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - began_s, "losses": losses}


def _with_tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}


def _fail(error: BaseException) -> None:
    raise error


def setting_text(setting: Setting) -> str:
    """A setting as the file keeps it."""
    return json.dumps(dataclasses.asdict(setting))


if __name__ == "__main__":
    raise SystemExit(main())
