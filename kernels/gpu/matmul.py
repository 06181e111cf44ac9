"""A dense layer whose rows do not depend on their company: for `--batch-invariant`.

    out = x weight^T + bias

    x [T, n]         rows of adjacent elements, at any stride
    weight [m, n]    contiguous
    out [T, m]       rows at any stride

The tile of outputs, and the segments into which a sum over n is cut, follow from the weight alone. A segment is summed
from zero, then the segments' sums are added in order: by one program that has them all,

    total = ((0 + segment 0) + segment 1) + ...

or, where few rows would leave most of a GPU idle, by a second kernel from what one program a segment has left in
memory. Either way the same numbers are added in the same order, so who adds them may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.architectures import TENSOR_MEMORY, capability_of
from kernels.gpu.checks import check_alike, check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.products import add_product, tile_of_program
from kernels.gpu.tiles import cdiv, next_power_of_2
from kernels.gpu.variant import CAPABILITIES, Variant

_FEW_ROWS = 64  # up to which a tile has no more
_WANTED_PROGRAMS = 128  # as many as a large GPU runs at once, with one on each of its processors
_MAX_SEGMENTS = 8
_SUMMED_ELEMENTS = 1024  # of a program that adds segments
_WIDE = 256  # outputs of the largest tile
_WIDE_TILES = 96  # with so many of them, few rows occupy most of a GPU without cutting sums
_ALL_REGISTERS = 255  # of a thread: left alone, the assembler spills a few for more threads than shared memory lets run
_DESCRIBES = range(90, 120)  # compute capabilities of cards whose matrix units read what descriptors copy


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the product with a weight is cut; a function of its shape and type."""

    block_m: int
    block_n: int
    block_k: int
    segment: int  # elements of a row that are summed from zero, a multiple of block_k
    num_segments: int
    num_warps: int = 4

    def stages(self, is_described: bool) -> int:
        """Tiles in use or on their way: cards that read descriptors hold more."""
        if not is_described:
            return 3
        return 5 if self.block_m == _FEW_ROWS and self.block_n < _WIDE else 4

    def for_few_rows(self) -> Tiling:
        """With half as many rows, by half as many warps. A row's sum is the same, but for cards with tensor memory:
        four warps of a Hopper multiply 64 rows at once, a warp of others 16."""
        return replace(self, block_m=_FEW_ROWS, num_warps=4)


def tiling(num_outputs: int, size: int, dtype: torch.dtype) -> Tiling:
    """For a weight [num_outputs, size]."""
    # 64 rows are what four warps of a Hopper tensor core multiply at once. Twice as many read a weight half as often.
    block_m, most, block_k, num_warps = 128, 128, 64, 8
    if dtype == torch.float32:  # without tensor cores registers are what is short
        block_m, most, block_k, num_warps = 64, 64, 16, 4
    elif num_outputs >= _WIDE_TILES * _WIDE:
        # One sum takes all registers, so that there are no segments.
        return Tiling(block_m, _WIDE, block_k, cdiv(size, block_k) * block_k, 1, num_warps)
    elif num_outputs <= 64:
        block_m, num_warps = 64, 4
    block_n = max(16, min(most, next_power_of_2(num_outputs)))
    num_segments = cdiv(_WANTED_PROGRAMS, cdiv(num_outputs, block_n))
    num_segments = min(num_segments, _MAX_SEGMENTS, max(size // (8 * block_k), 1))
    segment = cdiv(cdiv(size, num_segments), block_k) * block_k
    return Tiling(block_m, block_n, block_k, segment, cdiv(size, segment), num_warps)


@triton.jit(do_not_specialize=["count"])  # the same code for every number of rows
def _matmul_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    bias,
    count,
    out_stride,
    x_stride,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DESCRIBED: tl.constexpr,
):
    """`x` and `weight` are addresses, or with IS_DESCRIBED descriptors of tiles: past the end these read zeros."""
    row_tile, column_tile = tile_of_program(tl.cdiv(count, BLOCK_M), tl.cdiv(OUTPUTS, BLOCK_N))
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not IS_DESCRIBED:
        # Past the end the last row and column are computed again, and not stored: no masks in the loop.
        x += tl.minimum(row, count - 1).to(tl.int64)[:, None] * x_stride
        weight += tl.minimum(column, OUTPUTS - 1).to(tl.int64)[None, :] * SIZE
    mask = (row < count)[:, None] & (column < OUTPUTS)[None, :]
    has_tail: tl.constexpr = SIZE % SEGMENT != 0 or SEGMENT % BLOCK_K != 0  # the last segment is shorter, or its tile
    steps: tl.constexpr = (min(SEGMENT, SIZE) + BLOCK_K - 1) // BLOCK_K  # of a segment
    total, sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = tl.program_id(1) * SEGMENT
    # One loop over all segments: tiles are copied ahead over their borders.
    for step in range(steps if IS_SPLIT else steps * SEGMENTS):
        k = first + step * BLOCK_K
        if IS_DESCRIBED:
            a, b = x.load([row_tile * BLOCK_M, k]), weight.load([column_tile * BLOCK_N, k])
            sums = tl.dot(a, b.T, sums, input_precision="ieee")
        else:
            sums = add_product(sums, x, weight, k, SIZE, BLOCK_K, has_tail)
        if SEGMENTS > 1 and not IS_SPLIT and (step + 1) % steps == 0:
            total += sums
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IS_SPLIT:
        out += tl.program_id(1).to(tl.int64) * count * OUTPUTS
    if SEGMENTS == 1 or IS_SPLIT:
        total = sums
    if HAS_BIAS and not IS_SPLIT:
        total += tl.load(bias + column, column < OUTPUTS, 0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    out,
    sums,
    bias,
    count,
    out_stride,
    OUTPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUTPUTS
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(sums + (segment * count + row) * OUTPUTS + column, mask, 0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask)


def matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    may_describe: bool = True,
) -> None:
    """See `kernels.oracles.reference.matmul`; one type and device. Raises ValueError for tensors that do not fit.

    Without `may_describe` tiles are read by address on any card, which measures what descriptors give.
    """
    bound = _bound((out, x, weight, bias), may_describe)
    if not len(x) or not len(weight):  # a rank may have no token of a small vocabulary
        return
    cut, sums, tiles = bound.cut, out, (x, weight)
    if bound.is_split:
        sums = out.new_empty((cut.num_segments * len(x), len(weight)), dtype=torch.float32)
    if bound.is_described:
        tiles = _described(x, cut.block_m, cut.block_k), _described(weight, cut.block_n, cut.block_k)
    bound.launch(sums, *tiles, bias)
    if bound.is_split:
        add_segments(out, sums, bias)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Of one layout of tensors."""

    cut: Tiling
    is_split: bool
    is_described: bool
    launch: Launch


@once_a_layout
def _bound(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, may_describe: bool
) -> _Bound:
    count, size = x.shape
    num_outputs = weight.shape[0]
    check_rows("matmul", x=x)
    check_rows("matmul", out=out)
    check_alike("matmul", "out", out, x)
    check_alike("matmul", "weight", weight, x)
    check_contiguous("matmul", "weight", weight, (num_outputs, size), x)
    if out.shape != (count, num_outputs):
        raise ValueError(f"matmul: out must be {(count, num_outputs)}, not {tuple(out.shape)}")
    if bias is not None:
        check_contiguous("matmul", "bias", bias, (num_outputs,), x)
    cut = tiling(max(num_outputs, 1), size, weight.dtype)
    if count <= _FEW_ROWS and capability_of(x.device) not in TENSOR_MEMORY:
        cut = cut.for_few_rows()
    num_tiles = cdiv(count, cut.block_m) * cdiv(num_outputs, cut.block_n)
    # This and the rows of a tile are all that the number of rows decides.
    is_split = cut.num_segments > 1 and num_tiles < _WANTED_PROGRAMS
    is_described = may_describe and _can_be_described(x, weight)
    launch = Launch(
        _matmul_kernel,
        (num_tiles, cut.num_segments if is_split else 1),
        (count, num_outputs if is_split else out.stride(0), x.stride(0)),
        OUTPUTS=num_outputs,
        SIZE=size,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SEGMENT=cut.segment,
        SEGMENTS=cut.num_segments,
        IS_SPLIT=is_split,
        HAS_BIAS=bias is not None,
        IS_DESCRIBED=is_described,
        num_warps=cut.num_warps,
        num_stages=cut.stages(is_described),
        maxnreg=_ALL_REGISTERS,
    )
    return _Bound(cut, is_split, is_described, launch)


def _described(x: torch.Tensor, rows: int, elements: int) -> TensorDescriptor:
    """It is made at each launch, as it holds an address."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, elements])


def _can_be_described(*tensors: torch.Tensor) -> bool:
    """Whether the card has descriptors and its matrix units read what they copy, and rows begin where they must."""
    return capability_of(tensors[0].device) in _DESCRIBES and all(
        x.dtype != torch.float32 and x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 for x in tensors
    )


def add_segments(out: torch.Tensor, sums: torch.Tensor, bias: torch.Tensor | None) -> None:
    """out [T, m] = the sum of `sums` f32[segments * T, m] over the segments in their order, and the bias."""
    tensors = out, sums, bias
    _bound_sum(tensors)(*tensors)


@once_a_layout
def _bound_sum(out: torch.Tensor, sums: torch.Tensor, bias: torch.Tensor | None) -> Launch:
    count, num_outputs = out.shape
    return Launch(
        _sum_kernel,
        (count, cdiv(num_outputs, _SUMMED_ELEMENTS)),
        (count, out.stride(0)),
        OUTPUTS=num_outputs,
        SEGMENTS=sums.shape[0] // count,
        BLOCK=_SUMMED_ELEMENTS,
        HAS_BIAS=bias is not None,
    )


def variants() -> Iterator[Variant]:
    """Weights of an 8 B model in each type, whole and split; and sizes that no tile divides."""
    shapes = [("bf16", 4096, 4096), ("bf16", 28672, 4096), ("bf16", 1000, 584), ("fp16", 6144, 4096)]
    shapes += [("fp32", 4096, 4096), ("bf16", 8, 2048), ("bf16", 4096, 14336), ("bf16", 128256, 4096)]
    for dtype, num_outputs, size in shapes:
        whole = tiling(num_outputs, size, torch.float32 if dtype == "fp32" else torch.bfloat16)
        for cut in dict.fromkeys((whole, whole.for_few_rows())):
            for is_split in (False, True)[: cut.num_segments]:
                for is_described in (False, True)[: 1 if dtype == "fp32" else 2]:
                    yield _variant(dtype, num_outputs, size, cut, is_split, is_described)
    for dtype, has_bias in (("bf16", False), ("fp16", True), ("fp32", False)):
        pointers = {"out": f"*{dtype}", "sums": "*fp32"} | ({"bias": f"*{dtype}"} if has_bias else {})
        yield Variant(
            f"matmul sum {dtype}{' bias' * has_bias}",
            _sum_kernel,
            pointers | dict.fromkeys(["count", "out_stride"], "i32"),
            ({} if has_bias else {"bias": None})
            | {"OUTPUTS": 4096, "SEGMENTS": 4, "BLOCK": _SUMMED_ELEMENTS, "HAS_BIAS": has_bias},
            divisible_by_16=(*pointers, "out_stride"),
            may_spill=False,
        )


def _variant(dtype: str, num_outputs: int, size: int, cut: Tiling, is_split: bool, is_described: bool) -> Variant:
    has_bias = num_outputs == 1000
    pointers = {"out": "*fp32" if is_split else f"*{dtype}"} | ({"bias": f"*{dtype}"} if has_bias else {})
    tiles = {"x": f"*{dtype}", "weight": f"*{dtype}"}
    if is_described:
        rows = {"x": cut.block_m, "weight": cut.block_n}
        tiles = {name: f"tensordesc<{dtype}[{count}, {cut.block_k}]>" for name, count in rows.items()}
    else:
        pointers |= tiles
    aligned = size % 16 == 0 and num_outputs % 16 == 0
    return Variant(
        f"matmul {dtype} {num_outputs} x {size}, {cut.block_m} rows{' split' * is_split}{' described' * is_described}",
        _matmul_kernel,
        pointers | tiles | dict.fromkeys(["count", "out_stride", "x_stride"], "i32"),
        ({} if has_bias else {"bias": None})
        | {"OUTPUTS": num_outputs, "SIZE": size, "SEGMENT": cut.segment, "SEGMENTS": cut.num_segments}
        | {"BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
        | {"IS_SPLIT": is_split, "HAS_BIAS": has_bias, "IS_DESCRIBED": is_described},
        num_warps=cut.num_warps,
        num_stages=cut.stages(is_described),
        max_registers=_ALL_REGISTERS,
        divisible_by_16=(*pointers, *["out_stride", "x_stride"] * aligned),
        may_spill=False,
        capabilities=_DESCRIBES if is_described else CAPABILITIES,
    )
