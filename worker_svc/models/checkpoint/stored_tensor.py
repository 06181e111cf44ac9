"""A tensor of a checkpoint, known by shape and type before a byte of it is read, and read into the place it is for.

Read and not mapped: a map's pages stay in the process beside the copy that the device needs, a tensor of another type
or one of several parts would be copied twice, and a file that is shortened meanwhile would end the process with SIGBUS.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from worker_svc.models.errors import ModelError

_PIECE_BYTES = 4 << 20  # what is converted or sent to a device at once: it stays in the last cache level


class StoredTensor(Protocol):
    """Where a tensor is and what it looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int  # in the file

    def read_into(self, out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]) -> None:
        """Fills `out`, contiguous, of any type, on any device, with these rows one after the other, and of their last
        dimension with these columns side by side. Of a tensor with one dimension, all are rows; a number is a row, too.
        Raises ModelError."""


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
        self.num_bytes = math.prod(shape) * dtype.itemsize

    def read_into(self, out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]) -> None:
        """See `StoredTensor`; reads nothing else. Other types and devices, and columns, take a piece of _PIECE_BYTES
        beside it."""
        row_size = math.prod(self.shape[1:])
        for part, some, across in _parts(out, rows, columns):
            if part.dim() > 1 and len(across) < self.shape[-1]:
                self._read_columns(part, some, across)
            elif out.dtype == self.dtype and out.device.type == "cpu":
                self._read(part.view(-1), some.start * row_size)
            else:
                self._convert(part.view(-1), some.start * row_size)

    def part(self, index: int, shape: tuple[int, ...]) -> FileTensor:
        """What lies at `index` of the first dimension, in a shape of as many numbers."""
        offset = self._offset + index * math.prod(shape) * self.dtype.itemsize
        return FileTensor(self._file, offset, shape, self.dtype)

    def _convert(self, out: torch.Tensor, first: int) -> None:
        size = max(min(_PIECE_BYTES // self.dtype.itemsize, out.numel()), 1)
        piece = torch.empty(size, dtype=self.dtype)
        for start in range(0, out.numel(), size):
            part = piece[: min(size, out.numel() - start)]
            self._read(part, first + start)
            out[start : start + part.numel()].copy_(part)

    def _read_columns(self, out: torch.Tensor, rows: range, columns: range) -> None:
        """Row by row, of a tensor [rows, columns]."""
        row_bytes, num_bytes = self.shape[1] * self.dtype.itemsize, len(columns) * self.dtype.itemsize
        most = max(_PIECE_BYTES // max(num_bytes, 1), 1)
        piece = torch.empty(min(most, len(rows)), len(columns), dtype=self.dtype)
        data = piece.view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(rows), most):
            part = piece[: len(rows) - start]
            offset = self._offset + (rows.start + start) * row_bytes + columns.start * self.dtype.itemsize
            for index in range(len(part)):
                self._file.read_into(data[index * num_bytes : (index + 1) * num_bytes], offset + index * row_bytes)
            out[start : start + len(part)].copy_(part)

    def _read(self, out: torch.Tensor, start: int) -> None:
        """Elements from number `start` on."""
        self._file.read_into(out.view(torch.uint8).numpy().data, self._offset + start * self.dtype.itemsize)


class MadeTensor:
    """One that a function makes, of a format that has no plain numbers."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[], torch.Tensor],
        num_bytes: int | None = None,
    ) -> None:
        """`num_bytes`: in the file; None: as many as the numbers have that are made."""
        self.shape, self.dtype, self._make = shape, dtype, make
        self.num_bytes = math.prod(shape) * dtype.itemsize if num_bytes is None else num_bytes

    def part(self, index: int, shape: tuple[int, ...]) -> MadeTensor:
        """What lies at `index` of the first dimension, in a shape of as many numbers; of one that is cheap to make."""
        return MadeTensor(shape, self.dtype, lambda: self._make()[index].reshape(shape))

    def read_into(self, out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]) -> None:
        """See `StoredTensor`; makes the whole tensor first, once."""
        made = self._make()
        made = made if made.dim() else made[None]
        for part, some, across in _parts(out, rows, columns):
            wanted = made[some.start : some.stop]
            part.copy_(wanted if part.dim() == 1 else wanted[..., across.start : across.stop])


def _parts(
    out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]
) -> Iterator[tuple[torch.Tensor, range, range]]:
    """Where in `out` the numbers of each of these rows and columns belong."""
    for some, of_rows in zip(rows, out.split([len(some) for some in rows]), strict=True):
        if out.dim() == 1:
            yield of_rows, some, range(1)
            continue
        widths = [len(across) for across in columns]
        for across, part in zip(columns, of_rows.split(widths, dim=-1), strict=True):
            yield part, some, across
