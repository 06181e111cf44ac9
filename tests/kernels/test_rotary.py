"""Rotary embedding of GPU workers against the oracle in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.rows.rotary import rotary
from kernels.oracles import reference
from tests.kernels.device import DEVICE
from tests.kernels.rows import DTYPES, TOLERANCE, normal
from worker_svc.models.rope import Rope, rotary_table

ROPES = [
    Rope(32),
    Rope(32, kind="linear", factor=2.0),
    Rope(32, 500_000.0, "llama3", 8.0, 16, 1.0, 4.0),
    Rope(32, kind="yarn", factor=4.0, original_max_position_embeddings=16, magnitude=1.14),
    Rope(32, kind="longrope", original_max_position_embeddings=16, short_factors=(1.0,) * 16, long_factors=(1.5,) * 16),
]


def check(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    exact = query.double(), key.double()
    reference.rotary(exact[0], exact[1], positions, cos_sin)
    rotary(query, key, positions, cos_sin)
    tolerance = TOLERANCE[query.dtype]
    for turned, expected in zip((query, key), exact, strict=True):
        torch.testing.assert_close(turned.double(), expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(
    ("head_size", "rotary_size", "num_heads", "num_kv_heads"),
    [(80, 80, 5, 1), (96, 96, 9, 3), (64, 24, 3, 3), (6, 2, 1, 1), (256, 256, 19, 2)],
)
def test_parts_of_one_product_are_turned_in_place(
    dtype: torch.dtype, head_size: int, rotary_size: int, num_heads: int, num_kv_heads: int
) -> None:
    """Query and key lie beside the values in one tensor, as the layers hand them over; repeated and far positions."""
    heads = num_heads + 2 * num_kv_heads
    product = normal(5, heads, head_size, dtype=dtype)
    before = product.clone()
    query, key = product[:, :num_heads], product[:, num_heads : num_heads + num_kv_heads]
    table = rotary_table(Rope(rotary_size), 50, DEVICE)
    check(query, key, torch.tensor([0, 49, 7, 7, 31], device=DEVICE), table)
    assert torch.equal(product[:, num_heads + num_kv_heads :], before[:, num_heads + num_kv_heads :])
    assert torch.equal(product[..., rotary_size:], before[..., rotary_size:])
    assert torch.equal(product[0], before[0])  # position 0 turns nothing
    assert not torch.equal(query[1, :, :rotary_size], before[1, :num_heads, :rotary_size])


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_every_scaling_is_in_the_table(rope: Rope) -> None:
    positions = torch.arange(64, device=DEVICE)
    check(normal(64, 2, 32), normal(64, 1, 32, seed=1), positions, rotary_table(rope, 64, DEVICE))


def test_a_token_is_the_same_in_any_company() -> None:
    query, key, positions = normal(7, 3, 32), normal(7, 3, 32, seed=1), torch.arange(7, device=DEVICE)
    table = rotary_table(Rope(32), 16, DEVICE)
    alone_query, alone_key = query[3:4].clone(), key[3:4].clone()
    rotary(query, key, positions, table)
    rotary(alone_query, alone_key, positions[3:4], table)
    assert torch.equal(alone_query[0], query[3]) and torch.equal(alone_key[0], key[3])
    rotary(query[:0], key[:0], positions[:0], table)


def test_what_does_not_fit_is_refused() -> None:
    query, key, positions = normal(2, 3, 8), normal(2, 1, 8), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    table = rotary_table(Rope(8), 4, DEVICE)
    with pytest.raises(ValueError, match=r"query and key must be \[T, heads, head_size\]"):
        rotary(query, key[:1], positions, table)
    with pytest.raises(ValueError, match=r"positions must be contiguous \(2,\)"):
        rotary(query, key, positions[:1], table)
    with pytest.raises(ValueError, match="positions must be int64 and cos_sin float32"):
        rotary(query, key, positions, table.double())
    with pytest.raises(ValueError, match="16 of a head's 8 elements cannot be turned"):
        rotary(query, key, positions, rotary_table(Rope(16), 4, DEVICE))
