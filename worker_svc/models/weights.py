"""Where weights come from: safetensors files or thin air, behind one `take`.

A model takes each tensor once, by name and expected shape; `finish` then complains about tensors that nobody took, so
that a checkpoint is understood whole or refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.models.errors import ModelError


class Weights(Protocol):
    """Tensors by name, each to be taken once."""

    def has(self, name: str) -> bool:
        """Whether this tensor can be taken."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, in the model's dtype and on its device; raises `ModelError` if missing or of another shape."""

    def ignore(self, name: str) -> None:
        """This tensor may exist and is not needed."""

    def finish(self) -> None:
        """Raise `ModelError` if a tensor has been left."""


class SafetensorsWeights:
    """Memory-mapped files of one folder: `model.safetensors`, or the shards that an index or the folder names."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._files: dict[str, safe_open] = {}  # name of a tensor not yet taken -> its open file
        for path in self._paths():
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {path}: {error}") from None
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping and cannot be iterated
                if name in self._files:
                    raise ModelError(f"{folder}: tensor {name} is in more than one file")
                self._files[name] = file

    def has(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"{self._folder}: the checkpoint has no tensor {name}")
        tensor = self._files.pop(name).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._folder}: tensor {name} is {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor.to(device=self._device, dtype=self._dtype)

    def ignore(self, name: str) -> None:
        self._files.pop(name, None)

    def finish(self) -> None:
        if self._files:
            names = sorted(self._files)
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{self._folder}: the model has no place for tensor {names[0]}{others}")

    def _paths(self) -> list[Path]:
        single, index = self._folder / "model.safetensors", self._folder / "model.safetensors.index.json"
        if single.exists():
            return [single]
        if not index.exists():
            raise ModelError(f"{self._folder} holds neither model.safetensors nor model.safetensors.index.json")
        paths = [self._folder / name for name in sorted(set(self._index().values()))]
        for path in paths:
            if not path.exists():
                raise ModelError(f"{index} names {path.name}, which does not exist")
        return paths

    def _index(self) -> dict[str, str]:
        path = self._folder / "model.safetensors.index.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ModelError(f"{path} has no readable weight_map") from None


class DummyWeights:
    """Small random numbers for any shape, the same for the same model and seed: load tests need no checkpoint."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        numbers = torch.empty(shape, dtype=torch.float32).uniform_(-1, 1, generator=self._generator)
        return (numbers / shape[-1] ** 0.5).to(device=self._device, dtype=self._dtype)

    def ignore(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass
