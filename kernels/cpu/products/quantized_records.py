"""A `QuantizedWeight` as records: every number stays what it is, bit for bit, or there are no records of it."""

from __future__ import annotations

import torch

from kernels.cpu.library import library, num_threads
from kernels.cpu.products.records import (
    GROUP,
    INPUTS_OF_FACTORS,
    Codes,
    Offset,
    Records,
    RecordWeight,
    Scale,
)
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight

_CODES = {
    Numbers.UINT4: Codes.UINT4,
    Numbers.INT6: Codes.INT8,
    Numbers.INT8: Codes.INT8,
    Numbers.E4M3: Codes.E4M3,
    Numbers.E2M1: Codes.E2M1,
}
_CODES_OF_ROUNDED = {Numbers.UINT4: Codes.UINT4, Numbers.INT6: Codes.INT6, Numbers.INT8: Codes.QUADS}
_TIMES = {Codes.E2M1: 0.5, Codes.E4M3: 256.0}  # of scales, as codes stand for twice or for a 256th of their numbers
_INT4_ZERO = 8
_CODES_AT_ONCE = 16  # that become words
# What the largest of some factors may be, the likely first: files have 63 or little less (Q4_K), or -128 (Q6_K). Less
# than half of the most can be doubled, unless what it is a factor of is too small for that.
_LARGEST_FACTORS = torch.tensor(
    (63, -128, *range(62, 31, -1), *range(127, 63, -1), *range(-127, -63), *range(31, 0, -1)), dtype=torch.int32
)


def pack_quantized(weight: QuantizedWeight) -> RecordWeight | None:
    """Its columns as they come, whatever its `order`. None where no record says the same numbers, or none that rows
    can be multiplied by which are rounded as its `inputs` say.

    These are `fl(scale * code)` or, with an offset or a zero, numbers that one fused multiply-add makes of an exact
    product: so `weight.dequantized()`, but for the sign of a zero.
    """
    of_numbers = _CODES_OF_ROUNDED if weight.inputs is Inputs.INT8 else _CODES
    if weight.numbers not in of_numbers:
        return None
    codes, group, in_features = of_numbers[weight.numbers], weight.group, weight.in_features
    group = -(-in_features // GROUP) * GROUP if group >= in_features else group
    if in_features % GROUP or group % (GROUP if codes.bits == 4 else GROUP // 2) or weight.codes.numel() == 0:
        return None
    if codes is Codes.E4M3 and bool(((weight.codes & 0x7F) == 0x7F).any()):  # NaN, which float16 has elsewhere
        return None
    if codes in (Codes.E2M1, Codes.E4M3) and (weight.zero is not None or weight.offset is not None):
        return None
    if weight.numbers is Numbers.INT8 and weight.offset is not None:  # with factors, products would not be exact
        return None
    if codes is Codes.UINT4 and weight.zero is not None and bool((weight.zero == _INT4_ZERO).all()):
        codes = Codes.INT4
    if (scales := _times(weight.scale, _TIMES.get(codes, 1.0))) is None:
        return None
    kept = _with_lines(codes, group, scales, weight) or _with_factors(codes, group, scales, weight)
    if kept is None:
        return None
    records, head, lines = kept
    return RecordWeight(records, _in_records(records, head, lines, weight.codes), *weight.codes.shape)


# A format; what precedes the lines of its records, and the lines, as parts [N, records or groups] of one type each.
_Kept = tuple[Records, list[torch.Tensor], list[torch.Tensor]]


def _with_lines(codes: Codes, group: int, scales: torch.Tensor, weight: QuantizedWeight) -> _Kept | None:
    """Each group with a scale of its own, in the fewest bytes; None where factors are smaller, or it is not exact."""
    is_half = _fits_float16(scales)
    scale, line = (Scale.FLOAT16, scales.half()) if is_half else (Scale.FLOAT32, scales)
    if weight.offset is not None:
        if not is_half or not _fits_float16(weight.offset):
            return None
        return Records(codes, scale, Offset.FLOAT16, group), [], [line, weight.offset.half()]
    if weight.zero is not None and codes is not Codes.INT4:
        # Products with zeros have to be exact, and so may need 8 bits more than a scale.
        is_exact = is_half or not bool((scales.view(torch.int32) & 0xFF).any())
        if not is_exact or bool((weight.zero.abs() > torch.iinfo(torch.int8).max).any()):
            return None
        return Records(codes, scale, Offset.ZERO, group), [], [line, weight.zero.to(torch.int8)]
    may_be_factors = group < INPUTS_OF_FACTORS and weight.in_features % INPUTS_OF_FACTORS == 0
    if not is_half and may_be_factors and (kept := _with_factors(codes, group, scales, weight)) is not None:
        return kept
    return Records(codes, scale, Offset.NOTHING, group), [], [line]


def _with_factors(codes: Codes, group: int, scales: torch.Tensor, weight: QuantizedWeight) -> _Kept | None:
    """Scales, and offsets, as multiples of one float16 number for 256 inputs."""
    if INPUTS_OF_FACTORS % group or weight.in_features % INPUTS_OF_FACTORS or weight.zero is not None:
        return None
    found = find_factors(scales, INPUTS_OF_FACTORS // group)
    if found is None:
        return None
    if weight.offset is None:
        return Records(codes, Scale.FACTOR, Offset.NOTHING, group), [found[0]], [found[1]]
    of_offsets = find_factors(weight.offset, INPUTS_OF_FACTORS // group)
    if of_offsets is None:
        return None
    head, lines = zip(found, of_offsets, strict=True)
    return Records(codes, Scale.FACTOR, Offset.FACTOR, group), list(head), list(lines)


def find_factors(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """numbers f32[N, G] as f16[N, G / count] times i8[N, G]: each of `count` in a row is a multiple of one number. None
    where they are not, to the bit (but for the sign of a zero)."""
    # Numbers that are no factors show so in the first row, nearly always: trying all factors of all rows takes longer
    # than packing.
    if len(numbers) > 1 and find_factors(numbers[:1], count) is None:
        return None
    numbers = numbers.contiguous()
    base, factors = (
        numbers.new_empty(numbers.numel() // count, dtype=torch.float16),
        numbers.new_empty(numbers.shape, dtype=torch.int8),
    )
    places = base.data_ptr(), factors.data_ptr(), numbers.data_ptr()
    tried = _LARGEST_FACTORS.data_ptr(), len(_LARGEST_FACTORS)
    if not library().find_factors(*places, len(base), count, *tried, num_threads()):
        return None
    return base.view(len(numbers), -1), factors


def _in_records(
    records: Records, head: list[torch.Tensor], lines: list[torch.Tensor], codes: torch.Tensor
) -> torch.Tensor:
    """u8[panels, bytes]; head [N, records] and lines [N, groups] of any type, codes u8[N, K]."""
    out_features, in_features = codes.shape
    codes = _in_words(records.codes, codes)
    whole, rest = divmod(in_features, records.inputs)
    # Section by section: how many columns of each part are in a whole record.
    sections = (
        (head, 1),
        (lines, records.inputs // records.group),
        ([codes], codes.shape[1] * records.inputs // in_features),
    )
    kept, parts = [], []
    for section, (tensors, of_record) in enumerate(sections):
        for tensor in (each.contiguous() for each in tensors):
            kept.append(tensor)
            parts.append((section, tensor.data_ptr(), tensor.dtype.itemsize, tensor.shape[1], of_record))
    described = torch.tensor(parts)
    num_panels, panel_bytes = records.packed_shape(out_features, in_features)
    packed = torch.empty(num_panels, panel_bytes, dtype=torch.uint8)
    sizes = out_features, whole, rest > 0, panel_bytes
    library().pack_records(packed.data_ptr(), described.data_ptr(), len(parts), *sizes, num_threads())
    return packed


def _in_words(kind: Codes, codes: torch.Tensor) -> torch.Tensor:
    """Codes u8[N, K] as a record has those of an output, one after the other: words i32[N, ...], or bytes."""
    if kind.bits == 8 and kind is not Codes.QUADS:
        return codes
    codes = codes.contiguous()
    words = torch.empty(len(codes), codes.shape[1] * kind.bits // 32, dtype=torch.int32)
    library().put_words(kind, codes.data_ptr(), words.data_ptr(), codes.numel() // _CODES_AT_ONCE, num_threads())
    return words


def _times(scales: torch.Tensor, times: float) -> torch.Tensor | None:
    """None where some are not finite, or are not themselves again when they are divided."""
    if times != 1.0:
        scales, given = scales * times, scales
        if not torch.equal(scales / times, given):
            return None
    least, most = torch.aminmax(scales)  # NaN where there is one
    return scales if bool(torch.isfinite(least) & torch.isfinite(most)) else None


def _fits_float16(numbers: torch.Tensor) -> bool:
    """Those that do not show so in the first row, nearly always."""
    return all(torch.equal(some.half().float(), some) for some in (numbers[:1], numbers))
