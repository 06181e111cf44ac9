"""y = x W^T + b by the product of fixed tiles in `kernels.gpu.matmul`, the same bits for one row as for thousands."""

from __future__ import annotations

import torch


class TiledLinear:
    """See `Linear`; on a GPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        from kernels.gpu.matmul import matmul  # here: only workers with a GPU need Triton

        self._matmul = matmul
        self._weight, self._bias = weight.contiguous(), bias
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        self._matmul(out, x, self._weight, self._bias)
        return out
