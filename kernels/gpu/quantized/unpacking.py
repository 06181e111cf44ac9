"""The inner loop of products with packed codes: words to numbers, and the sums of a group, which are scaled once.

    sum over groups g of  scale[n, g] * sum over k in g of x[k] (number[n, k] - zero[n, g])  +  offset[n, g] * sums[g]

with sums[g] = sum over k in g of x[k]. A number less its zero is exact in each type of activations: what is rounded is
sums in float32, and nothing of the weight. Two codes are unpacked at once, one in each half of a word: their bits are
made those of float16 numbers, without a conversion from integers.

    4 bits, 6, 8    the low bits of a float16 number from 1024 on (of a bfloat16 one from 128 on), less that
    E4M3, E2M1      sign, exponent and mantissa moved to their places; the exponents' other bias is in the scale

(The trick with 1024 is of Kim et al. 2022, arXiv:2211.10017.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def packed_sum(  # type: ignore[no-untyped-def]
    x,
    words,
    high,
    scale,
    scale_factor,
    zero,
    offset,
    offset_factor,
    sums,
    sums_stride,
    first_chunk,
    past_chunk,
    LINES: tl.constexpr,
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """f32[BLOCK_N, BLOCK_M]: over some chunks of inputs, the products of outputs and rows. LINES: outputs, padded.
    SEGMENT: chunks that are summed from zero, 0: all of them; then the segments' sums are added in order.

    Addresses: x of rows [1, BLOCK_M]; words and high of outputs [BLOCK_N, 1] in the first chunk of all; scale, zero and
    offset of outputs [BLOCK_N] in the first group, factors in the first chunk; sums of rows [BLOCK_M], first group.
    """
    fields: tl.constexpr = 4 if (NUMBERS == "int8" or NUMBERS == "e4m3") else 8
    chunk_size: tl.constexpr = fields * WIDTH
    # In one chunk, which is a group where there is a scale an output.
    fields_of_group: tl.constexpr = min(GROUP // WIDTH, fields) if GROUP else fields
    # Exponents of the numbers as `numbers_of` leaves them.
    factor: tl.constexpr = 256.0 if NUMBERS == "e4m3" else 16384.0 if NUMBERS == "e2m1" else 1.0
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, WIDTH)
    skipped = tl.cast(first_chunk, tl.int64) * (LINES * WIDTH)
    words += skipped + column[None, :]
    if high is not None:
        high += skipped + column[None, :]
    if scale_factor is not None:
        scale_factor += tl.cast(first_chunk, tl.int64) * LINES
    if offset_factor is not None:
        offset_factor += tl.cast(first_chunk, tl.int64) * LINES
    x += first_chunk * chunk_size + column[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        of_outputs = tl.load(scale).to(tl.float32) * factor
    if SEGMENT:
        of_segments = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in range(first_chunk, past_chunk):
        packed = tl.load(words)
        words += LINES * WIDTH
        upper = None
        if high is not None:
            upper = tl.load(high)
            high += LINES * WIDTH
        for field in tl.static_range(fields):
            if SIZE % chunk_size != 0:
                b = tl.load(x + field * WIDTH, (chunk * chunk_size + field * WIDTH + column < SIZE)[:, None], 0.0)
            else:
                b = tl.load(x + field * WIDTH)
            if field % fields_of_group == 0:
                group = (chunk * chunk_size + field * WIDTH) // GROUP if GROUP else 0
                place = tl.cast(group, tl.int64) * LINES
                nought = None
                if zero is not None:
                    nought = tl.load(zero + place)
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            a = numbers_of(packed, upper, nought, field, NUMBERS, dtype)
            part = tl.dot(a, b, part, input_precision="ieee")
            if field % fields_of_group == fields_of_group - 1:
                if GROUP:
                    of_outputs = tl.load(scale + place).to(tl.float32) * factor
                    if scale_factor is not None:
                        of_outputs *= tl.load(scale_factor)
                # Said to be one operation: as two, compilers may or may not make them one, tile by tile.
                total = tl.fma(part, tl.broadcast_to(of_outputs[:, None], total.shape), total)
                if offset is not None:
                    of_rows = tl.load(sums + tl.cast(group, tl.int64) * sums_stride)
                    offsets = tl.load(offset + place).to(tl.float32)
                    if offset_factor is not None:
                        offsets *= tl.load(offset_factor)
                    offsets = tl.broadcast_to(offsets[:, None], total.shape)
                    total = tl.fma(offsets, tl.broadcast_to(of_rows[None, :], total.shape), total)
        x += chunk_size
        if scale_factor is not None:
            scale_factor += LINES
        if offset_factor is not None:
            offset_factor += LINES
        if SEGMENT:  # noqa: SIM102  # known when it is compiled, as what follows is not
            # One loop rather than two: what is loaded ahead goes on to be, into the next segment.
            if (chunk + 1) % SEGMENT == 0 or chunk + 1 == past_chunk:
                of_segments += total
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if SEGMENT:
        return of_segments
    return total


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def numbers_of(words, high, zero, FIELD: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What field FIELD of `words` [N, width] stands for less `zero` [N], in DTYPE; of E4M3 2^-8 and of E2M1 2^-14 of
    it."""
    is_byte: tl.constexpr = NUMBERS == "int8" or NUMBERS == "e4m3"
    is_short: tl.constexpr = NUMBERS == "uint4" and tl.bfloat16 == DTYPE
    bits: tl.constexpr = 8 if is_byte else 4
    half: tl.constexpr = 16 // bits  # fields in half a word
    pairs = words >> (bits * (FIELD % half))
    if NUMBERS == "e4m3":
        pairs = ((pairs & 0x00800080) << 8) | ((pairs & 0x007F007F) << 7)
    elif NUMBERS == "e2m1":
        pairs = ((pairs & 0x00080008) << 12) | ((pairs & 0x00070007) << 9)
    else:
        mask: tl.constexpr = 0x00FF00FF if is_byte else 0x000F000F
        exponents: tl.constexpr = 0x43004300 if is_short else 0x64006400
        pairs = (pairs & mask) | exponents
    if half <= FIELD:
        pairs = pairs >> 16
    of_field = pairs.to(tl.int16)
    if NUMBERS == "int6":
        of_field = of_field | (((high >> (2 * FIELD)) & 3) << 4)
    numbers = of_field.to(tl.bfloat16 if is_short else tl.float16, bitcast=True)
    if NUMBERS != "e4m3" and NUMBERS != "e2m1":
        least: tl.constexpr = 128 if is_short else 1024
        nought: tl.constexpr = least + (32 if NUMBERS == "int6" else 128 if NUMBERS == "int8" else 0)
        if zero is None:
            numbers = numbers - nought
        else:
            numbers = numbers - (zero.to(tl.int32) + nought).to(numbers.dtype)[:, None]
    return numbers.to(DTYPE)
