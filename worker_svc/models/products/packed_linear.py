"""y = x W^T + b by the compiled product of `products.matmul`, the same bits for one row as for thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker_svc.host.huge_pages import HugePages

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product


class PackedLinear:
    """See `Linear`; on a CPU. Of bfloat16 rows the sums are float32, too, and rounded once.

    With AMX oneDNN has faster products for many rows, but gives a row other bits in some numbers of rows than in
    others: so it is not taken there either.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugePages | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: of rows (default: the weight's). A weight of bfloat16 may be for rows of float32."""
        # Here, so that a worker with a GPU waits for no compiler of CPU code.
        from kernels.cpu.library import library
        from kernels.cpu.products.layer_product import Product
        from kernels.cpu.products.packed_weight import pack, pack_pairs

        memory, dtype = memory or HugePages(), dtype or weight.dtype
        has_pairs = library().has_pairs and dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        self._packed = pack_pairs(weight, memory.new) if has_pairs else pack(weight, dtype, memory.new)
        self._bias = None if bias is None else bias.float()
        self._out_features = weight.shape[0]
        self._product = Product.of_floats(self._packed, self._bias, *weight.shape)
        self.weight_bytes = self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = x.new_empty(x.shape[0], self._out_features)
        self._product.multiply(out, x)
        return out

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs to multiply by this weight. Raises ValueError where it has not so many inputs."""
        from kernels.cpu.products.layer_product import Product

        return Product.of_floats(self._packed, self._bias, self._out_features, in_features)
