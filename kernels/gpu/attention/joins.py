"""How the pieces of split sequences are joined: which part of a token's heads a program takes. No bit depends on it."""

from __future__ import annotations

from kernels.gpu.attention.decode import join_kernel
from kernels.gpu.attention.tiling import padded
from kernels.gpu.launch import Launch
from kernels.gpu.tiles import cdiv, next_power_of_2

JOIN_REGISTERS = 168  # of a thread: left alone, the assembler spills a few for more threads
FEWEST_DIMS = 32  # elements of a head: 128 bytes of its sums lie in one piece
_PROGRAMS = 8  # of a multiprocessor


def join_launch(
    num_sequences: int,
    num_tokens: int,
    num_heads: int,
    head_size: int,
    *,
    heads: int,
    heads_of_scale: int,
    out_stride: int,
    window: int,
    num_multiprocessors: int,
) -> Launch:
    """Of `heads` heads of a token at a time; where these are too few to occupy the GPU, as when one long sequence
    decodes, of a part of one head."""
    dims = padded(head_size)
    if num_tokens * (num_heads // heads) < num_multiprocessors:
        heads, dims = 1, min(dims, FEWEST_DIMS)
    num_tiles = num_heads // heads
    num_items = num_tokens * num_tiles * cdiv(head_size, dims)
    return Launch(
        join_kernel,
        (min(num_items, _PROGRAMS * num_multiprocessors),),
        (num_sequences, num_tiles, out_stride, window),
        **join_constants(head_size, heads, heads_of_scale, dims),
        HAS_WINDOW=window > 0,
        maxnreg=JOIN_REGISTERS,
    )


def join_constants(head_size: int, heads: int, heads_of_scale: int, dims: int) -> dict[str, int]:
    """What the kernel is compiled for, of sizes."""
    sizes = {"HEADS": heads, "HEADS_TILE": next_power_of_2(heads), "HEADS_OF_SCALE": heads_of_scale}
    return {**sizes, "HEAD_SIZE": head_size, "DIMS_TILE": dims}
