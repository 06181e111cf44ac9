"""What compiled code is handed: types as the library numbers them (`Element` in native/products.h), layouts, checks."""

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


def check_integers(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises ValueError for one that is not of this type, with what a line of it holds side by side."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise ValueError(f"{name} is {tensor.dtype} of strides {tensor.stride()}, not {dtype} line by line")


def check_heads(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor [rows, heads, head_size] whose rows are not heads one after the other."""
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or not (tensor.shape[0] == 0 or tensor[0].is_contiguous()):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} of strides {tensor.stride()} has no contiguous rows of heads"
            )


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raises ValueError for caches that are not [blocks, kv heads, block size, head size], alike and contiguous."""
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        raise ValueError(f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} are not alike")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError(f"caches of strides {key_cache.stride()} and {value_cache.stride()} are not contiguous")


def _have(dtype: torch.dtype, tensors: tuple[torch.Tensor, ...]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - three times as fast as `all` over a generator, ten times a layer
        if tensor.dtype != dtype:
            return False
    return True
