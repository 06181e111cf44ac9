"""Products with weights of few bits by format, against the bytes that each reads, beside the same ones in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.shapes import HIDDEN, INTERMEDIATE
from kernels.gpu.operations import grouped_matmul, grouped_quantized_matmul, quantized_product
from kernels.gpu.quantized.packed_codes import pack_codes, stacked
from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight

_ROWS = (16, 4096)
_GOAL_ROWS = 16  # up to here reading the weight is the bound
_MATRIX_ROWS = 64  # from here on the matrix units are
_EXPERTS = ((8, 2, 2 * 14336, 4096), (128, 8, 2 * 768, 2048))  # see matrix_cases
_GPT_OSS_EXPERTS = (32, 4, 2 * 2880, 2880)
_EXPERT_TOKENS = (16, 4096)


@dataclass(frozen=True, slots=True)
class _Format:
    """Of the weight: what a number stands for, its group (0: a scale an output), the bits of a scale, and what else a
    group has; and what becomes of rows."""

    name: str
    numbers: Numbers
    group: int
    scale_bits: int
    has_zero: bool = False
    has_offset: bool = False
    inputs: Inputs = Inputs.AS_THEY_ARE

    def num_bytes(self, outputs: int, size: int) -> int:
        """As the format's numbers and scales are laid out for a GPU."""
        groups = -(-size // self.group) if self.group else 1
        of_group = self.scale_bits + 16 * self.has_zero + 32 * self.has_offset
        return outputs * (size * self.numbers.bits + groups * of_group) // 8

    def weight(self, setting: Setting, outputs: int, size: int) -> QuantizedWeight:
        """Random codes; scales are powers of two, or such that only float32 has them."""
        group, device = self.group or size, setting.device
        shape = outputs, -(-size // group)
        codes = torch.randint(0, 2**self.numbers.bits, (outputs, size), dtype=torch.uint8, device=device)
        if self.numbers is Numbers.INT6:
            codes -= 32
        if self.numbers is Numbers.E4M3:
            codes &= 0xBF  # no NaN, and nothing large
        scale = torch.full(shape, 2.0**-9 if self.scale_bits == 16 else 1.1 * 2**-9, device=device)
        zero = torch.full(shape, 8, dtype=torch.int16, device=device) if self.has_zero else None
        offset = torch.full(shape, 0.01, device=device) if self.has_offset else None
        return QuantizedWeight(self.numbers, codes, scale, group, zero, offset, inputs=self.inputs)


_FORMATS = (
    _Format("4 bits by 128", Numbers.UINT4, 128, 16, has_zero=True),
    _Format("4 bits by 32", Numbers.UINT4, 32, 16, has_zero=True),
    _Format("Q4_K", Numbers.UINT4, 32, 32, has_offset=True),
    _Format("Q6_K", Numbers.INT6, 16, 32),
    _Format("Q8_0", Numbers.INT8, 32, 16),
    _Format("MXFP4", Numbers.E2M1, 32, 16),
    _Format("E4M3, rows in 16 bits", Numbers.E4M3, 0, 32),
    _Format("E4M3, rows too", Numbers.E4M3, 0, 32, inputs=Inputs.E4M3),
    _Format("E4M3 by 128, rows too", Numbers.E4M3, 128, 32, inputs=Inputs.E4M3_BY_GROUP),
    _Format("int8, rows too", Numbers.INT8, 0, 32, inputs=Inputs.INT8),
)
_OF_EXPERTS = (_FORMATS[0], _FORMATS[5], _Format("E4M3 by 128", Numbers.E4M3, 128, 32))


def cases(setting: Setting) -> Iterator[Case]:
    """A layer's largest product by format and rows, then experts."""
    outputs, size = (40, 48) if setting.is_tiny else (2 * INTERMEDIATE, HIDDEN)
    for form in _FORMATS:
        for rows in (3,) if setting.is_tiny else _ROWS:
            yield _product(setting, form, rows, outputs, size)
    for form in _OF_EXPERTS:
        sizes = (*_EXPERTS, _GPT_OSS_EXPERTS) if form.numbers is Numbers.E2M1 else _EXPERTS
        for experts in ((3, 2, 40, 48),) if setting.is_tiny else sizes:
            for num_tokens in (5,) if setting.is_tiny else _EXPERT_TOKENS:
                yield _grouped(setting, form, num_tokens, *experts)


def _product(setting: Setting, form: _Format, rows: int, outputs: int, size: int) -> Case:
    def build() -> Calls:
        x = torch.randn(rows, size, dtype=setting.dtype, device=setting.device)
        out = torch.empty(rows, outputs, dtype=setting.dtype, device=setting.device)
        weight = form.weight(setting, outputs, size)
        product = quantized_product(weight, None, may_expand=True)
        if product is None:
            raise ValueError(f"there is no product for {form.name}")
        plain = weight.dequantized().to(setting.dtype)
        multiply = product.multiply

        def ours() -> torch.Tensor:
            multiply(out, x)
            return out

        # What rounds rows too has other results than the peer's: nothing to compare.
        def ours_rounded() -> None:
            multiply(out, x)

        is_plain = form.inputs is Inputs.AS_THEY_ARE
        peers = {"matmul in 16 bits": functools.partial(torch.matmul, x, plain.T)}
        return Calls(ours if is_plain else ours_rounded, peers)

    return Case(
        op="quantized_product",
        shape=f"{form.name}: {rows:,} x {size:,} to {outputs:,}",
        num_bytes=form.num_bytes(outputs, size) + (rows * size + rows * outputs) * setting.dtype.itemsize,
        flops=2 * rows * outputs * size,
        product=(rows, outputs, size, setting.dtype) if rows >= _MATRIX_ROWS else None,
        build=build,
        goal=Goal(0.8) if rows <= _GOAL_ROWS else None,
    )


def _grouped(
    setting: Setting, form: _Format, num_tokens: int, num_experts: int, chosen: int, outputs: int, size: int
) -> Case:
    rows = num_tokens * chosen
    moved = (num_tokens * size + rows * outputs) * setting.dtype.itemsize
    touched = min(num_experts, rows)  # experts whose weights are read, of so many rows that are spread evenly

    def build() -> Calls:
        device = setting.device
        x = torch.randn(num_tokens, size, dtype=setting.dtype, device=device)
        weight = form.weight(setting, outputs, size)
        packed = pack_codes(weight)
        if packed is None:
            raise ValueError(f"there is no product for {form.name}")
        weights = stacked([packed] * num_experts)
        plain = weight.dequantized().to(setting.dtype).expand(num_experts, -1, -1).contiguous()
        experts = torch.arange(rows, device=device) % num_experts
        tokens = experts.argsort(stable=True) // chosen
        starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        starts[1:] = torch.bincount(experts, minlength=num_experts).cumsum(0)
        out = torch.empty(rows, outputs, dtype=setting.dtype, device=device)

        def ours() -> torch.Tensor:
            grouped_quantized_matmul(out, x, weights, starts, tokens, may_expand=True)
            return out

        def in_16_bits() -> torch.Tensor:
            other = torch.empty_like(out)
            grouped_matmul(other, x, plain, starts, tokens)
            return other

        return Calls(ours, {"grouped_matmul in 16 bits": in_16_bits})

    return Case(
        op="grouped_quantized_matmul",
        shape=f"{form.name}: {num_tokens:,} tokens, {chosen} of {num_experts} experts, {size:,} to {outputs:,}",
        num_bytes=touched * form.num_bytes(outputs, size) + moved,
        flops=2 * rows * outputs * size,
        product=(rows, outputs, size, setting.dtype) if rows // num_experts >= _MATRIX_ROWS else None,
        build=build,
    )
