"""Dense layers within a compiled pass: each says itself how its weight is kept, and the lanes of a loop share it.

A record of `PRODUCT` holds what `matmul` would be told. Weights of one model may be kept in several ways, so which of
them it is is asked at run time, once a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from kernels.cpu.matmul import items_of, multiply_panels
from kernels.cpu.packed_weight import ELEMENTS, packed_shape
from kernels.cpu.shared_work import wait

PRODUCT = np.dtype(
    [
        ("kind", np.int64),  # where the weight's type is among `ELEMENTS`
        ("weight", np.int64),  # addresses
        ("bias", np.int64),  # 0: none
        ("num_in", np.int64),
        ("num_out", np.int64),
    ]
)
_FLOAT32, _BFLOAT16, _UINT8, _INT8, _INT32 = ELEMENTS.values()


class Product:
    """A weight and its bias, checked once; `record` is of `PRODUCT`, and good for as long as this object lives."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> None:
        """A weight as `matmul` takes it. Raises ValueError for one that is not of this size."""
        if packed.shape != packed_shape(packed.dtype, out_features, in_features):
            raise ValueError(f"weight {tuple(packed.shape)} is not packed for {out_features} x {in_features}")
        self.out_features, self.in_features = out_features, in_features
        self._kept = packed, bias
        self.record = (
            list(ELEMENTS).index(packed.dtype),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            in_features,
            out_features,
        )


@njit(nogil=True)
def multiply(team: Any, phase: Any, product: Any, out: Any, x: Any, rows: Any) -> None:
    """out [rows, num_out] = x [rows, num_in] W^T + bias, in one phase; out and x are addresses of contiguous rows."""
    num_in, num_out = product.num_in, product.num_out
    num_items = items_of(rows, num_out, num_in)
    places = out, num_out, x, num_in, product.weight, product.bias, rows, num_out, num_in
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
