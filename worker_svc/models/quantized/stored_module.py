"""The tensors that a checkpoint has of one layer, by the last part of their names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.errors import ModelError


class StoredModule:
    """`name`: of the layer, without a dot at its end; `kind`: the format that it is read as."""

    def __init__(self, folder: Path, kind: str, name: str, tensors: dict[str, StoredTensor]) -> None:
        self.folder, self.kind, self.name, self.tensors = folder, kind, name, tensors

    def error(self, what: str) -> ModelError:
        """What is wrong, with file, format and layer in front."""
        return ModelError(f"{self.folder}: {self.kind} layer {self.name}: {what}")

    def need(self, leaf: str, dtypes: Collection[torch.dtype], num_dimensions: int = 2) -> StoredTensor:
        """A tensor that the format cannot do without. Raises ModelError."""
        tensor = self.tensors.get(leaf)
        if tensor is None:
            raise self.error(f"the checkpoint has no tensor {leaf}")
        return self._checked(leaf, tensor, dtypes, num_dimensions)

    def find(self, leaf: str, dtypes: Collection[torch.dtype], num_dimensions: int = 2) -> StoredTensor | None:
        """One that it can do without. Raises ModelError for one of another type."""
        tensor = self.tensors.get(leaf)
        return None if tensor is None else self._checked(leaf, tensor, dtypes, num_dimensions)

    def check_shape(self, leaf: str, *expected: int) -> None:
        """Raises ModelError for another one."""
        if (shape := self.tensors[leaf].shape) != expected:
            raise self.error(f"{leaf} is {list(shape)}, the layer's other tensors make it {list(expected)}")

    def _checked(
        self, leaf: str, tensor: StoredTensor, dtypes: Collection[torch.dtype], num_dimensions: int
    ) -> StoredTensor:
        if tensor.dtype not in dtypes or (num_dimensions >= 0 and len(tensor.shape) != num_dimensions):
            found = f"{_short(tensor.dtype)} {list(tensor.shape)}"
            dimensions = f" of {num_dimensions} dimensions" if num_dimensions >= 0 else ""
            raise self.error(f"{leaf} is {found}, not {' or '.join(map(_short, dtypes))}{dimensions}")
        if 0 in tensor.shape:
            raise self.error(f"{leaf} is {list(tensor.shape)}, which holds no numbers")
        return tensor

    @property
    def num_bytes(self) -> int:
        """Of all of its tensors."""
        return sum(tensor.dtype.itemsize * torch.Size(tensor.shape).numel() for tensor in self.tensors.values())


def read_block(tensor: StoredTensor, rows: range, columns: range, device: torch.device) -> torch.Tensor:
    """Rows and columns of a tensor with two dimensions, in its own type."""
    out = torch.empty(len(rows), len(columns), dtype=tensor.dtype, device=device)
    tensor.read_into(out, [rows], [columns])
    return out


def read_all(tensor: StoredTensor, device: torch.device) -> torch.Tensor:
    """A small tensor, in its own type."""
    shape = tensor.shape or (1,)
    out = torch.empty(shape, dtype=tensor.dtype, device=device)
    tensor.read_into(out, [range(shape[0])], [range(shape[-1])])
    return out


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
