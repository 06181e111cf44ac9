"""Matrices of a GGUF file as they are: expanded, they are the numbers of the `gguf` package bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kernels.cpu.library import at_level
from kernels.cpu.native import build
from kernels.cpu.products.gguf_blocks import read_blocks
from kernels.cpu.products.quantized_records import pack_quantized
from kernels.quantized_weight import QuantizedWeight
from octavo.models.gguf_convert import GgufTensor
from worker_svc.models.quantized.gguf_blocks import FORMATS, GgufBlocks, is_matrix_of_blocks

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


@pytest.mark.parametrize("level", build.usable_levels())
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_reads_what_torch_reads(kind: str, level: str) -> None:
    blocks = blocks_of(kind, rows=9, depth=1024)
    with at_level(level):
        found = read_blocks(kind, blocks, 1024)
    if kind in ("Q4_1", "Q5_0", "Q5_1"):
        assert found is None
        return
    num_bytes, _, read = FORMATS[kind]
    expected = read(torch.from_numpy(blocks).unflatten(1, (-1, num_bytes)))
    assert found is not None and (found.numbers, found.group) == (expected.numbers, expected.group)
    for mine, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("level", build.usable_levels()[:-1])
def test_records_are_the_same_bytes_at_every_level(level: str) -> None:
    for kind in ("Q4_0", "Q4_1", "Q4_K", "Q6_K"):
        weight = read_blocks(kind, blocks := blocks_of(kind, rows=50), 512)
        if weight is None:
            num_bytes, _, read = FORMATS[kind]
            weight = read(torch.from_numpy(blocks).unflatten(1, (-1, num_bytes)))
        expected = pack_quantized(weight)
        with at_level(level):
            found = pack_quantized(weight)
        assert found is not None and expected is not None and torch.equal(found.packed, expected.packed)


def tensors_of(weight: QuantizedWeight) -> list[torch.Tensor]:
    return [tensor for tensor in (weight.codes, weight.scale, weight.zero, weight.offset) if tensor is not None]


def test_only_matrices_of_known_kinds_are_kept() -> None:
    blocks = blocks_of("Q8_0")
    assert is_matrix_of_blocks(tensor_of("Q8_0", blocks))
    assert not is_matrix_of_blocks(tensor_of("IQ4_XS", blocks))
    vector = GgufTensor("some.bias", (5,), lambda: np.empty(0), kind="Q8_0", matrix=(5,), blocks=lambda: blocks)
    assert not is_matrix_of_blocks(vector)
