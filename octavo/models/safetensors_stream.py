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


@dataclass(frozen=True)
class PendingTensor:
    """A float32 tensor that is known by shape and made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]  # float32 of `shape`


def write_safetensors(path: Path, tensors: Iterable[PendingTensor]) -> None:
    """Write `tensors` as float32. Raises ValueError when one is not of the shape it announced."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 4 * int(np.prod(tensor.shape, dtype=np.int64))
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.load(), dtype="<f4")
            if data.shape != tensor.shape:
                raise ValueError(f"tensor {tensor.name} has shape {data.shape}, not {tensor.shape}")
            file.write(data.data)
