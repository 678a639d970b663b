"""Every check of the doctor made to fail on purpose, through the whole examination: it is named and says what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.config import parse_config
from dflash.errors import PreflightError
from dflash.model.anchors import BlockLabels
from dflash.model.drafter import Drafter
from dflash.model.target import Target
from dflash.records import RunPaths
from dflash.train import features
from dflash.train.doctor import DoctorReport, Part, alignment, examination, examine, leak, machine, preflight, require_passed

DEMO = "run: {{root: {root}}}\ntarget: {{mask_token: '<|mask|>'}}\ndata: {{num_conversations: 4}}\n"
Patch = pytest.MonkeyPatch
Break = Callable[[Patch, Path], object]


def nothing(_patch: Patch, _root: Path) -> None:
    """The overrides alone break it."""


def few_positions(patch: Patch, _root: Path) -> None:
    real = preflight.read_target_info
    patch.setattr(preflight, "read_target_info", lambda config: dataclasses.replace(real(config), max_position_embeddings=8))


def no_folder(_patch: Patch, root: Path) -> None:
    (root / "runs").write_text("a file where the runs should go")


def clock_of_1970(patch: Patch, _root: Path) -> None:
    patch.setattr(machine.time, "time", lambda: 12.0)


def no_sockets(patch: Patch, _root: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    patch.setattr(machine.socket, "socket", refuse)


class SeesItsAnchor(Drafter):
    """A drafter whose blocks see one token too many."""

    def forward(self, features: torch.Tensor, block_embeds: torch.Tensor, anchors: torch.Tensor, keep: torch.Tensor) -> Any:
        return super().forward(features, block_embeds, anchors + 1, keep)


def leaking(patch: Patch, _root: Path) -> None:
    patch.setattr(leak, "Drafter", SeesItsAnchor)


def other_taps(patch: Patch, _root: Path) -> None:
    real = Target.features
    patch.setattr(Target, "features", lambda self, *arguments: real(self, *arguments).roll(self.info.hidden_size, -1))


def short_head(patch: Patch, _root: Path) -> None:
    patch.setattr(Target, "head_weight", property(lambda self: self._head.weight[:-1]))


def broken_pointer(_patch: Patch, root: Path) -> None:
    (root / "runs" / "demo-001").mkdir(parents=True)
    RunPaths(root / "runs" / "demo-001").data_pointer.write_text("{}")


def shifted_labels(patch: Patch, _root: Path) -> None:
    real = features.block_labels

    def shifted(*arguments: Any, **named: Any) -> BlockLabels:
        labels, valid = real(*arguments, **named)
        return BlockLabels(labels.roll(-1, dims=-1), valid)

    patch.setattr(features, "block_labels", shifted)


def dead_optimizer(patch: Patch, _root: Path) -> None:
    patch.setattr(alignment, "MAX_UPDATES", alignment.LEAST_UPDATES)
    patch.setattr(torch.optim.AdamW, "step", lambda *_: None)


def no_memory(patch: Patch, _root: Path) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    patch.setattr(examination, "load_target", too_large)


WRONG_MASK = ["target.mask_token=null", "target.mask_token_id=0"]
TABLE: list[tuple[str, Part, list[str], Break, str]] = [
    ("devices", "start", ["cluster.device=cuda", "cluster.targets_per_replica=900"], nothing, "asks for 901 CUDA devices"),
    ("target", "start", ["target.path=./no/such/folder"], nothing, "does not exist"),
    ("rope", "start", [], few_positions, "the target has 8 positions"),
    ("inputs", "start", ["data.source=files", "data.files=[no-such.jsonl]"], nothing, "no-such.jsonl"),
    ("memory", "start", ["cluster.device_memory_bytes=1000000"], nothing, "0.00 GB"),
    ("disk", "start", ["checkpoint.keep_clean=1000000000000"], nothing, "GB free"),
    ("storage", "start", [], no_folder, "runs"),
    ("clock", "start", [], clock_of_1970, "1970"),
    ("clock", "start", [], no_folder, "NotADirectoryError"),
    ("ports", "start", [], no_sockets, "Too many open files"),
    ("attention", "start", ["train.attention=flex", "cluster.device=cpu"], nothing, "no backward on a CPU"),
    ("leak test", "start", [], leaking, "at or behind its anchor"),
    ("taps", "start", [], other_taps, "should be hidden_states[1]"),
    ("taps", "start", [], no_memory, "does not fit on cpu"),
    ("mask token", "start", WRONG_MASK, nothing, "pad token"),
    ("vocabulary", "start", [], short_head, "512 and 511 rows"),
    ("data set", "data", [], broken_pointer, "data.json"),
    ("labels", "data", [], shifted_labels, "slots are wrong"),
    ("overfit", "data", [], dead_optimizer, "one batch cannot be learnt"),
]


def examined(root: Path, part: Part, overrides: list[str]) -> DoctorReport:
    config = parse_config(DEMO.format(root=root / "runs"), origin="test", overrides=overrides)
    paths = RunPaths(root / "runs" / "demo-001")
    return examine(config, parts=(part,), paths=paths if paths.root.is_dir() else None, overfit_limit_s=60.0)


@pytest.fixture(autouse=True)
def _memory_is_free(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda _place: None)


@pytest.mark.parametrize(("name", "part", "overrides", "broken", "named"), TABLE, ids=[f"{row[0]}-{row[4]}" for row in TABLE])
def test_what_was_broken_is_found(
    name: str, part: Part, overrides: list[str], broken: Break, named: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    broken(monkeypatch, tmp_path)
    report = examined(tmp_path, part, overrides)
    failures = {failure.name: failure for failure in report.failures}
    assert name in failures, report.text
    assert named in failures[name].message
    assert all(failure.remedy and failure.message for failure in failures.values())
    unrelated = set(failures) - {name} - ({"storage", "clock"} if broken is no_folder else set())
    assert unrelated <= ({"memory", "disk"} if name == "target" else {"memory"}), f"{unrelated} failed as well"
    shown = " ".join(report.text.split())
    assert " ".join(failures[name].message.split()) in shown
    with pytest.raises(PreflightError) as caught:
        require_passed(report)
    assert name in caught.value.what
    assert caught.value.remedy


def test_the_table_breaks_every_check_there_is(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(alignment, "MAX_UPDATES", 2)
    names = {result.name for part in ("start", "data") for result in examined(tmp_path, part, []).results}  # type: ignore[arg-type]
    assert {row[0] for row in TABLE} == names
    assert len(names) == 17
