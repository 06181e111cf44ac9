"""y = x W^T + b with a weight of floating-point numbers on a CPU, packed in the fewest bytes that lose nothing."""

from __future__ import annotations

import torch

from worker_svc.models.products.compiled_linear import CompiledLinear


def packed_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> CompiledLinear:
    """`dtype`: of rows (default: the weight's). A weight of bfloat16 may be for rows of float32.

    With AMX oneDNN has faster products for many rows, but gives a row other bits in some numbers of rows than in
    others: so it is not taken there either.
    """
    # Here, so that a worker with a GPU waits for no compiler of CPU code.
    from kernels.cpu.library import library
    from kernels.cpu.products.layer_product import Product
    from kernels.cpu.products.packed_weight import pack, pack_pairs

    dtype = dtype or weight.dtype
    has_pairs = library().has_pairs and dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    packed = pack_pairs(weight) if has_pairs else pack(weight, dtype)
    return CompiledLinear(Product.of_floats(packed, None if bias is None else bias.float(), *weight.shape))
