"""Stored tensors: every value that is not finite is counted, and a norm that jumps is found tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash.checkpoint import TensorScan, norm_jumps, scan_file, total_norm
from dflash.errors import CheckpointError


def scan(tmp_path: Path, **tensors: torch.Tensor) -> dict[str, TensorScan]:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    return {found.name: found for found in scan_file(path)}


def test_norms_and_lost_values_are_those_of_a_naive_count(tmp_path: Path) -> None:
    values = torch.tensor([[3.0, math.nan], [-math.inf, 4.0]])
    found = scan(tmp_path, a=values, b=torch.arange(5), c=torch.full((7,), 2.0, dtype=torch.bfloat16), d=torch.zeros(0))
    assert found["a"] == TensorScan("a", 4, 2, 5.0)
    assert found["b"] == TensorScan("b", 5, 0, 0.0)
    assert found["c"].nonfinite == 0
    assert found["c"].norm == pytest.approx(math.sqrt(28))
    assert found["d"] == TensorScan("d", 0, 0, 0.0)
    assert total_norm(list(found.values())) == pytest.approx(math.sqrt(25 + 28))


def test_the_smallest_kinds_of_numbers_are_read_too(tmp_path: Path) -> None:
    found = scan(tmp_path, q=torch.tensor([1.0, 2.0, math.nan]).to(torch.float8_e4m3fn))
    assert (found["q"].values, found["q"].nonfinite) == (3, 1)


def test_a_norm_that_jumps_up_or_down_is_found_and_a_new_tensor_is_not_compared() -> None:
    before = {"same": 1.0, "grown": 1.0, "shrunk": 9.0, "gone to nothing": 5.0, "from nothing": 0.0}
    after = [TensorScan(name, 1, 0, norm) for name, norm in (
        ("same", 1.9), ("grown", 2.5), ("shrunk", 1.0), ("gone to nothing", 0.0), ("from nothing", 8.0), ("new", 3.0),
    )]  # fmt: skip
    jumps = norm_jumps(before, after, factor=2.0)
    assert [jump.name for jump in jumps] == ["gone to nothing", "shrunk", "grown"]
    assert jumps[2].factor == 2.5


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x10" * 40)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is no readable"):
        list(scan_file(path))
