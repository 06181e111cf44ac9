"""Dense layers as the library takes them: each says itself how its weight is kept."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from kernels.cpu.elements import BFLOAT16, element_of
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.few_bits import FORMATS
from kernels.cpu.products.packed_weight import kind_of_packed, packed_shape
from kernels.int8_weight import GROUP as INT8_GROUP
from kernels.int8_weight import PANEL as INT8_PANEL

FIELDS = ("kind", "weight", "scale", "bias", "num_in", "num_out")
PRODUCT = np.dtype([(name, np.int64) for name in FIELDS])  # `Product` of native/products.h
_RECORD: Any = ctypes.c_int64 * len(FIELDS)
_PAIRS = 5
_INT8 = 6
_INT4 = {torch.uint8: 7, torch.int32: 8}  # by the type of the packed weight: with minima, without


class Product:
    """A weight with what belongs to it, checked once; `record`, of `PRODUCT`, is good for as long as this lives."""

    def __init__(
        self, kind: int, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, *sizes: int
    ) -> None:
        self.out_features, self.in_features = sizes
        self._kept = weight, scale, bias
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self._kept]
        self._kind = kind
        self.record = (kind, *addresses, self.in_features, self.out_features)
        self._passed = _RECORD(*self.record)

    @classmethod
    def of_floats(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> Product:
        """A weight of `pack` or `pack_pairs`. Raises ValueError for one that is not of this size, TypeError for a type
        that no weight is packed in."""
        kind, inputs = kind_of_packed(packed), in_features
        if kind == _PAIRS:
            inputs = in_features // 2 if in_features % 2 == 0 else -1
        if packed.shape != packed_shape(packed.dtype, out_features, inputs) or not packed.is_contiguous():
            raise ValueError(f"weight {tuple(packed.shape)} is not packed for {out_features} x {in_features}")
        _check_bias(bias, out_features)
        return cls(kind, packed, None, bias, out_features, in_features)

    @classmethod
    def of_int4(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> Product:
        """A weight as `int4_linear` takes it. Raises ValueError for one that is not of this size."""
        if not is_int4_weight(packed, out_features, in_features):
            sizes = f"{tuple(packed.shape)} of {packed.dtype} is not of 4 bits for {out_features} x {in_features}"
            raise ValueError(f"weight {sizes}")
        _check_bias(bias, out_features)
        return cls(_INT4[packed.dtype], packed, None, bias, out_features, in_features)

    @classmethod
    def of_int8(cls, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_features: int) -> Product:
        """A weight as `int8_linear` takes it. Raises ValueError for one that is not of this size."""
        out_features = scale.shape[0]
        expected = (-(-out_features // INT8_PANEL), -(-in_features // INT8_GROUP))
        if packed.shape[:2] != expected or packed.dtype != torch.uint8 or not packed.is_contiguous():
            sizes = f"{tuple(packed.shape)} of {packed.dtype} is not packed for {out_features} x {in_features}"
            raise ValueError(f"weight {sizes}")
        for name, values in (("scale", scale), ("bias", bias)):
            _check_numbers(name, values, out_features)
        return cls(_INT8, packed, scale, bias, out_features, in_features)

    def is_for(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type can be multiplied by it."""
        return self._kind != _PAIRS or dtype == torch.bfloat16

    def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, out_features] = x [T, in_features] W^T + bias; both may be strided in their first dimension. Raises
        ValueError for shapes that do not fit, TypeError for types."""
        rows = x.shape[0]
        if out.shape != (rows, self.out_features) or x.shape[1] != self.in_features:
            fitting = f"{self.out_features} outputs of {self.in_features} inputs"
            raise ValueError(f"out {tuple(out.shape)} or x {tuple(x.shape)} does not fit {fitting}, line by line")
        if (out.stride(1) != 1 and out.shape[1] > 1) or (x.stride(1) != 1 and x.shape[1] > 1):
            raise ValueError(f"out {tuple(out.shape)} or x {tuple(x.shape)} does not lie line by line")
        element = element_of(out, x)
        if self._kind == _PAIRS and element != BFLOAT16:
            raise TypeError(f"pairs of bfloat16 are multiplied by bfloat16, not {x.dtype}")
        if rows:
            places = out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0)
            library().multiply(ctypes.addressof(self._passed), element, *places, rows, num_threads())


def is_int4_weight(packed: torch.Tensor, out_features: int, in_features: int) -> bool:
    """Whether it is packed as four bits a number for so many outputs and inputs."""
    few = FORMATS.get(packed.dtype)
    has_size = packed.shape == packed_shape(packed.dtype, out_features, in_features)
    return few is not None and few.bits == 4 and has_size and packed.is_contiguous()


def _check_bias(bias: torch.Tensor | None, out_features: int) -> None:
    _check_numbers("bias", bias, out_features)


def _check_numbers(name: str, values: torch.Tensor | None, out_features: int) -> None:
    if values is None:
        return
    if values.dtype != torch.float32 or values.shape != (out_features,) or not values.is_contiguous():
        raise ValueError(f"{name} {tuple(values.shape)} of {values.dtype} is not float32 for {out_features} outputs")
