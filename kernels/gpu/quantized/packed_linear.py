"""A `QuantizedWeight` that is multiplied as `packed_product` does, or expanded for many rows; its columns' order."""

from __future__ import annotations

import math

import torch

from kernels.gpu.quantized.expanded_weight import expanded_weight, expanding_rows, slabs
from kernels.gpu.quantized.packed_codes import PackedCodes, pack_codes
from kernels.gpu.quantized.packed_product import packed_product
from kernels.quantized_weight import QuantizedWeight


class PackedLinear:
    """out = x W^T + bias; see `packed_product`. Activations are not rounded; what is expanded is, to their type."""

    def __init__(
        self, packed: PackedCodes, order: torch.Tensor | None, bias: torch.Tensor | None, *, may_expand: bool
    ) -> None:
        """`order` i64[K] as `QuantizedWeight` has it; bias [N]; `may_expand`: see `quantized_product`."""
        self._packed, self._order, self._bias = packed, order, bias
        self._expanding_rows = expanding_rows(packed.device) if may_expand else math.inf
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.weight_bytes = packed.nbytes + sum(x.nbytes for x in (order, bias) if x is not None)

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None, *, may_expand: bool = False) -> PackedLinear | None:
        """None where there is no such layout for the weight."""
        packed = pack_codes(weight)
        return None if packed is None else cls(packed, weight.order, bias, may_expand=may_expand)

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, N], x [T, K]: rows of adjacent elements at any stride, of one type of 16 or 32 bits."""
        # Gathered once: in the product each tile of outputs would gather anew.
        rows = x if self._order is None else x.index_select(1, self._order)
        if len(x) < self._expanding_rows:
            packed_product(out, rows, self._packed, self._bias)
            return
        for some in slabs(self.out_features, self.in_features, x.itemsize):
            weight = expanded_weight(self._packed, x.dtype, some)
            if self._bias is None:
                torch.mm(rows, weight.t(), out=out[:, some])
            else:
                torch.addmm(self._bias[some], rows, weight.t(), out=out[:, some])
