"""A dense layer of eight bits on both sides, as tensor cores multiply them: int8 with sums in int32, or E4M3.

    out = row scale * output scale * (codes of x) (codes of W)^T + bias;  with scales by group: of 128 inputs' sum

    codes of x [T, K rounded up]           int8 or float8_e4m3fn, and their scales: of `rounded_rows`
    weight [chunks, N rounded up, 128]     the same type; a chunk's 128 inputs; zeros past the end
    scale f32[groups, N rounded up]        groups: 1, or one a chunk
    out [T, N]                             rows at any stride

Tiles and segments are as in `packed_product`. Sums of E4M3 leave the tensor core every 128 inputs: a Hopper one adds in
fewer bits than float32 has (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import check_contiguous, check_rows
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.products import tile_of_program
from kernels.gpu.quantized.packed_codes import TILE
from kernels.gpu.quantized.rounded_rows import fits, rounded_rows
from kernels.gpu.quantized.rounding import GROUP, RoundedRows, Rounding, scales_stride
from kernels.gpu.quantized.segments import MOST_ROWS, Cut, chunks_of_segment
from kernels.gpu.tiles import cdiv
from kernels.gpu.variant import CAPABILITIES, Variant
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight

CHUNK = 128
_NUM_STAGES = 4
_SUMMED_ELEMENTS = 1024


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def _rounded_product_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    row_scale,
    scale,
    bias,
    count,
    out_stride,
    row_scale_stride,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_OF_SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_BY_GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    column_tiles: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    row_tile, column_tile = tile_of_program(tl.cdiv(count, BLOCK_M), column_tiles)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, CHUNK)
    first = tl.program_id(1) * CHUNKS_OF_SEGMENT  # of a product that is not split, 0
    past = tl.minimum(first + CHUNKS_OF_SEGMENT, CHUNKS) if IS_SPLIT else CHUNKS
    is_segmented: tl.constexpr = CHUNKS > CHUNKS_OF_SEGMENT and not IS_SPLIT
    is_int8: tl.constexpr = x.dtype.element_ty == tl.int8
    x += tl.minimum(row, count - 1).to(tl.int64)[None, :] * (CHUNKS * CHUNK) + first * CHUNK + k[:, None]
    line = first.to(tl.int64) * (column_tiles * BLOCK_N) + column
    weight += line[:, None] * CHUNK + k[None, :]
    if IS_BY_GROUP:
        scale += line
        row_scale += first.to(tl.int64) * row_scale_stride + row
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if is_int8 else tl.float32)
    if is_segmented:
        of_segments = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in range(first, past):
        a = tl.load(weight)
        b = tl.load(x)
        weight += column_tiles * BLOCK_N * CHUNK
        x += CHUNK
        if is_int8:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        elif IS_BY_GROUP:
            # Said to be one operation: as two, compilers may or may not make them one, tile by tile.
            total = tl.fma(tl.dot(a, b), tl.load(scale)[:, None] * tl.load(row_scale)[None, :], total)
            scale += column_tiles * BLOCK_N
            row_scale += row_scale_stride
        else:
            total += tl.dot(a, b)
        if is_segmented:  # noqa: SIM102  # known when it is compiled, as what follows is not
            if (chunk + 1) % CHUNKS_OF_SEGMENT == 0 or chunk + 1 == past:
                of_segments += total.to(tl.float32)
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if is_int8 else tl.float32)
    sums = of_segments if is_segmented else total.to(tl.float32)
    if IS_SPLIT:
        out += tl.program_id(1).to(tl.int64) * count * OUTPUTS
    else:
        # As `_add_segments_kernel` does it.
        added = tl.zeros((BLOCK_N,), tl.float32)
        if bias is not None:
            added += tl.load(bias + column, column < OUTPUTS, 0.0).to(tl.float32)
        if IS_BY_GROUP:
            sums += added[:, None]
        else:
            factor = tl.broadcast_to(tl.load(scale + column)[:, None], sums.shape)
            if row_scale is not None:
                factor *= tl.load(row_scale + row)[None, :]
            sums = tl.fma(sums, factor, tl.broadcast_to(added[:, None], sums.shape))
    place = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), (row < count)[None, :] & (column < OUTPUTS)[:, None])


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # Triton has no types
def _add_segments_kernel(  # type: ignore[no-untyped-def]
    out,
    parts,
    row_scale,
    scale,
    bias,
    count,
    out_stride,
    OUTPUTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_BY_GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUTPUTS
    sums = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        sums += tl.load(parts + (segment * count + row) * OUTPUTS + column, mask, 0.0)
    added = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        added += tl.load(bias + column, mask, 0.0).to(tl.float32)
    if IS_BY_GROUP:
        sums += added
    else:
        factor = tl.load(scale + column, mask, 0.0)
        if row_scale is not None:
            factor *= tl.load(row_scale + row)
        sums = tl.fma(sums, factor, added)
    tl.store(out + row * out_stride + column, sums.to(out.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class RoundedCodes:
    """A weight [N, K] as it is multiplied by rounded rows; see the top of this file."""

    out_features: int
    in_features: int
    weight: torch.Tensor
    scale: torch.Tensor
    rounding: Rounding  # of rows; a scale that all of them have is in `scale`, too
    of_zero: torch.Tensor | None = None  # f32[N]: what their zero adds to outputs; taken off with the bias

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return self.weight.nbytes + self.scale.nbytes


def rounded_product(
    out: torch.Tensor, x: torch.Tensor | RoundedRows, weight: RoundedCodes, bias: torch.Tensor | None = None
) -> None:
    """See the top of this file; x [T, K] float32, float16 or bfloat16, rounded here, or rounded already as the weight
    wants it. Raises ValueError for tensors that do not fit."""
    plain, rounding = None if isinstance(x, RoundedRows) else x, weight.rounding
    tensors = out, plain, weight.weight, weight.scale, bias
    bound = _bound(tensors, weight.out_features, weight.in_features, rounding.is_by_group, rounding.scale is not None)
    if not len(out):
        return
    if not isinstance(x, RoundedRows):
        x = rounded_rows(x, rounding)
    elif x.rounding != rounding or len(x) != len(out) or x.dtype != out.dtype:
        raise ValueError(
            f"rounded_product: {len(x)} rows of {x.rounding} to {tuple(out.shape)} with a weight {rounding}"
        )
    parts = bound.cut.parts(out)
    bound.product(parts, x.codes, weight.weight, x.scales, weight.scale, bias)
    if bound.cut.is_split:
        bound.add_segments(out, parts, x.scales, weight.scale, bias)


@dataclass(frozen=True, slots=True)
class _Launches:
    cut: Cut
    product: Launch
    add_segments: Launch


@once_a_layout
def _bound(
    out: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    num_outputs: int,
    size: int,
    is_by_group: bool,
    is_given: bool,
) -> _Launches:
    """`x`: None where rows are rounded already. `is_given`: whether rows' scale is that of all, and in `scale`."""
    x = out.new_empty((len(out), size)) if x is None else x
    count, num_chunks = len(x), len(weight)
    check_rows("rounded_product", x=x)
    check_rows("rounded_product", out=out)
    if x.shape[1] != size or out.shape != (count, num_outputs) or out.dtype != x.dtype:
        raise ValueError(
            f"rounded_product: {tuple(x.shape)} {x.dtype} to {tuple(out.shape)} {out.dtype} with a weight "
            f"{(num_outputs, size)}"
        )
    if bias is not None:
        check_contiguous("rounded_product", "bias", bias, (num_outputs,), x)
    cut = Cut.of(count, num_outputs, num_chunks)
    product = Launch(
        _rounded_product_kernel,
        cut.grid,
        (count, num_outputs if cut.is_split else out.stride(0), 0 if is_given else scales_stride(count)),
        OUTPUTS=num_outputs,
        CHUNKS=num_chunks,
        CHUNKS_OF_SEGMENT=cut.segment,
        CHUNK=CHUNK,
        BLOCK_N=TILE,
        BLOCK_M=cut.block_m,
        IS_BY_GROUP=is_by_group,
        IS_SPLIT=cut.is_split,
        num_stages=_NUM_STAGES,
    )
    add_segments = Launch(
        _add_segments_kernel,
        (count, cdiv(num_outputs, _SUMMED_ELEMENTS)),
        (count, out.stride(0)),
        OUTPUTS=num_outputs,
        SEGMENTS=cut.num_segments,
        BLOCK=_SUMMED_ELEMENTS,
        IS_BY_GROUP=is_by_group,
    )
    return _Launches(cut, product, add_segments)


def round_codes(weight: QuantizedWeight) -> RoundedCodes | None:
    """None for a weight whose rows stay as they are, and where this layout has no place for it: groups of other sizes,
    zeros, offsets, rows that are too long. The order of its columns is the caller's to keep."""
    is_by_group = weight.inputs is Inputs.E4M3_BY_GROUP
    dtype = torch.int8 if weight.inputs is Inputs.INT8 else torch.float8_e4m3fn
    wanted = {Inputs.INT8: Numbers.INT8, Inputs.E4M3: Numbers.E4M3, Inputs.E4M3_BY_GROUP: Numbers.E4M3}
    if wanted.get(weight.inputs) is not weight.numbers or weight.zero is not None or weight.offset is not None:
        return None
    size, group = weight.in_features, min(weight.group, weight.in_features)
    if group != (min(GROUP, size) if is_by_group else size) or not (is_by_group or fits(size)):
        return None
    rows = -weight.out_features % TILE
    codes = torch.nn.functional.pad(weight.codes, (0, -size % CHUNK, 0, rows))
    codes = codes.view(codes.shape[0], -1, CHUNK).transpose(0, 1).contiguous().view(dtype)
    row_scale = None if is_by_group else weight.input_scale
    scale = torch.nn.functional.pad(weight.scale, (0, 0, 0, rows)).t().contiguous()
    scale = scale if row_scale is None else scale * row_scale
    of_zero = None
    if weight.input_zero and row_scale is not None:
        sums = weight.codes.view(torch.int8).sum(dim=1, dtype=torch.int64) * weight.input_zero
        of_zero = (sums.double() * scale[0, : weight.out_features].double()).float()
    rounding = Rounding(dtype, size, is_by_group, row_scale, 0 if of_zero is None else weight.input_zero)
    return RoundedCodes(weight.out_features, size, codes, scale, rounding, of_zero)


def variants() -> Iterator[Variant]:
    """Each format with few rows and with many; and sizes that no tile divides."""
    for dtype, is_by_group in (("i8", False), ("fp8e4nv", False), ("fp8e4nv", True)):
        for num_outputs, size, block_m in ((4096, 4096, 16), (4096, 4096, MOST_ROWS), (1000, 584, MOST_ROWS)):
            num_chunks = triton.cdiv(size, CHUNK)
            segment = chunks_of_segment(num_outputs, num_chunks)
            is_split = block_m < MOST_ROWS and segment < num_chunks
            pointers = {"out": "*fp32" if is_split else "*bf16", "x": f"*{dtype}", "weight": f"*{dtype}"}
            pointers |= dict.fromkeys(["row_scale", "scale"], "*fp32") | ({"bias": "*bf16"} if size == 584 else {})
            yield Variant(
                f"rounded_product {dtype}{' by group' * is_by_group}: {num_outputs} x {size}, {block_m} rows",
                _rounded_product_kernel,
                pointers | dict.fromkeys(["count", "out_stride", "row_scale_stride"], "i32"),
                ({} if size == 584 else {"bias": None})
                | {"OUTPUTS": num_outputs, "CHUNKS": num_chunks, "CHUNKS_OF_SEGMENT": segment, "CHUNK": CHUNK}
                | {"BLOCK_N": TILE, "BLOCK_M": block_m}
                | {"IS_BY_GROUP": is_by_group, "IS_SPLIT": is_split},
                num_stages=_NUM_STAGES,
                divisible_by_16=(*pointers, "row_scale_stride", *["out_stride"] * (num_outputs % 16 == 0)),
                may_spill=False,
                capabilities=range(89, 130) if dtype == "fp8e4nv" else CAPABILITIES,
            )
    for is_by_group in (False, True):
        yield Variant(
            f"rounded_product segments{' by group' * is_by_group}",
            _add_segments_kernel,
            {"out": "*bf16", "parts": "*fp32", "row_scale": "*fp32", "scale": "*fp32", "count": "i32"}
            | {"out_stride": "i32"},
            {"bias": None, "OUTPUTS": 4096, "SEGMENTS": 4, "BLOCK": _SUMMED_ELEMENTS, "IS_BY_GROUP": is_by_group},
            divisible_by_16=("out", "parts", "row_scale", "scale", "out_stride"),
            may_spill=False,
        )
