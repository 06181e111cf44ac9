"""What launchers refuse before a kernel touches a wrong address: ValueErrors that name operation and tensor."""

from __future__ import annotations

import torch


def check_rows(operation: str, **tensors: torch.Tensor | None) -> None:
    """All are [T, n] of one type on one device, a row's elements next to each other; rows may lie apart."""
    first: torch.Tensor | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
            raise ValueError(
                f"{operation}: {name} must be rows of adjacent elements, not {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )
        first = tensor if first is None else first
        if tensor.shape != first.shape:
            raise ValueError(
                f"{operation}: {name} is {tuple(tensor.shape)}, not {tuple(first.shape)} as the others are"
            )
        check_alike(operation, name, tensor, first)


def check_alike(operation: str, name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Both are of one type and on one device."""
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(
            f"{operation}: {name} is {tensor.dtype} on {tensor.device}, not {other.dtype} on {other.device}"
        )


def check_contiguous(
    operation: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """It has this shape, lies on the device of `like`, and its elements are next to each other in order."""
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} must be contiguous {shape}, not {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{operation}: {name} is on {tensor.device}, not on {like.device}")
