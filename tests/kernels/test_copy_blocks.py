"""Blocks are copied whole, bit for bit, in every layer, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.cache.copy_blocks import copy_blocks
from kernels.gpu.cache.swap_blocks import block_major
from kernels.oracles import reference
from tests.kernels.device import DEVICE
from tests.kernels.stores import bits, store

FP8 = torch.float8_e4m3fn
PAIRS = torch.tensor([[4, 0], [4, 6], [1, 2], [5, 3]], device=DEVICE)  # one source twice, no block both


@pytest.mark.parametrize(
    ("dtype", "num_parts", "num_kv_heads", "block_size", "head_size"),
    [
        (torch.bfloat16, 2, 2, 16, 80),  # a tile and a half
        (torch.float16, 2, 1, 8, 96),
        (torch.float32, 2, 3, 4, 10),
        (torch.bfloat16, 2, 1, 3, 10),  # words of 4 bytes
        (torch.float16, 2, 1, 2, 5),  # of 2
        (torch.bfloat16, 1, 1, 16, 576),  # latents
        (FP8, 2, 2, 8, 32),
        (FP8, 2, 1, 3, 7),  # of 1
    ],
)
def test_copies_within_a_store_and_to_another(
    dtype: torch.dtype, num_parts: int, num_kv_heads: int, block_size: int, head_size: int
) -> None:
    shape = (3, num_parts, 7, num_kv_heads, block_size, head_size)
    cache, before = store(*shape, dtype=dtype), store(*shape, dtype=dtype)
    copy_blocks(cache, cache, PAIRS)
    reference.copy_blocks(before.view(torch.uint8), before.view(torch.uint8), PAIRS)
    assert torch.equal(bits(cache), bits(before))

    other, expected = store(*shape, dtype=dtype, seed=1), store(*shape, dtype=dtype, seed=1)
    copy_blocks(cache, other, PAIRS)
    reference.copy_blocks(cache.view(torch.uint8), expected.view(torch.uint8), PAIRS)
    assert torch.equal(bits(other), bits(expected))


def test_between_layers_side_by_side_and_blocks_side_by_side() -> None:
    cache = store(3, 2, 7, 2, 4, 32, dtype=torch.float16)
    staging = block_major((3, 2, 4, 2, 4, 32), torch.float16, DEVICE)
    places = torch.arange(4, device=DEVICE)
    copy_blocks(cache, staging, torch.stack((PAIRS[:, 0], places), dim=1))
    assert torch.equal(bits(staging), bits(cache[:, :, PAIRS[:, 0]]))
    copy_blocks(staging, cache, torch.stack((places, PAIRS[:, 1]), dim=1))
    assert torch.equal(bits(staging), bits(cache[:, :, PAIRS[:, 1]]))


def test_no_pair_is_nothing_and_what_does_not_fit_is_refused() -> None:
    cache = store(1, 2, 3, 1, 2, 4, dtype=torch.float32)
    copy_blocks(cache, cache, PAIRS[:0])
    with pytest.raises(ValueError, match="their blocks differ"):
        copy_blocks(cache, store(1, 2, 3, 1, 2, 8, dtype=torch.float32), PAIRS)
    with pytest.raises(ValueError, match="their blocks differ"):
        copy_blocks(cache, cache.half(), PAIRS)
    with pytest.raises(ValueError, match=r"source must be .* of contiguous blocks"):
        copy_blocks(cache.transpose(4, 5), cache, PAIRS)
    with pytest.raises(ValueError, match="layers of destination"):
        copy_blocks(cache, store(2, 2, 3, 1, 2, 4, dtype=torch.float32)[::2], PAIRS)
    with pytest.raises(ValueError, match=r"pairs must be contiguous int64 \[n, 2\], not torch\.int32"):
        copy_blocks(cache, cache, PAIRS.int())
