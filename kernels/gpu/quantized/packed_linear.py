"""A `QuantizedWeight` that is multiplied as `packed_product` does, with its columns' order."""

from __future__ import annotations

import torch

from kernels.gpu.quantized.packed_codes import PackedCodes, pack_codes
from kernels.gpu.quantized.packed_product import packed_product
from kernels.quantized_weight import QuantizedWeight


class PackedLinear:
    """out = x W^T + bias; see `packed_product`. Activations are not rounded."""

    def __init__(self, packed: PackedCodes, order: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """`order` i64[K] as `QuantizedWeight` has it; bias [N]."""
        self._packed, self._order, self._bias = packed, order, bias
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.weight_bytes = packed.nbytes + sum(x.nbytes for x in (order, bias) if x is not None)

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedLinear | None:
        """None where there is no such layout for the weight."""
        packed = pack_codes(weight)
        return None if packed is None else cls(packed, weight.order, bias)

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, N], x [T, K]: rows of adjacent elements at any stride, of one type of 16 or 32 bits."""
        # Gathered once: in the product each tile of outputs would gather anew.
        rows = x if self._order is None else x.index_select(1, self._order)
        packed_product(out, rows, self._packed, self._bias)
