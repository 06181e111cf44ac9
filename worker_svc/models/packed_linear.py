"""y = x W^T + b by the compiled product of `kernels.cpu.matmul`, the same bits for one row as for thousands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker_svc.huge_pages import HugePages

if TYPE_CHECKING:
    from kernels.cpu.layer_product import Product


class PackedLinear:
    """See `Linear`; on a CPU. Of bfloat16 rows the sums are float32, too, and rounded once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, memory: HugePages | None = None) -> None:
        from kernels.cpu.matmul import matmul  # here, so that a worker with a GPU waits for no compiler of CPU code
        from kernels.cpu.packed_weight import pack

        self._matmul = matmul
        packed = pack(weight)
        self._packed = packed if memory is None else memory.keep(packed)
        self._bias = None if bias is None else bias.float()
        self._out_features = weight.shape[0]
        self.weight_bytes = self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._out_features, dtype=torch.float32)
        self._matmul(out, x.float(), self._packed, self._bias)
        return out.to(x.dtype)

    def compiled(self, in_features: int) -> Product:
        """What compiled code needs to multiply by this weight. Raises ValueError where it has not so many inputs."""
        from kernels.cpu.layer_product import Product

        return Product.of_floats(self._packed, self._bias, self._out_features, in_features)

    @staticmethod
    def is_fastest(weight: torch.Tensor) -> bool:
        """Whether this form is worth while: with registers of 16 numbers; bfloat16 has instructions of its own."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return False
        from kernels.cpu.registers import HAS_WIDE_REGISTERS

        return HAS_WIDE_REGISTERS
