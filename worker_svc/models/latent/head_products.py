"""y[t, h] = W[h] x[t, h]: each head's product with a weight of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from worker_svc.models.products.packed_linear import packed_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.cpu.products.layer_product import Product


class HeadProducts(Protocol):
    """See the module. On a CPU a row's result depends on nothing beside it, bit for bit."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights occupy on the device."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, heads, outputs], x [T, heads, inputs]; elements adjacent, heads and tokens at any stride."""


class PackedHeads:
    """See `HeadProducts`; on a CPU, head by head."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, outputs, inputs]."""
        self._products: Sequence[Product] = [packed_linear(of_head).product for of_head in weight]
        self.weight_bytes = sum(product.weight_bytes for product in self._products)

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `HeadProducts`."""
        for head, product in enumerate(self._products):
            product.multiply(out[:, head], x[:, head])


class BatchedHeads:
    """See `HeadProducts`; on a GPU by its own library: which bits a row gets may depend on how many there are."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, outputs, inputs]."""
        self._weight, self.weight_bytes = weight.transpose(1, 2).contiguous(), weight.nbytes

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `HeadProducts`."""
        torch.bmm(x.transpose(0, 1), self._weight, out=out.transpose(0, 1))


class GroupedHeads:
    """See `HeadProducts`; on a GPU by tiles, of which small and large ones give a row the same bits, for one row as for
    thousands: heads take the places of experts."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, outputs, inputs]."""
        from kernels.gpu.experts.grouped_matmul import grouped_matmul  # here: only workers with a GPU need Triton

        self._multiply, self._weight, self.weight_bytes = grouped_matmul, weight.contiguous(), weight.nbytes

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See `HeadProducts`."""
        num_tokens, num_heads, outputs = out.shape
        starts = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * num_tokens
        made = out.new_empty(num_heads * num_tokens, outputs)
        self._multiply(made, x.transpose(0, 1).reshape(num_heads * num_tokens, -1), self._weight, starts)
        out.copy_(made.view(num_heads, num_tokens, outputs).transpose(0, 1))


def head_products(weight: torch.Tensor, *, is_batch_invariant: bool) -> HeadProducts:
    """The form for the weight's device, as `dense` chooses; weight [heads, outputs, inputs]."""
    if weight.device.type == "cpu":
        return PackedHeads(weight)
    return GroupedHeads(weight) if is_batch_invariant else BatchedHeads(weight)
