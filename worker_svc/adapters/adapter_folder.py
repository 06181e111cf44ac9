"""Reads an adapter from PEFT's folder, whole or not at all: every tensor has its place in the model, or it is refused.

adapter_config.json           see `peft_config`
adapter_model.safetensors     base_model.model.MODULE.lora_A.weight [rank, in], ....lora_B.weight [out, rank]
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_svc.adapters.errors import AdapterError
from worker_svc.adapters.peft_config import CONFIG_FILE, PeftConfig
from worker_svc.adapters.sites import Site
from worker_svc.models.checkpoint.checkpoint_files import Tensors, open_checkpoint
from worker_svc.models.checkpoint.fused_parts import in_order, stored_rows
from worker_svc.models.errors import ModelError

WEIGHTS_FILE = "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter of the embedding",
    "embed": "an adapter of the embedding",  # whose base layer PEFT writes too
    "lm_head.": "an adapter of the head",
    ".modules_to_save.": "a module that replaces the base's",
    ".experts.": "an adapter of experts",
    ".bias": "a bias",
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to outputs `first` and on of a product: B A x."""

    a: torch.Tensor  # f32[rank, inputs of this rank of the group]
    b: torch.Tensor  # f32[outputs of this rank, rank], with the scale in it
    first: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """All that one adapter adds, by site: (layer, kind)."""

    base: str  # the model's name in its configuration
    parts: Mapping[tuple[int, str], Sequence[LowRank]]
    digest: bytes  # of both files, which all ranks of a group read

    def pinned(self) -> Adapter:
        """The same in memory that a GPU copies from while the host goes on."""
        return Adapter(
            self.base,
            {
                place: [LowRank(low.a.pin_memory(), low.b.pin_memory(), low.first) for low in parts]
                for place, parts in self.parts.items()
            },
            self.digest,
        )


def read_adapter(folder: Path, sites: Sequence[Site], max_rank: int) -> Adapter:
    """The adapter for a model with these sites. Raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"adapter folder {folder} does not exist")
    config = PeftConfig.read(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}")
    try:
        parts = _Reader(path, config, sites, max_rank).read(open_checkpoint([path], "safetensors"))
    except ModelError as error:
        raise AdapterError(str(error)) from None
    return Adapter(config.base, parts, _sha256(folder / CONFIG_FILE) + _sha256(path))


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class _Reader:
    def __init__(self, path: Path, config: PeftConfig, sites: Sequence[Site], max_rank: int) -> None:
        self._path, self._config, self._max_rank = path, config, max_rank
        self._places = {module: (site, i) for site in sites for i, module in enumerate(site.modules)}

    def read(self, tensors: Tensors) -> dict[tuple[int, str], list[LowRank]]:
        """By site: (layer, kind)."""
        modules: dict[str, set[str]] = {}
        for name in tensors:
            modules.setdefault(self._module_of(name), set()).add(name)
        if not modules:
            raise AdapterError(f"{self._path} holds no tensors")
        self._config.check_patterns(list(self._places))
        self._check_targets(modules)
        parts: dict[tuple[int, str], list[LowRank]] = {}
        for module, names in modules.items():
            if len(names) < 2:
                raise AdapterError(f"{self._path}: tensor {min(names)} is without its other half")
            site, _ = self._places[module]
            if not site.is_here:
                continue  # a rank of that stage reads, and checks, it
            parts.setdefault((site.layer, site.kind), []).append(self._low_rank(module, tensors))
        return parts

    def _check_targets(self, modules: Collection[str]) -> None:
        """A module that lost its tensors would be computed as the base does, and nobody would hear of it."""
        for module, (site, _) in self._places.items():
            is_wanted = self._config.wants(module, site.layer)
            if is_wanted is True and module not in modules:
                raise AdapterError(f"{self._path} has no tensors of {module}, which is among target_modules")
            if is_wanted is False and module in modules:
                raise AdapterError(f"{self._path} has tensors of {module}, which is not among target_modules")

    def _module_of(self, name: str) -> str:
        if (match := _TENSOR.fullmatch(name)) and match[1] in self._places:
            return match[1]
        for sign, what in _OTHER_KINDS.items():
            if sign in name:
                raise AdapterError(f"{self._path}: tensor {name} is {what}, which is not supported")
        raise AdapterError(f"{self._path}: the model has no place for tensor {name}")

    def _low_rank(self, module: str, tensors: Tensors) -> LowRank:
        site, index = self._places[module]
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterError(f"{self._path}: rank {rank} of {module} is more than --max-lora-rank, {self._max_rank}")
        is_fused = len(site.modules) < len(site.sizes)
        sizes, outputs = (site.sizes, site.outputs) if is_fused else ([site.sizes[index]], [site.outputs[index]])
        a = self._read(
            f"base_model.model.{module}.lora_A.weight", tensors, (rank, site.in_features), columns=site.inputs
        )
        rows = stored_rows(sizes, outputs, site.num_turns, is_fused=True)  # of one tensor
        b = self._read(f"base_model.model.{module}.lora_B.weight", tensors, (sum(sizes), rank), rows=rows)
        b = in_order(b, sizes, site.num_turns) * (scale := self._config.scale_of(module))
        if not b.isfinite().all():
            raise AdapterError(f"{self._path}: B of {module} times its scale, {scale:g}, is not finite")
        first = 0 if is_fused else sum(map(len, site.outputs[:index]))
        return LowRank(a, b.contiguous(), first)

    def _read(
        self,
        name: str,
        tensors: Tensors,
        shape: tuple[int, int],
        rows: Sequence[range] | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """These parts of a tensor of this shape, in float32."""
        stored = tensors[name]
        if stored.shape != shape:
            raise AdapterError(f"{self._path}: tensor {name} is {list(stored.shape)}, this model wants {list(shape)}")
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise AdapterError(f"{self._path}: tensor {name} is of type {str(stored.dtype).removeprefix('torch.')}")
        rows, columns = [range(shape[0])] if rows is None else rows, range(shape[1]) if columns is None else columns
        out = torch.empty(sum(map(len, rows)), len(columns))
        stored.read_into(out, rows, [columns])
        if not out.isfinite().all():
            raise AdapterError(f"{self._path}: tensor {name} has numbers that are not finite")
        return out
