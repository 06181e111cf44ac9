"""Writes a safetensors file one tensor at a time, so that memory holds one tensor and not the whole model.

Layout: header length as little-endian uint64, JSON header padded with spaces to 8 bytes, then the raw tensors in the
order of the header (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NUMBERS: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is known by shape and made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]  # of `shape`
    dtype: str = "F32"  # a key of `_NUMBERS`

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return _NUMBERS[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


def write_safetensors(
    path: Path, tensors: Iterable[PendingTensor], written: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Write `tensors`; `written` is told how large each was.

    Raises ValueError when one is not of the shape it announced.
    """
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.load(), dtype=_NUMBERS[tensor.dtype])
            if data.shape != tensor.shape:
                raise ValueError(f"tensor {tensor.name} has shape {data.shape}, not {tensor.shape}")
            file.write(data.data)
            written(tensor.num_bytes)
