"""A `QuantizedWeight` whose rows are rounded to eight bits before they are multiplied, where its format has it so."""

from __future__ import annotations

import torch

from kernels.gpu.quantized.rounded_product import RoundedCodes, round_codes, rounded_product
from kernels.gpu.quantized.rounding import RoundedRows
from kernels.quantized_weight import Inputs, QuantizedWeight

_E4M3_CAPABILITY = (8, 9)  # from which on tensor cores multiply it


class RoundedLinear:
    """out = x W^T + bias; see `rounded_product`.

    Attributes:
        rounding: how rows may be rounded before they come here; None: not at all, for their order changes first.
    """

    def __init__(self, codes: RoundedCodes, order: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """`order` i64[K] as `QuantizedWeight` has it; bias [N]."""
        if codes.of_zero is not None:
            bias = -codes.of_zero if bias is None else bias.float() - codes.of_zero
        self._codes, self._order, self._bias = codes, order, bias
        self.rounding = codes.rounding if order is None else None
        self.in_features, self.out_features = codes.in_features, codes.out_features
        self.weight_bytes = codes.nbytes + sum(x.nbytes for x in (order, bias) if x is not None)

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> RoundedLinear | None:
        """None where the weight has no such layout, its rows stay as they are, or the card has no such product."""
        if weight.inputs is not Inputs.INT8 and not has_e4m3_products(weight.codes.device):
            return None
        codes = round_codes(weight)
        return None if codes is None else cls(codes, weight.order, bias)

    def multiply(self, out: torch.Tensor, x: torch.Tensor | RoundedRows) -> None:
        """out [T, N], x [T, K]: rows of adjacent elements at any stride, of one type of 16 or 32 bits; or such rows,
        rounded as `rounding` says."""
        if self._order is not None:
            if isinstance(x, RoundedRows):
                raise ValueError("rounded_product: inputs have an order of their own, and rows are rounded already")
            x = x.index_select(1, self._order)
        rounded_product(out, x, self._codes, self._bias)


def has_e4m3_products(device: torch.device) -> bool:
    """Whether the card has them, as Triton's interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY
