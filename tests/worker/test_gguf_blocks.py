"""Matrices of a GGUF file as they are: expanded, they are the numbers of the `gguf` package bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from octavo.models.gguf_convert import GgufTensor
from worker_svc.models.quantized.gguf_blocks import GgufBlocks, is_matrix_of_blocks

CPU = torch.device("cpu")
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def blocks_of(kind: str, rows: int = 5, depth: int = 512) -> np.ndarray:
    """Random bytes, with scales that are numbers."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    random = np.random.default_rng(len(kind) + num_bytes)
    blocks = random.integers(0, 256, (rows, depth // size, num_bytes), dtype=np.uint8)
    halves = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind, 1)
    where = num_bytes - 2 if kind == "Q6_K" else 0
    scales = random.normal(size=(rows, depth // size, halves)).astype(np.float16)
    blocks[..., where : where + 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def tensor_of(kind: str, blocks: np.ndarray, depth: int = 512) -> GgufTensor:
    shape = len(blocks), depth
    return GgufTensor("some.weight", shape, lambda: np.empty(0), kind=kind, matrix=shape, blocks=lambda: blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_numbers_that_the_package_makes_of_them(kind: str) -> None:
    blocks = blocks_of(kind)
    tensor = GgufBlocks(Path("some.gguf"), tensor_of(kind, blocks))
    expected = torch.from_numpy(gguf.dequantize(blocks, Type[kind]))
    assert tensor.num_bytes == blocks.nbytes and tensor.shape == (5, 512)
    whole = tensor.read(range(5), range(512), CPU)
    assert torch.equal(whole.dequantized(), expected)
    for rows, columns in ((range(1, 3), range(512)), (range(5), range(256, 512)), (range(2, 5), range(96, 320))):
        part = tensor.read(rows, columns, CPU)
        assert torch.equal(part.dequantized(), expected[rows.start : rows.stop, columns.start : columns.stop])
    out = torch.empty(3, 40)
    tensor.read_into(out, [range(4, 5), range(2)], [range(7, 40), range(500, 507)])
    assert torch.equal(out, expected[[4, 0, 1]][:, [*range(7, 40), *range(500, 507)]])


def test_only_matrices_of_known_kinds_are_kept() -> None:
    blocks = blocks_of("Q8_0")
    assert is_matrix_of_blocks(tensor_of("Q8_0", blocks))
    assert not is_matrix_of_blocks(tensor_of("IQ4_XS", blocks))
    vector = GgufTensor("some.bias", (5,), lambda: np.empty(0), kind="Q8_0", matrix=(5,), blocks=lambda: blocks)
    assert not is_matrix_of_blocks(vector)
