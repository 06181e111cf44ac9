"""Dense layers within a compiled pass: each says itself how its weight is kept, and the threads of a loop share it.

A record of `PRODUCT` holds what `matmul`, `int8_linear` or `int4_linear` would be told. Weights of one model may be
kept in several ways, so its kind is looked up at run time, once a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import extending, njit, types

from kernels.cpu.products.int4_linear import check_weight as check_int4_weight
from kernels.cpu.products.int4_linear import items_of_panels
from kernels.cpu.products.int4_linear import multiply_panels as multiply_int4_panels
from kernels.cpu.products.int4_linear import num_prefetching_inputs as num_inputs_of_int4
from kernels.cpu.products.int8_linear import DOT_KIND, check_weight, items_of_outputs
from kernels.cpu.products.int8_linear import multiply_panels as multiply_int8_panels
from kernels.cpu.products.int8_rows import items_of_rows, quantize_rows, rows_in
from kernels.cpu.products.matmul import items_of, multiply_panels
from kernels.cpu.products.packed_weight import ELEMENTS, packed_shape
from kernels.cpu.products.streamed_panels import num_prefetching_inputs as num_inputs_of_floats
from kernels.cpu.shared_work import wait

PRODUCT = np.dtype(
    [
        ("kind", np.int64),  # INT8, one of INT4, or where the type of a float weight is among `ELEMENTS`
        ("weight", np.int64),  # addresses
        ("scale", np.int64),  # of INT8, else 0
        ("bias", np.int64),  # 0: none
        ("num_in", np.int64),
        ("num_out", np.int64),
    ]
)
PHASES = 2  # of `shared_work`, for each product
INT8 = -1
INT4 = {torch.int32: -3, torch.uint8: -2}  # by the type of the packed weight: without minima, with
_INT4_WITH_MINIMUM = INT4[torch.uint8]
_FLOAT32, _BFLOAT16, _UINT8, _INT8, _INT32 = ELEMENTS.values()


class Product:
    """A weight with what belongs to it, checked once; `record`, of `PRODUCT`, is good for as long as this lives."""

    def __init__(
        self, kind: int, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, *sizes: int
    ) -> None:
        self.out_features, self.in_features = sizes
        self._kept = weight, scale, bias
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in self._kept)
        self.is_int8 = kind == INT8
        self.record = (kind, *addresses, self.in_features, self.out_features)

    @classmethod
    def of_floats(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> Product:
        """A weight as `matmul` takes it, for float32 rows. Raises ValueError for one that is not of this size."""
        if packed.shape != packed_shape(packed.dtype, out_features, in_features):
            raise ValueError(f"weight {tuple(packed.shape)} is not packed for {out_features} x {in_features}")
        return cls(list(ELEMENTS).index(packed.dtype), packed, None, bias, out_features, in_features)

    @classmethod
    def of_int4(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> Product:
        """A weight as `int4_linear` takes it, for float32 rows. Raises ValueError for one that is not of this size."""
        check_int4_weight(packed, bias, out_features, in_features)
        return cls(INT4[packed.dtype], packed, None, bias, out_features, in_features)

    @classmethod
    def of_int8(cls, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_features: int) -> Product:
        """A weight as `int8_linear` takes it, for rows of any type. Raises ValueError for one not of this size."""
        check_weight(packed, scale, bias, scale.shape[0], in_features)
        return cls(INT8, packed, scale, bias, scale.shape[0], in_features)


@njit(nogil=True)
def num_prefetching_inputs(product: Any, rows: Any) -> Any:
    """How many inputs prefetch what a cursor says while so many rows are multiplied; see `plan_prefetch`."""
    num_weights = product.num_in * product.num_out
    if product.kind >= 0:
        return num_inputs_of_floats(rows, num_weights)
    return 0 if product.kind == INT8 else num_inputs_of_int4(rows, num_weights)


@njit(nogil=True)
def multiply(
    team: Any, phase: Any, element: Any, product: Any, out: Any, x: Any, rows: Any, step: Any, cursor: Any
) -> None:
    """out [rows, num_out] = x [rows, num_in] W^T + bias in phases `phase : phase + PHASES`.

    element: of the rows, `out` and x, which are contiguous and given by their addresses. Of `step`: the bytes of an
    element, and for INT8 and INT4 a `workspace` of `int8_rows.workspace_bytes` and the `zeros` of a missing bias.
    `cursor`, of `cache_prefetch`: what all but those of INT8 prefetch meanwhile.
    """
    if product.kind == INT8:
        quantized = _quantize(team, phase, element, product, x, rows, step)
        num_items, row_bytes = items_of_outputs(product.num_out), product.num_out * step.element_bytes
        weight = product.weight, product.scale, product.bias, step.zeros, product.num_out
        multiply_int8_panels(team, phase + 1, num_items, (element, DOT_KIND, out, row_bytes, quantized, weight))
        wait(team, phase + 1, num_items)
    else:
        multiply_others(team, phase, element, product, out, x, rows, step, cursor)


@njit(nogil=True)
def _quantize(team, phase, element, product, x, rows, step):  # type: ignore[no-untyped-def]
    """The rows of x; see `int8_rows.rows_in`."""
    num_items, row_bytes = items_of_rows(rows), product.num_in * step.element_bytes
    quantized = rows_in(step.workspace, rows, product.num_in)
    quantize_rows(team, phase, num_items, (element, x, row_bytes, product.num_in, quantized))
    wait(team, phase, num_items)
    return quantized


def multiply_others(team, phase, element, product, out, x, rows, step, cursor):  # type: ignore[no-untyped-def]
    """`multiply` by weights for float32 rows; for compiled code alone."""
    raise NotImplementedError


@extending.overload(multiply_others, jit_options={"nogil": True})
def _multiply_others(team, phase, element, product, out, x, rows, step, cursor):  # type: ignore[no-untyped-def]
    return _multiply_float32 if element == types.float32 else _multiply_nothing


def _multiply_float32(team, phase, element, product, out, x, rows, step, cursor):  # type: ignore[no-untyped-def]
    if product.kind < INT8:
        _multiply_int4(team, phase, element, product, out, x, rows, step, cursor)
    else:
        _multiply_floats(team, phase, product, out, x, rows, cursor)


@njit(nogil=True)
def _multiply_int4(team, phase, element, product, out, x, rows, step, cursor):  # type: ignore[no-untyped-def]
    quantized = _quantize(team, phase, element, product, x, rows, step)
    num_items, has_minimum = items_of_panels(product.num_out), product.kind == _INT4_WITH_MINIMUM
    weight = product.weight, has_minimum, product.bias, step.zeros, product.num_out
    multiply_int4_panels(team, phase + 1, num_items, (DOT_KIND, out, product.num_out * 4, quantized, weight, cursor))
    wait(team, phase + 1, num_items)


@njit(nogil=True)
def _multiply_floats(team, phase, product, out, x, rows, cursor):  # type: ignore[no-untyped-def]
    num_in, num_out = product.num_in, product.num_out
    num_items = items_of(rows, num_out, num_in)
    places = out, num_out, x, num_in, product.weight, product.bias, rows, num_out, num_in, cursor
    if product.kind == 0:
        multiply_panels(team, phase, num_items, (_FLOAT32, *places))
    elif product.kind == 1:
        multiply_panels(team, phase, num_items, (_BFLOAT16, *places))
    elif product.kind == 2:
        multiply_panels(team, phase, num_items, (_UINT8, *places))
    elif product.kind == 3:
        multiply_panels(team, phase, num_items, (_INT8, *places))
    else:
        multiply_panels(team, phase, num_items, (_INT32, *places))
    wait(team, phase, num_items)


def _multiply_nothing(team, phase, element, product, out, x, rows, step, cursor):  # type: ignore[no-untyped-def]
    """No model with rows of another type has such weights: `LayerStack` sees to it."""
