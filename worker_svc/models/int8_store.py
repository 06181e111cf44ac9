"""The products of a model with weights of eight bits or four: made once, and read from a file at every later start.

A weight whose numbers come from four bits each keeps these (`Int4Linear`); any other is quantised to eight.

The file lies in Octavo's cache, beside the models. Its name holds the model's hash, the type that the weights were read
in and the version of the layout: a file that is there fits. It is written whole and then renamed. One that cannot be
read or written costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open

from kernels.int8_weight import GROUP, PANEL, pack_int8, quantize_int8
from octavo.models.safetensors_stream import PendingTensor, write_safetensors
from octavo.shared.cache import cache_dir
from worker_svc.host.huge_pages import HugePages
from worker_svc.models.int4_linear import Int4Linear
from worker_svc.models.int8_linear import Int8Linear
from worker_svc.models.parts import ModelPart

log = structlog.get_logger()

_LAYOUT_VERSION = 2  # to be counted up with every change of what is made of the same weights
_PACKED, _SCALE, _BIAS = "packed", "scale", "bias"


class Int8Store:
    """Products of 8-bit or 4-bit weights by name in the checkpoint; `path` None keeps nothing for later starts."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._started_s = path, time.monotonic()
        self._products: dict[str, Int8Linear | Int4Linear] = {}
        self._num_made, self._memory = 0, HugePages()
        self._stored = _read(path) if path is not None else {}

    @classmethod
    def of_model(cls, part: ModelPart) -> Int8Store:
        """The store of a checkpoint's products, or of those of a stage."""
        config, layers = part.whole, part.layers
        dtype = str(config.dtype).removeprefix("torch.")
        of_stage = f"-layers-{layers.start}-{layers.stop}" if part.stages.count > 1 else ""
        name = f"{config.model_hash[:32]}-{dtype}-int8-{_LAYOUT_VERSION}{of_stage}.safetensors"
        return cls(cache_dir() / "quantized" / name)

    def find(self, name: str, out_features: int, in_features: int) -> Int8Linear | Int4Linear | None:
        """The product that an earlier start kept; None where there is none of these sizes."""
        packed, scale, bias = (self._stored.pop(f"{name}.{part}", None) for part in (_PACKED, _SCALE, _BIAS))
        if packed is None:
            return None
        bias = None if bias is None else bias.clone()
        if scale is None:
            is_whole = Int4Linear.is_packed(packed, out_features, in_features)
            return self._keep_four_bits(name, packed, bias, out_features) if is_whole else None
        if tuple(scale.shape) != (out_features,):
            return None
        if tuple(packed.shape[:2]) != (-(-out_features // PANEL), -(-in_features // GROUP)):
            return None
        return self._keep(name, packed, scale.clone(), bias)

    def make(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear | Int4Linear:
        """Quantises a product; its weight [out_features, in_features] is not needed afterwards."""
        self._num_made += 1
        bias = None if bias is None else bias.float()
        if (packed := Int4Linear.pack(weight)) is not None:
            return self._keep_four_bits(name, packed, bias, len(weight))
        quantized, scale = quantize_int8(weight)
        return self._keep(name, pack_int8(quantized), scale, bias)

    def _keep(self, name: str, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        product = self._products[name] = Int8Linear(self._memory.keep(packed), scale, bias)
        return product

    def _keep_four_bits(
        self, name: str, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> Int4Linear:
        product = self._products[name] = Int4Linear(self._memory.keep(packed), bias, out_features)
        return product

    def finish(self) -> None:
        """All products are made or found: writes the file unless it had them all."""
        products, self._products, self._stored = self._products, {}, {}
        if self._path is None or not self._num_made:
            return
        seconds = round(time.monotonic() - self._started_s, 2)
        log.info("weights quantised to int8", products=self._num_made, seconds=seconds, kept_in=str(self._path))
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(partial, _tensors(products))
            partial.replace(self._path)
        except OSError as error:
            log.warning("quantised weights are not kept", path=str(self._path), error=error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink()


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Everything in the file; may lie in the file's map until it is kept, as a step must not wait for the disk."""
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        log.warning("quantised weights cannot be read, and are made again", path=str(path), error=str(error))
        return {}


def _tensors(products: dict[str, Int8Linear | Int4Linear]) -> list[PendingTensor]:
    pending = []
    for name, product in products.items():
        scale = product.scale if isinstance(product, Int8Linear) else None
        for part, tensor in {_PACKED: product.packed, _SCALE: scale, _BIAS: product.bias}.items():
            if tensor is not None:
                pending.append(PendingTensor(f"{name}.{part}", tuple(tensor.shape), tensor.numpy, _TYPES[tensor.dtype]))
    return pending


_TYPES = {torch.uint8: "U8", torch.int32: "I32", torch.float32: "F32"}
