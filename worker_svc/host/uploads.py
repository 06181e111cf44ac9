"""Small arrays of a step on their way to the device: one copy for all of them, that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes


def upload(device: str | torch.device, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """Each array as a tensor on `device`. On the CPU they share memory with the arrays, as far as those are contiguous.

    To a GPU they go through pinned memory, which the allocator does not hand out again before the copy is done.
    """
    if torch.device(device).type == "cpu":
        return tuple([torch.from_numpy(np.ascontiguousarray(array)) for array in arrays])
    packed, places = pack(arrays, pin_memory=True)
    return unpack(packed.to(device, non_blocking=True), arrays, places)


def pack(arrays: Sequence[npt.NDArray[Any]], *, pin_memory: bool) -> tuple[torch.Tensor, list[int]]:
    """All arrays one after another as bytes, u8, and where each begins."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    buffer = packed.numpy()
    for array, place in zip(arrays, places, strict=True):
        buffer[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, places


def unpack(packed: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], places: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views of `packed` with the types and shapes of `arrays`."""
    return tuple([_unpacked(packed, array, place) for array, place in zip(arrays, places, strict=True)])


def _unpacked(packed: torch.Tensor, array: npt.NDArray[Any], place: int) -> torch.Tensor:
    flat = packed[place : place + array.nbytes].view(_dtype_of(array.dtype))
    return flat if array.ndim == 1 else flat.view(array.shape)


@cache
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
