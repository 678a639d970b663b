"""RoPE: the rotation itself and the property that it is for."""

from __future__ import annotations

import model_naive as naive
import torch

from dflash.model.rope import rotary_angles, rotate


def test_rotation_equals_the_pairwise_formula() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 8)
    positions = torch.tensor([0, 1, 7, 100, 4095])
    cos, sin = rotary_angles(positions, head_dim=8, theta=10000.0, dtype=torch.float32)
    wanted = torch.stack([naive.rope(vector, int(p), 10000.0) for vector, p in zip(vectors, positions, strict=True)])
    torch.testing.assert_close(rotate(vectors, cos, sin), wanted, atol=1e-3, rtol=1e-4)


def test_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(16), torch.randn(16)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        cos, sin = rotary_angles(torch.tensor([query_at, key_at]), head_dim=16, theta=1e6, dtype=torch.float32)
        return rotate(query, cos[0], sin[0]) @ rotate(key, cos[1], sin[1])

    torch.testing.assert_close(score(9, 4), score(205, 200), atol=1e-4, rtol=1e-4)
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-3


def test_position_zero_is_left_alone_and_low_precision_keeps_its_dtype() -> None:
    cos, sin = rotary_angles(torch.zeros(2, 3, dtype=torch.long), head_dim=4, theta=10000.0, dtype=torch.bfloat16)
    vectors = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert cos.shape == (2, 3, 2)
    rotated = rotate(vectors, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, vectors)
