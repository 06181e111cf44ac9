"""Dense layers as the library takes them: each says itself how its weight is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.elements import BFLOAT16, element_of
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.packed_weight import Kind, kind_of_packed, packed_shape
from kernels.cpu.products.records import FORMATS, GROUP, Records, RecordWeight
from kernels.int8_weight import GROUP as INT8_GROUP
from kernels.int8_weight import PANEL as INT8_PANEL

_ADDRESS = _COUNT = np.int64
PRODUCT = np.dtype(  # `Product` of native/products.h
    [
        ("kind", np.int64),
        *[(name, _ADDRESS) for name in ("weight", "scale", "bias")],
        *[(name, _COUNT) for name in ("num_in", "num_out")],
        *[(name, np.int64) for name in ("codes", "scale_kind", "offset_kind", "group")],
        *[(name, _ADDRESS) for name in ("order", "next")],
    ]
)
_OF_ROUNDED_ROWS = (Kind.INT8, Kind.ROUNDED_RECORDS)


class Product:
    """A weight with what belongs to it, checked once.

    Attributes:
        kind: how the weight is kept.
        records: of a weight in records, their format.
        record: one of `PRODUCT`, good for as long as this lives.
    """

    def __init__(
        self,
        kind: Kind,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        *sizes: int,
        records: Records | None = None,
        order: torch.Tensor | None = None,
        behind: Product | None = None,
    ) -> None:
        """`sizes`: outputs and inputs; the outputs of the product `behind` follow."""
        num_out, self.in_features = sizes
        self.out_features: int = num_out + (0 if behind is None else behind.out_features)
        self._kept = weight, scale, bias, order
        self.kind, self.records, self._behind = kind, records, behind
        self.weight_bytes = sum(tensor.nbytes for tensor in self._kept if tensor is not None)
        if behind is not None:
            self.weight_bytes += behind.weight_bytes
        of_weight, of_scale, of_bias, of_order = (0 if tensor is None else tensor.data_ptr() for tensor in self._kept)
        format_ = (0, 0, 0, 0) if records is None else (records.codes, records.scale, records.offset, records.group)
        of_behind = 0 if behind is None else behind._address
        fields = (kind, of_weight, of_scale, of_bias, self.in_features, num_out, *format_, of_order, of_behind)
        self.record = np.array(fields, PRODUCT)
        self._address: int = self.record.ctypes.data

    @classmethod
    def of_floats(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int) -> Product:
        """A weight of `pack` or `pack_pairs`. Raises ValueError for one that is not of this size, TypeError for a type
        that no weight is packed in."""
        kind, inputs = kind_of_packed(packed), in_features
        if kind is Kind.PAIRS:
            inputs = in_features // 2 if in_features % 2 == 0 else -1
        if packed.shape != packed_shape(packed.dtype, out_features, inputs) or not packed.is_contiguous():
            raise ValueError(f"weight {tuple(packed.shape)} is not packed for {out_features} x {in_features}")
        _check_bias(bias, out_features)
        return cls(kind, packed, None, bias, out_features, in_features, records=FORMATS.get(packed.dtype))

    @classmethod
    def of_records(
        cls,
        weight: RecordWeight,
        bias: torch.Tensor | None,
        *,
        order: torch.Tensor | None = None,
        are_rows_rounded: bool = False,
    ) -> Product:
        """A weight in records. `order` i64[in_features]: which inputs of a row its columns are for, in turn.

        `are_rows_rounded`: to 8 bits as they come, as those of `of_int8`:

            out[t, o] = bias[o] + sum_g step[t, g] * sum_{k in g} p[t, k] W[o, k]

        p and step as in `reference.int8_linear`, g the groups of 32 inputs. Else `in_features` is a multiple of 32.
        Raises ValueError for what does not fit.
        """
        _check_bias(bias, weight.out_features)
        in_features = weight.in_features
        if order is not None and (order.shape != (in_features,) or order.dtype != torch.int64):
            raise ValueError(f"order {tuple(order.shape)} of {order.dtype} is not int64 for {in_features} inputs")
        if order is not None and not torch.equal(order.sort().values, torch.arange(in_features)):
            raise ValueError(f"order does not have each of {in_features} inputs once")
        codes = weight.records.codes
        if not (codes.are_for_rounded_rows if are_rows_rounded else codes.are_for_plain_rows):
            raise ValueError(
                f"rows that are {'' if are_rows_rounded else 'not '}rounded are not multiplied by {codes.name}"
            )
        if not are_rows_rounded and in_features % GROUP:
            raise ValueError(f"{in_features} inputs are not whole groups of {GROUP}")
        kind, sizes = Kind.ROUNDED_RECORDS if are_rows_rounded else Kind.RECORDS, (weight.out_features, in_features)
        order = None if order is None else order.contiguous()
        return cls(kind, weight.packed, None, bias, *sizes, records=weight.records, order=order)

    @classmethod
    def of_int8(cls, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_features: int) -> Product:
        """A weight as `reference.int8_linear` takes it. Raises ValueError for one that is not of this size."""
        out_features = scale.shape[0]
        expected = (-(-out_features // INT8_PANEL), -(-in_features // INT8_GROUP))
        if packed.shape[:2] != expected or packed.dtype != torch.uint8 or not packed.is_contiguous():
            sizes = f"{tuple(packed.shape)} of {packed.dtype} is not packed for {out_features} x {in_features}"
            raise ValueError(f"weight {sizes}")
        for name, values in (("scale", scale), ("bias", bias)):
            _check_numbers(name, values, out_features)
        return cls(Kind.INT8, packed, scale, bias, out_features, in_features)

    @classmethod
    def side_by_side(cls, products: Sequence[Product]) -> Product | None:
        """One product whose outputs are those of each in turn, whatever their weights are kept in. It has the bits of
        each, but where rows are bfloat16, pairs of which are multiplied by weights of few bits, and not all of these
        are such. None where rows are not prepared for all alike: some rounded, or in an order of their own."""
        *others, last = products
        if not all(one._fits(last) for one in others):
            return None
        joined = last
        for one in reversed(others):
            weight, scale, bias, order = one._kept
            sizes, records = (one.out_features, one.in_features), one.records
            joined = cls(one.kind, weight, scale, bias, *sizes, records=records, order=order, behind=joined)
        return joined

    def _fits(self, other: Product) -> bool:
        mine, its = self._kept[3], other._kept[3]
        return (
            self.in_features == other.in_features
            and (self.kind in _OF_ROUNDED_ROWS) == (other.kind in _OF_ROUNDED_ROWS)
            and Kind.PAIRS not in (self.kind, other.kind)
            and self._behind is None
            and (mine is its or (mine is not None and its is not None and torch.equal(mine, its)))
        )

    def is_for(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type can be multiplied by it."""
        return self.kind is not Kind.PAIRS or dtype == torch.bfloat16

    def workspace_bytes(self, element: int) -> int:
        """What each row takes while it is multiplied, prepared once for all outputs; rows as `element_of` says."""
        num_bytes: int = library().workspace_bytes(self._address, element, 1)
        return num_bytes

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
        if self.kind is Kind.PAIRS and element != BFLOAT16:
            raise TypeError(f"pairs of bfloat16 are multiplied by bfloat16, not {x.dtype}")
        if rows:
            places = out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0)
            library().multiply(self._address, element, *places, rows, num_threads())


def _check_bias(bias: torch.Tensor | None, out_features: int) -> None:
    _check_numbers("bias", bias, out_features)


def _check_numbers(name: str, values: torch.Tensor | None, out_features: int) -> None:
    if values is None:
        return
    if values.dtype != torch.float32 or values.shape != (out_features,) or not values.is_contiguous():
        raise ValueError(f"{name} {tuple(values.shape)} of {values.dtype} is not float32 for {out_features} outputs")
