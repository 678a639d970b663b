"""An exporter that is killed at any of its file operations: the folder is the old one or the new one, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import export_tiny, saved_target
from model_fixtures import drafter_config, tiny_drafter

from dflash.model import export_swap
from dflash.model.export import import_drafter
from dflash.model.export_swap import recover
from dflash.model.target_info import TargetInfo

OLD, NEW = drafter_config(), drafter_config(block_size=4)
KILLED = 77
OPERATIONS = ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"), (os, "unlink"), (os, "mkdir"), (os, "open"))
"""Whatever an export does to files in Python goes through one of these; tensors are written before the first fsync."""


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    return saved_target(tmp_path_factory.mktemp("killed") / "target")


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that dies before its n-th operation; True if it died, False if there were fewer."""
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, KILLED)
        return code == KILLED
    left = number

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)
            return real(*arguments, **named)

        return operation

    code = 1
    try:
        for module, name in OPERATIONS:
            setattr(module, name, dying(getattr(module, name)))
        real = export_swap.exchange
        export_swap.exchange = dying(real)
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("exchanging", [True, False], ids=["exchange", "two renames"])
def test_a_kill_at_any_operation_loses_nothing(
    exchanging: bool, info: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanging:
        monkeypatch.setattr(export_swap, "exchange", lambda _first, _second: False)
    outcomes: list[int] = []
    before = tmp_path / "before" / "out"
    export_tiny(before, OLD, info, layout="zlab")
    weights = {config.block_size: tiny_drafter(config).state_dict() for config in (OLD, NEW)}
    for number in range(200):
        place = Path(shutil.copytree(before, tmp_path / f"{number}" / "out"))
        died = killed_at(number, lambda place=place: export_tiny(place, NEW, info, layout="zlab"))
        if exchanging:
            assert place.is_dir(), f"killed at operation {number}, a reader finds no folder"
        recover(place)
        assert [path.name for path in place.parent.iterdir()] == ["out"], f"killed at operation {number}, something is left"
        found = import_drafter(place, tables=None)
        outcomes.append(found.description.config.block_size)
        wanted = weights[outcomes[-1]]
        assert all(torch.equal(value, wanted[name]) for name, value in found.drafter.state_dict().items())
        if not died:
            break
    assert len(outcomes) > 8, "the export was meant to do many operations"
    first_new = outcomes.index(NEW.block_size)
    assert first_new > 0
    assert outcomes[first_new:] == [NEW.block_size] * (len(outcomes) - first_new), "once it is new it stays new"


def test_a_killed_first_export_leaves_no_folder_that_looks_complete(info: TargetInfo, tmp_path: Path) -> None:
    whole = 0
    for number in range(200):
        place = tmp_path / f"{number}" / "out"
        died = killed_at(number, lambda place=place: export_tiny(place, NEW, info, layout="zlab"))
        if place.exists():
            assert import_drafter(place, tables=None).description.config == NEW.model_copy(
                update={"layer_types": NEW.resolved_layer_types, "initializer_range": NEW.initializer_range}
            )
            whole += 1
        if not died:
            break
    assert 0 < whole < number
