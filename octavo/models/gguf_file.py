"""What a GGUF file says of itself, and where its tensors lie: its header read once, the rest mapped.

    magic "GGUF" | u32 version | u64 tensors | u64 keys
    a key:     string name | u32 type | value;  an array: u32 type of its values | u64 count | values;
               a string: u64 length | UTF-8
    a tensor:  string name | u32 dimensions | u64 each, innermost first | u32 type of numbers | u64 offset of its data

All little-endian; data begins at the next multiple of `general.alignment`. The layout is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader makes several arrays of each
string: it takes 4.9 s of a core for 128,256 tokens and as many merges, this 0.06 s (`benchmarks.beside_libraries`).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.models.errors import GGUFError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_VERSIONS = (2, 3)
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor: `data` [outermost, ..., innermost] lies in the file's map, and cannot be written to. Of types that
    numpy has not the innermost dimension is bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost first
    data: np.ndarray


class GgufFile:
    """`values`: the metadata by key; `tensors`: as the file has them in turn."""

    def __init__(self, path: Path) -> None:
        """Raises GGUFError for what is no whole GGUF file."""
        self._at = 0
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ValueError of an empty file
            self.values, self.tensors = self._read()
        except OSError as error:
            raise GGUFError(f"this is not a readable GGUF file: {error.strerror}") from None
        except (struct.error, ValueError, OverflowError) as error:  # of a length or a type that cannot be
            raise GGUFError(f"this is not a readable GGUF file: damaged near byte {self._at}, {error}") from None

    def _read(self) -> tuple[dict[str, Any], list[FileTensor]]:
        if (magic := self._bytes(4)) != b"GGUF":
            raise ValueError(f"it begins with {magic!r}")
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            raise GGUFError(f"GGUF files of version {version} are not read, only little-endian ones of 2 and 3")
        num_tensors, num_keys = self._unpack("<QQ")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            name, (kind,) = self._string(), self._unpack("<I")
            if name in values:
                raise ValueError(f"{name} is there twice")
            values[name] = self._value(kind)
        described = [self._described() for _ in range(num_tensors)]
        if len({name for name, *_ in described}) < len(described):
            raise ValueError("a tensor is there twice")
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.40}")
        start = -(-self._at // alignment) * alignment
        return values, [self._tensor(start, *each) for each in described]

    def _bytes(self, count: int) -> bytes:
        found = self._map[self._at : self._at + count]
        if len(found) < count:
            raise ValueError(f"which is {count} bytes before an end that it has not")
        self._at += count
        return found

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return found

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._map, self._at)
        self._at += 8
        return self._bytes(length).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of_items, count = self._unpack("<IQ")
            if of_items == _STRING:
                return [self._string() for _ in range(count)]
            return self._numbers(of_items, count).tolist()
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:  # arrays of arrays, too, which no file has
            raise ValueError(f"a value of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        """Of a tensor: name, shape, type, offset."""
        name, (num_dimensions,) = self._string(), self._unpack("<I")
        shape = self._unpack(f"<{num_dimensions}Q")[::-1]
        return name, shape, *self._unpack("<IQ")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> FileTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            of_kind = GGMLQuantizationType(kind)
        except ValueError:  # of a newer llama.cpp than the package knows: nothing is damaged
            raise GGUFError(f"tensor {name!r} is of type {kind}, which is not read") from None
        inner, block, block_bytes = shape[-1] if shape else 1, *GGML_QUANT_SIZES[of_kind]
        if inner % block:
            raise ValueError(f"tensor {name} has rows of {inner} numbers, which are no blocks of {block}")
        dtype, row_bytes = np.dtype(_PLAIN.get(of_kind.name, "u1")), inner // block * block_bytes
        count = math.prod(shape[:-1]) * row_bytes // dtype.itemsize
        if start + offset + count * dtype.itemsize > len(self._map):
            raise ValueError(f"tensor {name} is not all in the file")
        data = np.frombuffer(self._map, dtype, count, start + offset)
        return FileTensor(name, of_kind, shape, data.reshape(*shape[:-1], row_bytes // dtype.itemsize))


_LENGTH = struct.Struct("<Q")
