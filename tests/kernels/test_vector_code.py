"""The words that CPU kernels are written in: the example of their page runs, and each does what it says."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit, types
from numba.core import cgutils

from kernels.cpu.vectors import vector_code
from kernels.cpu.vectors.numbers import BFLOAT16, FLOAT32, address_of
from kernels.cpu.vectors.vector_code import (
    F32X16,
    I32X16,
    LANES,
    at,
    intrinsic,
    load,
    load_elements,
    reduce,
    reduce_rows,
    store,
    store_elements,
    transpose,
)

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: np.int16(0)}


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"^    @intrinsic\n(?:    .*\n|\n)+", vector_code.__doc__ or "", re.M)
    names: dict[str, Any] = {**vars(vector_code), "types": types, "cgutils": cgutils}
    exec(textwrap.dedent(example), names)
    add_scaled = names["add_scaled"]
    out, x = torch.randn(3 * LANES), torch.randn(3 * LANES)
    expected = torch.addcmul(out.double(), x.double(), torch.tensor(0.5, dtype=torch.float64)).float()

    @njit
    def run(out, x, factor, count):
        add_scaled(out, x, factor, count)

    run(out.data_ptr(), x.data_ptr(), np.float32(0.5), len(x))
    assert torch.equal(out, expected)


@intrinsic
def _convert(typing_context: Any, element: Any, x: Any, wide: Any, back: Any) -> Any:
    """wide f32[16] = x, 16 elements; then back, 16 elements, = wide times 1 + 2^-9, which most elements cannot hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = load_elements(builder, arguments[1], element)
        store(builder, values, arguments[2])
        factor = vector_code.constant(F32X16, 1 + 2**-9)
        store_elements(builder, builder.fmul(values, factor), arguments[3], element)
        return context.get_dummy_value()

    return types.void(element, *[types.intp] * 3), generate


@njit
def _run_convert(element, x, wide, back):
    _convert(element, x, wide, back)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_elements_become_float32_and_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(LANES - 6), torch.tensor([0.0, -0.0, 1.0, 3e-6, -3e4, 1 + 2**-7]))).to(dtype)
    wide, back = torch.empty(LANES), torch.empty_like(x)
    _run_convert(ELEMENTS[dtype], x.data_ptr(), wide.data_ptr(), back.data_ptr())
    assert torch.equal(wide, x.float())
    assert torch.equal(back, (x.float() * (1 + 2**-9)).to(dtype))


@intrinsic
def _over_a_tile(typing_context: Any, x: Any, turned: Any, sums: Any, largest: Any) -> Any:
    """turned = x^T, f32[16, 16]; sums f32[2] of the first 64 numbers and the next; largest: of the first 16 as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, turned, sums, largest = arguments
        row = start.type(LANES * 4)
        places = [at(builder, start, builder.mul(row, row.type(r))) for r in range(LANES)]
        rows = [load(builder, place, F32X16) for place in places]
        for r, column in enumerate(transpose(builder, rows)):
            store(builder, column, at(builder, turned, builder.mul(row, row.type(r))))

        def add(builder: Any, a: Any, b: Any) -> Any:
            return builder.fadd(a, b)

        for i, total in enumerate(reduce_rows(builder, [rows[:4], rows[4:8]], add)):
            store(builder, total, at(builder, sums, row.type(4 * i)))
        store(builder, reduce(builder, "umax", builder.bitcast(rows[0], I32X16)), largest)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@njit
def _run_over_a_tile(x, turned, sums, largest):
    _over_a_tile(x, turned, sums, largest)


def test_a_tile_is_turned_and_rows_are_summed_in_one_order() -> None:
    x, turned, sums = torch.randn(LANES, LANES), torch.empty(LANES, LANES), torch.empty(2)
    largest = torch.empty(1, dtype=torch.int32)
    _run_over_a_tile(x.data_ptr(), turned.data_ptr(), sums.data_ptr(), largest.data_ptr())
    assert torch.equal(turned, x.T)
    parts = x[:8].view(2, 2, 2, LANES)  # vectors 0 + 1 and 2 + 3, then these, then halves of what is left
    parts = parts.sum(2).sum(1)
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    assert torch.equal(sums, parts[:, 0])
    assert int(largest) & 0xFFFFFFFF == max(bits & 0xFFFFFFFF for bits in x[0].view(torch.int32).tolist())


@njit
def _address_or(array, other, is_wanted):
    return address_of(array) if is_wanted else other


def test_an_address_meets_one_that_was_passed_on_and_both_stay_integers() -> None:
    """With numpy's own, which has no sign, numba makes float64 of the two, or compiles a kernel for each."""
    array = np.zeros(3)
    found = _address_or(array, np.int64(1), True)
    assert isinstance(found, int) and found == array.ctypes.data
    assert all(signature.return_type == types.int64 for signature in _address_or.nopython_signatures)
