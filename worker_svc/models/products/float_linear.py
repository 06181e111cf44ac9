"""y = x W^T + b with a weight in the model's own type, by the device's own library."""

from __future__ import annotations

import torch
from torch.nn import functional


class FloatLinear:
    """See `Linear`; on a GPU. Which bits a row gets may depend on how many rows there are: with `--batch-invariant`
    layers are `TiledLinear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return functional.linear(x, self._weight, self._bias)
