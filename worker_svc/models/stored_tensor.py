"""A tensor of a checkpoint, known by shape and type before a byte of it is read, and read into the place it is for.

Read and not mapped: a map's pages stay in the process beside the copy that the device needs, a tensor of another type
or one of several parts would be copied twice, and a file that is shortened meanwhile would end the process with SIGBUS.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from worker_svc.models.errors import ModelError

_PIECE_BYTES = 4 << 20  # what is converted or sent to a device at once: it stays in the last cache level


class StoredTensor(Protocol):
    """Where a tensor is and what it looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read_into(self, out: torch.Tensor) -> None:
        """Fills `out`, contiguous and of this shape, of any type, on any device. Raises ModelError."""


class OpenFile:
    """A file to read at any place; closed with its last reference."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)  # the disk reads on while weights are packed

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fills `out`, of bytes. Raises ModelError where the file ends before."""
        while out:
            num_bytes = os.preadv(self._descriptor, [out], offset)
            if num_bytes == 0:
                raise ModelError(f"{self._path} has become shorter while it was read")
            out, offset = out[num_bytes:], offset + num_bytes


class FileTensor:
    """Numbers that lie one after the other in a file, from `offset` on."""

    def __init__(self, file: OpenFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self._file, self._offset = shape, dtype, file, offset

    def read_into(self, out: torch.Tensor) -> None:
        """See `StoredTensor`; other types and devices take a piece of _PIECE_BYTES beside it."""
        flat = out.view(-1)
        if out.dtype == self.dtype and out.device.type == "cpu":
            self._read(flat, 0)
            return
        size = max(min(_PIECE_BYTES // self.dtype.itemsize, flat.numel()), 1)
        piece = torch.empty(size, dtype=self.dtype)
        for start in range(0, flat.numel(), size):
            part = piece[: min(size, flat.numel() - start)]
            self._read(part, start)
            flat[start : start + part.numel()].copy_(part)

    def _read(self, out: torch.Tensor, start: int) -> None:
        """Elements from number `start` on."""
        self._file.read_into(out.view(torch.uint8).numpy().data, self._offset + start * self.dtype.itemsize)


class MadeTensor:
    """One that a function makes, of a format that has no plain numbers."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> None:
        self.shape, self.dtype, self._make = shape, dtype, make

    def read_into(self, out: torch.Tensor) -> None:
        """See `StoredTensor`; makes the whole tensor first."""
        out.copy_(self._make())


def num_bytes(tensor: StoredTensor) -> int:
    """What it takes as it is stored, or is made as."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize
