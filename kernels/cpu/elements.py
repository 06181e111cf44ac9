"""The types of tensors as the library numbers them (`Element` in native/products.h, and FLOAT16 of a cache)."""

from __future__ import annotations

import torch

FLOAT32, BFLOAT16 = 0, 1
_ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_STORED_ELEMENTS = {**_ELEMENTS, torch.float16: 2}


def element_of(*tensors: torch.Tensor) -> int:
    """Of the tensors' one type, float32 or bfloat16. Raises TypeError for others."""
    dtype = tensors[0].dtype
    if dtype not in _ELEMENTS or not _have(dtype, tensors):
        raise TypeError(f"CPU kernels compute float32 or bfloat16, not {', '.join(str(t.dtype) for t in tensors)}")
    return _ELEMENTS[dtype]


def stored_element_of(*tensors: torch.Tensor) -> int:
    """Of a cache, which may be float16 too, and of another type than what is computed. Raises TypeError for others."""
    dtype = tensors[0].dtype
    if dtype not in _STORED_ELEMENTS or not _have(dtype, tensors):
        raise TypeError(f"a cache is float32, bfloat16 or float16, not {', '.join(str(t.dtype) for t in tensors)}")
    return _STORED_ELEMENTS[dtype]


def _have(dtype: torch.dtype, tensors: tuple[torch.Tensor, ...]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - three times as fast as `all` over a generator, ten times a layer
        if tensor.dtype != dtype:
            return False
    return True
